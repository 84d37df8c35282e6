// One run: headline figures, charts, loaders with their valves, journal.
// In: /api/runs/ID, its points, the stream. Out: an element that follows the run.

import { liveOf, summaryOf } from "./arrivals.js";
import { make, mark, say } from "./elements.js";
import { Headline } from "./headline.js";
import { Journal } from "./journal.js";
import { Loaders } from "./loaders.js";
import { Points } from "./points.js";
import { RunCharts } from "./run_charts.js";
import { ask, runPath } from "./session.js";
import { isKnown, oneLine, whenInFull } from "./shown.js";

const MOST_POINTS = 1500;
const TOO_MANY = 3000; // With more points than this, the server is asked for fewer, merged points.
const RANGES = [
  ["whole run", 0],
  ["3 h", 10800],
  ["1 h", 3600],
  ["10 min", 600],
];
const LONG_NAME = 120;

export class RunView {
  #points = new Points();
  #detail = null;
  #live = null;
  #trouble = null;
  #range_s = 0;
  #isLoaded = false;
  #isReloading = false;
  #frame = 0;
  #last_s = null; // Time of the last point that came, even if the time shown has no points.
  #ahead_s = 0; // How far this computer's clock is ahead of the server's.

  constructor(id) {
    this.id = id;
    this.title = make("h1", { tabindex: "-1" }, make("bdi", {}, id));
    this.state = make("span", { class: "state" });
    this.about = make("p", { class: "about small muted" });
    this.whole = make(
      "details",
      { class: "small", hidden: true },
      make("summary", {}, "the whole name"),
      make("p", { class: "whole" }),
    );
    this.facts = make("details", { class: "small facts" }, make("summary", {}, "about this run"), make("dl"));
    this.what = make("p", { class: "bad what", hidden: true });
    this.alerts = make("ul", { class: "standing", role: "status", "aria-label": "Active alerts", hidden: true });
    this.headline = new Headline();
    this.charts = new RunCharts();
    this.journal = new Journal((at) => this.charts.setCursor(at));
    this.loaders = new Loaders(id);
    this.empty = make("p", { class: "empty" }, "Reading…");
    this.element = make(
      "div",
      { class: "run" },
      make(
        "header",
        { class: "heading" },
        make("div", { class: "row" }, this.title, this.state),
        this.what,
        this.about,
        this.whole,
        this.facts,
      ),
      this.alerts,
      this.headline.element,
      make(
        "div",
        { class: "columns" },
        make(
          "section",
          { class: "over-time", "aria-label": "Over time" },
          this.#ranges(),
          this.empty,
          this.charts.element,
        ),
        make("aside", { "aria-label": "Loaders and journal" }, this.loaders.element, this.journal.element),
      ),
    );
    this.on = {
      points: (columns) => this.#addPoints(columns),
      journal: (notes) => this.#addEntries(() => this.journal.addNotes(notes)),
      alerts: (alerts) => this.#addEntries(() => this.journal.addAlerts(alerts)),
      live: (live) => this.#setLive(live),
      ended: (summary) => this.#setSummary(summaryOf(summary)),
    };
    // The duration increases between two points.
    this.timer = setInterval(() => this.#showFigures(), 1000);
  }

  get name() {
    return oneLine(this.#detail?.summary.name ?? this.id, 60);
  }

  /** The time after which the stream begins. */
  since() {
    return this.#last_s ?? this.#detail?.summary.started_s ?? 0;
  }

  /** Read the run; later calls keep what was read. */
  async prepare() {
    if (this.#isLoaded) return;
    const began = performance.now();
    const asked = Promise.all([ask(runPath(this.id)), this.#askPoints()]);
    const [detail, columns] = await asked.catch((problem) => {
      say(this.empty, problem.message);
      throw problem;
    });
    this.#detail = { ...detail, summary: summaryOf(detail.summary) };
    this.#live = liveOf(detail.live);
    this.#trouble = detail.trouble;
    this.#isLoaded = true;
    this.journal.addNotes(detail.journal);
    this.journal.addAlerts(detail.alerts);
    this.#showFacts();
    this.#take(columns, began);
  }

  /** The list of runs has changed. */
  runsChanged({ now_s, runs }) {
    if (now_s) this.#ahead_s = Date.now() / 1000 - now_s;
    const summary = runs.find((each) => each.id === this.id);
    if (summary && this.#isLoaded) this.#setSummary(summary);
  }

  dayChanged() {
    this.journal.dayChanged();
  }

  themeChanged() {
    this.charts.redraw();
  }

  close() {
    clearInterval(this.timer);
    cancelAnimationFrame(this.#frame);
    this.charts.close();
  }

  // -- points -----------------------------------------------------------------------------

  /** The end of the time shown, by the clock of the training, which may differ from the server's. */
  get #to_s() {
    const known = [this.#detail?.summary.ended_s, this.#last_s].filter(isKnown);
    return known.length ? Math.max(...known) : Date.now() / 1000 - this.#ahead_s;
  }

  #askPoints() {
    const since = this.#range_s ? `&since=${this.#to_s - this.#range_s}` : "";
    return ask(`${runPath(this.id)}/points?most=${MOST_POINTS}${since}`);
  }

  async #reload() {
    if (this.#isReloading) return;
    this.#isReloading = true;
    const range_s = this.#range_s;
    try {
      this.#take(await this.#askPoints(), performance.now());
    } catch {
      // The connection is lost, which the top of the page shows; what is drawn stays.
    } finally {
      this.#isReloading = false;
    }
    if (range_s !== this.#range_s) void this.#reload();
  }

  /** Draw these points instead of the previous ones, and measure how long that takes. */
  #take(columns, began) {
    const answered = performance.now();
    this.#points = new Points();
    this.#points.add(columns);
    this.#last_s = this.#points.last_s ?? this.#last_s;
    this.#draw();
    // The time is taken after the next frame, so that it includes the work of the canvas.
    requestAnimationFrame(() =>
      setTimeout(() => {
        const { dataset } = document.documentElement;
        dataset.drawnMs = (performance.now() - answered).toFixed(1);
        dataset.loadedMs = (performance.now() - began).toFixed(1);
        dataset.drawnPoints = String(this.#points.length);
      }),
    );
  }

  #addPoints(columns) {
    if (!this.#points.add(columns)) return;
    this.#last_s = this.#points.last_s;
    if (this.#points.length > TOO_MANY) void this.#reload();
    this.#drawSoon();
  }

  #addEntries(add) {
    add();
    this.#showAlerts();
    this.#drawSoon();
  }

  #drawSoon() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  #draw() {
    const points = this.#points;
    const summary = this.#detail.summary;
    const to = this.#to_s;
    const from = this.#range_s ? to - this.#range_s : Math.min(summary.started_s, points.t_s[0] ?? Infinity);
    if (this.#range_s) points.trim(from - 60);
    this.empty.hidden = points.length > 0;
    say(this.empty, this.#last_s === null ? "No points are recorded yet." : "No points are recorded of this time.");
    this.charts.show(points, this.journal.marks, from, to > from ? to : from + 1);
    this.#showFigures();
    this.#showAlerts();
    document.documentElement.dataset.lastPoint = String(points.last_s ?? "");
  }

  #ranges() {
    const inputs = RANGES.map(([label, range_s], i) =>
      make(
        "label",
        {},
        make("input", {
          type: "radio",
          name: "range",
          value: range_s,
          checked: i === 0,
          onchange: () => {
            this.#range_s = range_s;
            if (this.#isLoaded) void this.#reload();
          },
        }),
        make("span", {}, label),
      ),
    );
    return make("fieldset", { class: "ranges" }, make("legend", {}, "Time shown"), ...inputs);
  }

  // -- words ------------------------------------------------------------------------------

  #setLive(live) {
    this.#trouble = live?.trouble ?? null;
    this.#live = liveOf(live);
    this.#showFigures();
  }

  #setSummary(summary) {
    const wasRunning = this.#detail.summary.state === "running";
    this.#detail.summary = summary;
    if (summary.state !== "running") {
      this.#live = null;
      this.#trouble = null;
    }
    this.#showFacts();
    if (wasRunning && summary.state !== "running") this.#drawSoon();
  }

  #figure(name) {
    return this.#live?.figures?.[name] ?? this.#points.latest(name);
  }

  #showFigures() {
    if (!this.#detail) return;
    const figure = (name) => this.#figure(name);
    this.headline.show(this.#detail.summary, figure, Date.now() / 1000 - this.#ahead_s);
    this.loaders.show(this.#detail.facts, this.#live, this.#trouble, figure);
  }

  #showAlerts() {
    const standing = this.#detail.summary.state === "running" ? this.journal.standing : [];
    const words = standing.map((text) => oneLine(text, 300));
    if (words.join("\n") !== [...this.alerts.children].map((item) => item.textContent).join("\n")) {
      this.alerts.replaceChildren(...words.map((text) => make("li", {}, text)));
    }
    this.alerts.hidden = !words.length;
  }

  #showFacts() {
    const { summary, facts } = this.#detail;
    say(this.title.firstChild, oneLine(summary.name, LONG_NAME) || this.id);
    this.whole.hidden = summary.name.length <= LONG_NAME;
    say(this.whole.lastChild, summary.name);
    say(this.state, summary.state);
    mark(this.state, "data-state", summary.state);
    this.what.hidden = !summary.what;
    say(this.what, oneLine(summary.what ?? "", 600));
    const rank = summary.rank ? `rank ${summary.rank.rank} of ${summary.rank.world_size}` : "";
    const words = [
      summary.id,
      `began ${whenInFull(summary.started_s)}`,
      `process ${summary.pid ?? "-"} on ${summary.host}`,
      rank,
    ];
    say(this.about, oneLine(words.filter(Boolean).join(" · "), 200));
    const list = this.facts.lastChild;
    const shown = Object.entries(facts ?? {}).filter(([name, value]) => value !== null && name !== "name");
    if (list.children.length === 2 * shown.length) return;
    list.replaceChildren(
      ...shown.flatMap(([name, value]) => [
        make("dt", {}, oneLine(name.replaceAll("_", " "), 40)),
        make(
          "dd",
          {},
          Array.isArray(value) && value.every((each) => typeof each === "string")
            ? value.join(" ")
            : typeof value === "string"
              ? value
              : JSON.stringify(value),
        ),
      ]),
    );
  }
}
