// The values of a chart as a table, newest first. In: series. Out: an element.

import { make, say } from "./elements.js";
import { oneLine } from "./shown.js";

const ROWS = 60;

export class ChartTable {
  constructor(title) {
    this.body = make("tbody");
    this.head = make("tr");
    this.note = make("caption");
    const table = make("table", { class: "figures" }, this.note, make("thead", {}, this.head), this.body);
    const scrolled = {
      class: "values",
      hidden: true,
      tabindex: "0",
      role: "region",
      "aria-label": `${title}, as table`,
    };
    this.element = make("div", scrolled, table);
  }

  /** The times are the times of `longest`; the other lines have a value if a value was recorded at that time. */
  fill(longest, lines, written, timeText) {
    const { times } = longest;
    const rows = Math.min(ROWS, times.length);
    const shown = [];
    for (let i = 0; i < rows; i += 1) {
      shown.push(times[rows === 1 ? 0 : Math.round(((rows - 1 - i) / (rows - 1)) * (times.length - 1))]);
    }
    say(this.note, rows < times.length ? `${rows} of ${times.length} points, evenly chosen` : `${rows} points`);
    this.head.replaceChildren(
      make("th", { scope: "col" }, "time"),
      ...lines.map((line) => make("th", { scope: "col", class: "number" }, oneLine(line.label, 40))),
    );
    this.body.replaceChildren(
      ...shown.map((at) =>
        make(
          "tr",
          {},
          make("th", { scope: "row" }, timeText(at)),
          ...lines.map((line) => make("td", { class: "number" }, written(line.values[line.at(at)]))),
        ),
      ),
    );
  }
}
