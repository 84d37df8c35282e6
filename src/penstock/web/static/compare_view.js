// Two or more runs side by side: the results of each configuration, and the runs' figures since their start in common
// charts.
// In: the list of runs, points of the chosen runs. Out: an element.

import { Chart, series } from "./chart.js";
import { make, mark, Rows, say } from "./elements.js";
import { Points } from "./points.js";
import { line } from "./run_charts.js";
import { ask, runPath } from "./session.js";
import { configuration, duration, figureOf, isKnown, memory, oneLine, rate, share } from "./shown.js";

const AGAIN_MS = 5000;
const MOST_POINTS = 800;
const TOO_MANY = 4000;
const BRIEF_S = 10; // Rates over less than this time mean little: workers were starting.
const FIGURES = [
  ["samples_per_s", figureOf("samples_per_s").label, rate, (a, b) => a > b],
  ["wait_fraction", figureOf("wait_fraction").label, share, (a, b) => a < b],
  ["peak_bytes", "peak memory", memory, (a, b) => a < b],
];

export class CompareView {
  #runs = [];
  #points = new Map();
  #isReading = false;

  /** `chosen`: a Set of ids; `onChosen()` is called when it changes here. */
  constructor(chosen, onChosen) {
    this.chosen = chosen;
    this.onChosen = onChosen;
    this.title = make("h1", { tabindex: "-1" }, "Comparison");
    this.empty = make(
      "p",
      { class: "empty" },
      "Select two or more runs with the boxes in the list, then come back here.",
    );
    const body = make("tbody", { role: "rowgroup" });
    this.rows = new Rows(body, (row) => this.#row(row));
    const head = ["run", "configuration", ...FIGURES.map(([, label]) => label), "reading time", ""];
    const heads = head.map((label, i) =>
      make(
        "th",
        { scope: "col", role: "columnheader", class: i > 1 ? "number" : null },
        label || make("span", { class: "unseen" }, "remove"),
      ),
    );
    // The table has roles: on a narrow screen its rows are laid out in two lines, and without roles browsers would no
    // longer treat it as a table.
    this.table = make(
      "table",
      { class: "compared", role: "table" },
      make("caption", { class: "unseen" }, "Results of each configuration of each run"),
      make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...heads)),
      body,
    );
    this.note = make("p", { class: "small muted" });
    const both = (title, unit) =>
      new Chart({ title, unit, isElapsed: true, isTall: true, onCursor: (at) => this.#setCursor(at) });
    this.charts = {
      samples_per_s: both("Samples per second since the start", "1/s"),
      tree_bytes: both("Memory since the start", "bytes"),
    };
    this.drawn = make("div", { class: "charts" }, this.charts.samples_per_s.element, this.charts.tree_bytes.element);
    this.element = make(
      "div",
      { class: "comparison" },
      make("header", { class: "heading row" }, this.title),
      this.empty,
      make("div", { class: "scroll" }, this.table),
      this.note,
      this.drawn,
    );
    this.timer = setInterval(() => void this.#read(), AGAIN_MS);
    this.#show();
  }

  get name() {
    return "Comparison";
  }

  runsChanged({ runs }) {
    const isFirst = !this.#runs.length;
    this.#runs = runs;
    this.#show();
    if (isFirst) void this.#read();
  }

  /** Another view has changed the choice. */
  chosenChanged() {
    this.#show();
    void this.#read();
  }

  themeChanged() {
    for (const chart of Object.values(this.charts)) chart.draw();
  }

  close() {
    clearInterval(this.timer);
    for (const chart of Object.values(this.charts)) chart.close();
  }

  get #compared() {
    // Runs stay in the order of choice: when one is added, the colours of the others stay.
    return [...this.chosen].map((id) => this.#runs.find((run) => run.id === id)).filter(Boolean);
  }

  async #read() {
    if (this.#isReading) return;
    this.#isReading = true;
    try {
      for (const run of this.#compared) {
        // Points that came in small pieces over hours are fetched again, merged into fewer points.
        if (this.#points.get(run.id)?.length > TOO_MANY) this.#points.delete(run.id);
        const known = this.#points.get(run.id);
        if (known && run.state !== "running" && known.isWhole) continue;
        const points = known ?? new Points();
        const since = points.last_s === null ? "" : `&since=${points.last_s}`;
        points.add(await ask(`${runPath(run.id)}/points?most=${MOST_POINTS}${since}`));
        points.isWhole = run.state !== "running";
        this.#points.set(run.id, points);
      }
    } catch {
      // The connection is lost, which the top of the page shows; what is drawn stays.
    } finally {
      this.#isReading = false;
    }
    this.#draw();
  }

  #setCursor(at) {
    for (const chart of Object.values(this.charts)) chart.setCursor(at);
  }

  #draw() {
    const drawn = this.#compared
      .map((run, i) => ({ run, points: this.#points.get(run.id), ...line(i) }))
      .filter(({ points }) => points?.length);
    this.drawn.hidden = !drawn.length;
    if (!drawn.length) return;
    const to = Math.max(1, ...drawn.map(({ run, points }) => points.last_s - run.started_s));
    for (const [name, chart] of Object.entries(this.charts)) {
      const lines = drawn.map(({ run, points, colour, dash }) =>
        series(points, name, {
          label: `${oneLine(run.name, 24)} ${run.id.slice(-4)}`,
          colour,
          dash,
          start_s: run.started_s,
        }),
      );
      chart.show({ series: lines, from: 0, to });
    }
    document.documentElement.dataset.comparedPoints = String(drawn.reduce((sum, { points }) => sum + points.length, 0));
  }

  #show() {
    const rows = this.#compared.flatMap((run, i) => {
      const tried = run.tried.length
        ? run.tried
        : [
            {
              loader: 0,
              configuration: null,
              active_s: 0,
              samples_per_s: run.samples_per_s,
              wait_fraction: run.wait_fraction,
              peak_bytes: run.peak_bytes,
            },
          ];
      return tried.map((each, place) => ({
        ...each,
        run,
        colour: line(i).colour,
        key: `${run.id} ${place}`,
        isBrief: each.active_s < BRIEF_S,
      }));
    });
    const best = new Map(
      FIGURES.map(([name, , , isBetter]) => {
        const known = rows.filter((row) => isKnown(row[name]) && !row.isBrief);
        const value = known.reduce(
          (most, row) => (most === null || isBetter(row[name], most) ? row[name] : most),
          null,
        );
        return [name, known.length > 1 ? value : null];
      }),
    );
    this.rows.show(
      rows,
      (row) => row.key,
      (shown, row) => this.#fill(shown, row, best),
    );
    const isEnough = this.#compared.length > 1;
    this.table.hidden = !rows.length;
    this.empty.hidden = isEnough;
    this.note.hidden = !rows.some((row) => row.isBrief);
    say(this.note, `?: read for less than ${BRIEF_S} s, so it is not marked as best`);
    this.drawn.hidden = !rows.length;
  }

  #row({ run, colour }) {
    const cells = ["th", "td", "td", "td", "td", "td", "td"].map((tag, i) =>
      make(tag, {
        class: i > 1 ? "number" : null,
        scope: i ? null : "row",
        role: i ? "cell" : "rowheader",
        "data-label": FIGURES[i - 2]?.[1],
      }),
    );
    const swatch = make("span", { class: "swatch", "data-colour": colour, "data-kind": "line" });
    const link = make("a", { href: `#run=${encodeURIComponent(run.id)}` }, make("bdi"));
    cells[0].append(swatch, link, make("span", { class: "below small muted" }));
    for (const cell of cells.slice(2, 5)) cell.append(make("span"), make("span", { class: "best" }));
    cells[6].append(
      make(
        "button",
        {
          type: "button",
          class: "quiet",
          title: "remove",
          onclick: () => {
            this.chosen.delete(run.id);
            this.onChosen();
          },
        },
        "×",
      ),
    );
    return { element: make("tr", { role: "row" }, ...cells), cells, swatch, link };
  }

  #fill({ cells, swatch, link }, row, best) {
    const { run } = row;
    const several =
      run.loaders.length > 1 ? ` · ${oneLine(run.loaders[row.loader]?.name ?? row.loader, 20)}` : "";
    mark(swatch, "data-colour", row.colour);
    say(link.firstChild, oneLine(run.name, 40) || run.id);
    mark(link, "title", run.name.length > 40 ? run.name : null);
    say(cells[0].lastChild, `${run.state} · ${run.id}${several}`);
    say(cells[1], configuration(row.configuration) || "unknown");
    FIGURES.forEach(([name, , written], i) => {
      const [value, badge] = cells[i + 2].children;
      const isBest = best.get(name) !== null && row[name] === best.get(name) && !row.isBrief;
      say(value, written(row[name]) + (row.isBrief && i === 0 && isKnown(row[name]) ? "?" : ""));
      say(badge, isBest ? "best" : "");
      mark(cells[i + 2], "data-best", isBest ? "yes" : null);
    });
    say(cells[5], row.active_s ? duration(row.active_s) : "-");
    mark(cells[6].firstChild, "aria-label", `remove ${oneLine(run.name, 40)}, ${run.id}`);
  }
}
