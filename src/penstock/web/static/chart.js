// One chart: canvas, legend with values, a cursor for pointer and keys, and the values as a table.
// In: series and marks. Out: an element; the time at the cursor, for the neighbouring charts.

import { ChartTable } from "./chart_table.js";
import { freshId, make, mark, say } from "./elements.js";
import { paint, theme } from "./painting.js";
import { elapsedTicks, timeTicks, valueTicks } from "./scales.js";
import { duration, figureOf, isKnown, memory, oneLine, rate, share, when } from "./shown.js";

const WRITTEN = { bytes: memory, fraction: share, "1/s": rate };
const NEAR_PX = 6;
const WORDS_AT_ONCE = 4;

/** One line or layer: a column of `points`, with times since `start_s`; the table of figures has its default label. */
export function series(points, name, { label = figureOf(name).label, colour, dash = null, start_s = 0 }) {
  const values = points.column(name) ?? [];
  const times = start_s ? points.t_s.map((t_s) => t_s - start_s) : points.t_s;
  return {
    label,
    help: figureOf(name).help,
    colour,
    dash,
    values,
    times,
    nearest: (at) => points.nearest(at + start_s),
    at: (at) => points.at(at + start_s),
    isAfterGap: (i) => points.isAfterGap(i),
  };
}

export class Chart {
  #picture = { series: [], limits: [], marks: [], from: 0, to: 1, isStacked: false, toLimit: false, cursor: null };
  #place = null;
  #isElapsed;
  #written;

  /** `onCursor(time or null)` is called when the cursor moves here. */
  constructor({ title, unit, isStacked = false, isElapsed = false, isTall = false, hasLimit = false, onCursor }) {
    this.#isElapsed = isElapsed;
    this.#written = WRITTEN[unit];
    this.onCursor = onCursor ?? ((at) => this.setCursor(at));
    Object.assign(this.#picture, {
      isStacked,
      ticks: (most, wanted) => valueTicks(most, unit, wanted),
      timeTicks: isElapsed ? elapsedTicks : timeTicks,
    });
    const id = freshId("chart");
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", hidden: true });
    // A slider: screen readers pass it the arrow keys and read its value when it moves.
    this.plot = make(
      "div",
      {
        class: "plot",
        role: "slider",
        tabindex: "0",
        "aria-label": title,
        "aria-orientation": "horizontal",
        "aria-valuemin": "0",
        "aria-valuemax": "0",
        "aria-valuenow": "0",
        "aria-valuetext": "no points yet",
        onkeydown: (event) => this.#key(event),
        onblur: () => this.onCursor(null),
        onpointermove: (event) => this.#point(event),
        onpointerdown: (event) => this.#point(event),
        onpointerleave: () => this.onCursor(null),
      },
      this.canvas,
      this.tip,
    );
    this.at = make("span", { class: "at" });
    this.legend = make("ul", { class: "legend" });
    this.table = new ChartTable(title);
    const toTable = make(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-pressed": "false",
        "aria-describedby": id,
        onclick: () => this.#toggleTable(toTable),
      },
      "as table",
    );
    const toLimit = make(
      "button",
      {
        type: "button",
        class: "quiet",
        "aria-pressed": "false",
        "aria-describedby": id,
        hidden: !hasLimit,
        onclick: () => {
          this.#picture.toLimit = !this.#picture.toLimit;
          mark(toLimit, "aria-pressed", this.#picture.toLimit);
          this.draw();
        },
      },
      "up to the limit",
    );
    this.element = make(
      "section",
      { class: isTall ? "chart tall" : "chart", role: "group", "aria-labelledby": id },
      make("header", {}, make("h3", { id }, title), this.at, toLimit, toTable),
      this.plot,
      this.table.element,
      this.legend,
    );
    this.resized = new ResizeObserver(() => this.draw());
    this.resized.observe(this.plot);
  }

  /** Draw other data. `shown`: {series, limits, marks, from, to}; marks are {t_s, look, text}, oldest first. */
  show(shown) {
    const { marks = [], from, to } = shown;
    // Keys must not find a mark that is not drawn.
    const drawn = marks.filter(({ t_s }) => t_s >= from && t_s <= to);
    Object.assign(this.#picture, { limits: [], ...shown, marks: drawn });
    for (const limit of this.#picture.limits) limit.text = this.#written(limit.values.findLast(isKnown));
    this.draw();
    this.#write();
    if (!this.table.element.hidden) this.#fillTable();
  }

  draw() {
    if (!this.plot.hidden) this.#place = paint(this.canvas, this.#picture, theme());
  }

  /** Move the cursor; null removes it. */
  setCursor(at) {
    if (this.#picture.cursor === at) return;
    this.#picture.cursor = at;
    this.draw();
    this.#write({ hasMoved: true });
  }

  close() {
    this.resized.disconnect();
  }

  // -- words ------------------------------------------------------------------------------

  /** The line that ends last: the cursor moves along its points. */
  get #longest() {
    const last = ({ times }) => times.at(-1) ?? -Infinity;
    return this.#picture.series.reduce((most, line) => (last(line) > last(most) ? line : most), { times: [] });
  }

  #timeText(at) {
    return this.#isElapsed ? `${duration(at)} after the start` : when(at);
  }

  /** Values at the cursor, or the latest. `hasMoved`: whether the user has moved the cursor. */
  #write({ hasMoved = false } = {}) {
    const { series: lines, limits, cursor } = this.#picture;
    const values = [...lines, ...limits].map((line) => {
      const i = cursor === null ? line.values.findLastIndex(isKnown) : line.at(cursor);
      return { line, text: this.#written(line.values[i]) };
    });
    while (this.legend.children.length > values.length) this.legend.lastElementChild.remove();
    values.forEach(({ line, text }, i) => {
      let item = this.legend.children[i];
      if (!item) {
        item = make("li", {}, make("span", { class: "swatch" }), make("bdi", {}), make("b", {}));
        this.legend.append(item);
      }
      const [swatch, label, value] = item.children;
      mark(swatch, "data-colour", line.colour);
      mark(
        swatch,
        "data-kind",
        i >= lines.length || line.dash
          ? line.dash?.[0] > 4
            ? "dashed"
            : "dotted"
          : this.#picture.isStacked
            ? "area"
            : "line",
      );
      say(label, oneLine(line.label, 40));
      mark(item, "title", line.help);
      say(value, text);
    });
    say(this.at, cursor === null ? "" : this.#timeText(cursor));
    const words = values.map(({ line, text }) => `${oneLine(line.label, 40)} ${text}`).join(", ");
    const near = cursor === null ? [] : this.#marksNear(cursor);
    this.#tell(near);
    mark(this.plot, "aria-valuemax", Math.max(0, this.#longest.times.length - 1));
    if (cursor === null) {
      // The text stays while the plot has the focus: a screen reader would start again with every new point.
      if (document.activeElement !== this.plot || hasMoved) {
        mark(this.plot, "aria-valuenow", Math.max(0, this.#longest.times.length - 1));
        mark(this.plot, "aria-valuetext", `latest: ${words || "nothing yet"}`);
      }
      return;
    }
    const marked = near.map((each) => each.text).join("; ");
    mark(this.plot, "aria-valuenow", Math.max(0, this.#longest.nearest?.(cursor) ?? 0));
    mark(this.plot, "aria-valuetext", `${this.#timeText(cursor)}: ${words}${marked ? `; ${marked}` : ""}`);
  }

  #marksNear(at) {
    const place = this.#place;
    if (!place) return [];
    const x = place.xOf(at);
    return this.#picture.marks.filter((each) => Math.abs(place.xOf(each.t_s) - x) <= NEAR_PX);
  }

  /** Show the words of the marks at the cursor next to it. */
  #tell(near) {
    this.tip.hidden = !near.length;
    if (!near.length) return;
    const shown = near.slice(-WORDS_AT_ONCE);
    this.tip.replaceChildren(...shown.map((each) => make("p", {}, `${when(each.t_s)} ${oneLine(each.text, 160)}`)));
    if (near.length > shown.length) this.tip.prepend(make("p", {}, `and ${near.length - shown.length} before`));
    const x = this.#place.xOf(this.#picture.cursor);
    const isLeft = x < this.plot.clientWidth / 2;
    this.tip.style.left = isLeft ? `${x + 8}px` : "auto";
    this.tip.style.right = isLeft ? "auto" : `${this.plot.clientWidth - x + 8}px`;
  }

  // -- pointer and keys -------------------------------------------------------------------

  #point(event) {
    if (!this.#place || !this.#longest.times.length) return;
    const px = event.clientX - this.canvas.getBoundingClientRect().left;
    const line = this.#longest;
    const at = this.#place.timeOf(px);
    const mark = this.#picture.marks.findLast((each) => Math.abs(this.#place.xOf(each.t_s) - px) <= NEAR_PX);
    this.onCursor(mark ? mark.t_s : line.times[line.nearest(at)]);
  }

  #key(event) {
    const times = this.#longest.times;
    if (!times.length || event.altKey || event.ctrlKey || event.metaKey) return;
    const cursor = this.#picture.cursor;
    const here = cursor === null ? times.length - 1 : this.#longest.nearest(cursor);
    const stride = event.shiftKey ? 10 : 1;
    const to = (i) => times[Math.max(0, Math.min(times.length - 1, i))];
    const marked = this.#picture.marks.map((each) => each.t_s);
    const from = cursor ?? Infinity;
    const moves = {
      ArrowLeft: () => to(cursor === null ? here : here - stride),
      ArrowDown: () => to(here - stride),
      ArrowRight: () => to(here + stride),
      ArrowUp: () => to(here + stride),
      Home: () => times[0],
      End: () => times.at(-1),
      PageUp: () => marked.findLast((t_s) => t_s < from) ?? to(0),
      PageDown: () => marked.find((t_s) => t_s > from) ?? times.at(-1),
      Escape: () => null,
    };
    if (!moves[event.key]) return;
    event.preventDefault();
    this.onCursor(moves[event.key]());
  }

  // -- the values as a table --------------------------------------------------------------

  #toggleTable(button) {
    const isTable = this.table.element.hidden;
    this.table.element.hidden = !isTable;
    this.plot.hidden = isTable;
    mark(button, "aria-pressed", isTable);
    if (isTable) this.#fillTable();
    else this.draw();
  }

  #fillTable() {
    const lines = [...this.#picture.series, ...this.#picture.limits];
    this.table.fill(this.#longest, lines, this.#written, (at) => this.#timeText(at));
  }
}
