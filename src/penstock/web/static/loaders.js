// The loaders of a run: settings, valves, each worker and its activity.
// In: the facts of the run; its live state, once a second. Out: an element.

import { objectsOf } from "./arrivals.js";
import { freshId, make, mark, Rows, say } from "./elements.js";
import { configuration, count, isKnown, memory, oneLine } from "./shown.js";
import { Valves } from "./valves.js";

const SLOW_S = 1;
const COLUMNS = ["no.", "process", "doing", "samples", "memory"];

/** The activity of a worker, in words. */
export function doingOf(worker) {
  let words = String(worker.doing ?? "");
  if (isKnown(worker.batch)) {
    words += worker.index ? ` ${worker.index}, batch ${worker.batch}` : ` batch ${worker.batch}`;
  }
  if (isKnown(worker.since_s) && worker.since_s >= SLOW_S) words += `, ${worker.since_s.toFixed(1)} s`;
  return worker.leaving ? `leaving, ${words}` : words;
}

class LoaderPanel {
  constructor(runId, number) {
    const id = freshId("loader");
    this.name = make("h3", { id });
    this.about = make("p", { class: "small muted" });
    this.valves = new Valves(runId, number);
    const body = make("tbody");
    this.table = make(
      "table",
      { class: "figures workers" },
      make("caption", { class: "unseen" }, "Workers"),
      make(
        "thead",
        {},
        make("tr", {}, ...COLUMNS.map((each, i) => make("th", { scope: "col", class: i > 2 ? "number" : null }, each))),
      ),
      body,
    );
    this.workers = new Rows(body, () => {
      const cells = COLUMNS.map((_, i) =>
        make(i ? "td" : "th", i ? { class: i > 2 ? "number" : null } : { scope: "row" }),
      );
      cells[2].append(make("span", { class: "restarts" }), make("span", {}));
      return { element: make("tr", {}, ...cells), cells };
    });
    this.none = make("p", { class: "small muted" });
    this.element = make(
      "section",
      { class: "loader", role: "group", "aria-labelledby": id },
      this.name,
      this.about,
      this.valves.element,
      make("div", { class: "scroll" }, this.table),
      this.none,
    );
  }

  /** `loader` from the live state or from the facts; `figures` of this loader by name. */
  show(loader, figures, isLive) {
    say(this.name, oneLine(loader.name, 60));
    const settings = loader.configuration ?? {};
    const given = loader.arguments ?? {};
    const inForce = loader.configuration ? settings : { ...given, workers: given.num_workers };
    const isOpen = isLive && loader.kind === "penstock" && !loader.is_gone;
    const kind = loader.is_gone ? "dropped by the training" : loader.kind === "torch" ? "torch's DataLoader" : "";
    say(this.about, [configuration(inForce), kind].filter(Boolean).join(" · "));
    mark(this.element, "data-closed", isOpen ? null : "yes");
    this.valves.element.hidden = !isOpen;
    if (isOpen) {
      const depth = settings.depth ?? figures("depth");
      this.valves.follow({ workers: settings.workers, depth, memory: settings.memory });
    }
    const workers = objectsOf(loader.workers);
    this.table.hidden = !workers.length;
    this.none.hidden = workers.length > 0;
    say(
      this.none,
      isLive ? (loader.kind === "torch" ? "The activity of its workers is unknown." : "No workers at the moment.") : "",
    );
    this.workers.show(
      workers,
      (each) => each.worker_id,
      (row, each) => this.#fill(row.cells, each),
    );
  }

  #fill(cells, worker) {
    say(cells[0], worker.worker_id);
    say(cells[1], worker.pid ?? "thread");
    const [restarts, doing] = cells[2].children;
    say(restarts, worker.restarts ? `restarted ${worker.restarts}` : "");
    say(doing, oneLine(doingOf(worker), 80));
    mark(doing, "data-doing", worker.doing);
    say(cells[3], count(worker.samples));
    say(cells[4], memory(worker.private_bytes));
  }
}

export class Loaders {
  #panels = new Map();

  constructor(runId) {
    this.runId = runId;
    const id = freshId("loaders");
    this.trouble = make("p", { class: "small bad", role: "status" });
    this.list = make("div", {});
    this.element = make(
      "section",
      { class: "panel loaders", "aria-labelledby": id },
      make("header", {}, make("h2", { id }, "Loaders")),
      this.trouble,
      this.list,
    );
  }

  /** `figureOf(name)` gives the latest figure of the run. */
  show(facts, live, trouble, figureOf) {
    const listed = live?.loaders ?? objectsOf(facts?.loaders).map((each, number) => ({ ...each, number }));
    this.element.hidden = !listed.length && !trouble;
    this.trouble.hidden = !trouble;
    say(this.trouble, trouble ? oneLine(trouble, 300) : "");
    for (const loader of listed) {
      let panel = this.#panels.get(loader.number);
      if (!panel) {
        panel = new LoaderPanel(this.runId, loader.number);
        this.#panels.set(loader.number, panel);
        this.list.append(panel.element);
      }
      const figures = (name) =>
        live?.figures?.[`loader.${loader.number}.${name}`] ?? figureOf(`loader.${loader.number}.${name}`);
      panel.show(loader, figures, Boolean(live));
    }
  }
}
