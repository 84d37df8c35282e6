// The list of runs, with a filter, sorting, and boxes to choose runs for comparison.
// In: /api/runs, again whenever it changes. Out: an element.

import { freshId, make, mark, Rows, say } from "./elements.js";
import { figureOf, isKnown, memory, oneLine, rate, settingsOf, share, when, whenInFull } from "./shown.js";

const COLUMNS = [
  { key: "state", label: "state", of: (run) => run.state },
  { key: "name", label: "run", of: (run) => run.name.slice(0, 200).toLowerCase() },
  { key: "speed", label: figureOf("samples_per_s").label, of: (run) => run.samples_per_s, isNumber: true },
  { key: "wait", label: figureOf("wait_fraction").label, of: (run) => run.wait_fraction, isNumber: true },
  { key: "memory", label: "peak memory", of: (run) => run.peak_bytes, isNumber: true },
  { key: "began", label: "began", of: (run) => run.started_s, isNumber: true },
];

export class RunsView {
  #runs = [];
  #sort = { key: "began", isDown: true };
  #heads = new Map();

  /** `chosen`: a Set of ids; `onChosen()` is called when it changes. */
  constructor(chosen, onChosen) {
    this.chosen = chosen;
    this.onChosen = onChosen;
    this.title = make("h1", { tabindex: "-1" }, "Runs");
    const id = freshId("filter");
    this.filter = make("input", {
      id,
      type: "search",
      placeholder: "name, id, state, host, settings",
      spellcheck: "false",
      oninput: () => this.#show(),
    });
    this.count = make("p", { class: "small muted", role: "status" });
    this.compare = make("a", { class: "button", href: "#compare=" }, "Compare");
    const body = make("tbody");
    this.rows = new Rows(body, (run) => this.#row(run));
    const heads = COLUMNS.map((column) => {
      const head = make(
        "th",
        { scope: "col", class: `${column.key}${column.isNumber ? " number" : ""}` },
        make("button", { type: "button", class: "sort", onclick: () => this.#sortBy(column.key) }, column.label),
      );
      this.#heads.set(column.key, head);
      return head;
    });
    this.table = make(
      "table",
      { class: "runs" },
      make("caption", { class: "unseen" }, "Recorded runs"),
      make(
        "thead",
        {},
        make("tr", {}, make("th", { scope: "col" }, make("span", { class: "unseen" }, "compare")), ...heads),
      ),
      body,
    );
    this.empty = make("p", { class: "empty" }, "Reading…");
    this.element = make(
      "div",
      { class: "list" },
      make(
        "header",
        { class: "heading row" },
        this.title,
        make("span", { class: "row filter" }, make("label", { for: id, class: "small" }, "filter"), this.filter),
        this.compare,
        this.count,
      ),
      this.empty,
      this.table,
    );
    this.table.hidden = true;
  }

  get name() {
    return "Runs";
  }

  runsChanged({ runs }) {
    this.#runs = runs;
    this.#show();
  }

  dayChanged() {
    this.#show();
  }

  close() {}

  #sortBy(key) {
    const isSame = this.#sort.key === key;
    this.#sort = { key, isDown: isSame ? !this.#sort.isDown : key !== "name" && key !== "state" };
    this.#show();
  }

  #show() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#runs.filter((run) => {
      const text = [run.name, run.id, run.state, run.host, run.what ?? "", settingsOf(run)].join(" ").toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const { key, isDown } = this.#sort;
    const { of } = COLUMNS.find((column) => column.key === key);
    const order = isDown ? -1 : 1;
    const rank = (value) => (typeof value === "string" || isKnown(value) ? 0 : 1);
    // Unknown values come last in either direction.
    found.sort((a, b) => {
      const [x, y] = [of(a), of(b)];
      return rank(x) - rank(y) || (x < y ? -order : x > y ? order : b.started_s - a.started_s);
    });
    for (const [each, head] of this.#heads)
      mark(head, "aria-sort", each === key ? (isDown ? "descending" : "ascending") : null);
    const focused = document.activeElement;
    this.rows.show(
      found,
      (run) => run.id,
      (row, run) => this.#fill(row, run),
    );
    if (focused !== document.activeElement && this.table.contains(focused)) focused.focus();
    this.table.hidden = !found.length;
    this.empty.hidden = found.length > 0;
    say(
      this.empty,
      this.#runs.length
        ? "No run matches the filter."
        : "No run is recorded yet. Put penstock.Monitor around a training, and it appears here.",
    );
    say(
      this.count,
      found.length === this.#runs.length ? `${found.length} runs` : `${found.length} of ${this.#runs.length} runs`,
    );
    this.chosenChanged();
  }

  /** Another view has changed the choice. */
  chosenChanged() {
    for (const [id, row] of this.rows.rows) row.box.checked = this.chosen.has(id);
    mark(this.compare, "href", `#compare=${[...this.chosen].join(",")}`);
    say(this.compare, this.chosen.size ? `Compare ${this.chosen.size}` : "Compare");
  }

  #row(run) {
    const box = make("input", {
      type: "checkbox",
      onchange: () => {
        if (box.checked) this.chosen.add(run.id);
        else this.chosen.delete(run.id);
        this.chosenChanged();
        this.onChosen();
      },
    });
    const state = make("span", { class: "state" });
    const link = make("a", { href: `#run=${encodeURIComponent(run.id)}` }, make("bdi"));
    // A narrow screen has no column for the state.
    const narrow = make("span", { class: "state narrow" });
    const below = make("span", { class: "below small muted" });
    const what = make("span", { class: "below small bad" });
    const cells = Object.fromEntries(
      COLUMNS.map(({ key, isNumber }) => [key, make("td", { class: `${key}${isNumber ? " number" : ""}` })]),
    );
    cells.state.append(state);
    cells.name.append(link, narrow, below, what);
    const element = make("tr", {}, make("td", { class: "box" }, box), ...COLUMNS.map(({ key }) => cells[key]));
    return { element, box, states: [state, narrow], link, below, what, cells };
  }

  #fill({ box, states, link, below, what, cells }, run) {
    const name = oneLine(run.name, 80) || run.id;
    mark(box, "aria-label", `compare ${name}, ${run.id}`);
    for (const state of states) {
      say(state, run.state);
      mark(state, "data-state", run.state);
    }
    say(link.firstChild, name);
    mark(link, "title", run.name.length > 80 ? run.name : null);
    const rank = run.rank ? `rank ${run.rank.rank} of ${run.rank.world_size}` : "";
    say(below, [settingsOf(run), rank, run.id].filter(Boolean).join(" · "));
    say(what, run.what ? oneLine(run.what, 160) : "");
    say(cells.speed, rate(run.samples_per_s));
    say(cells.wait, share(run.wait_fraction));
    say(cells.memory, memory(run.peak_bytes));
    say(cells.began, when(run.started_s));
    mark(cells.began, "title", whenInFull(run.started_s));
  }
}
