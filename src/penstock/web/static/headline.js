// The most important figures of a run. In: its summary, latest figures. Out: an element with one tile each.

import { make, mark, Rows, say } from "./elements.js";
import { count, duration, figureOf, isKnown, memory, rate, share } from "./shown.js";

const FULL = 0.9;

/** Tiles: [key, name, value, remark, whether the value is bad]. `figure(name)` gives the latest value; null if it is
not known. */
export function tiles(summary, figure, now_s) {
  const isRunning = summary.state === "running";
  const ran_s = (isRunning ? now_s : (summary.ended_s ?? summary.heard_s)) - summary.started_s;
  const step = figure("step") ?? summary.step;
  const limit = figure("limit_bytes") ?? summary.limit_bytes;
  const tree = figure("tree_bytes");
  const used = figure("used_bytes");
  const hits = figure("cache_hits");
  const misses = figure("cache_misses");
  const hitRate = figure("cache_hit_rate") ?? (hits + misses > 0 ? hits / (hits + misses) : null);
  const restarts = Math.max(summary.worker_restarts ?? 0, figure("worker_restarts") ?? 0);
  const found = [
    [
      "time",
      isRunning ? "running for" : `${summary.state} after`,
      duration(ran_s),
      isKnown(step) && step ? `step ${count(step)}` : "",
      false,
    ],
  ];
  if (isRunning) {
    found.push([
      "speed",
      figureOf("samples_per_s").label,
      rate(figure("samples_per_s")),
      isKnown(summary.samples_per_s) ? `mean ${rate(summary.samples_per_s)}` : "",
      false,
    ]);
    found.push([
      "wait",
      figureOf("wait_fraction").label,
      share(figure("wait_fraction")),
      isKnown(summary.wait_fraction) ? `mean ${share(summary.wait_fraction)}` : "",
      false,
    ]);
    found.push([
      "memory",
      "memory",
      memory(tree),
      [
        isKnown(tree) && limit ? `${share(tree / limit)} of ${memory(limit)}` : "",
        isKnown(summary.peak_bytes) ? `peak ${memory(summary.peak_bytes)}` : "",
      ]
        .filter(Boolean)
        .join(", "),
      false,
    ]);
    if (isKnown(used) && limit)
      found.push(["used", "in use, all processes", share(used / limit), memory(used), used / limit >= FULL]);
  } else {
    found.push(["speed", "samples/s", rate(summary.samples_per_s), `${count(summary.samples)} samples`, false]);
    found.push(["wait", "waited for data", share(summary.wait_fraction), "", false]);
    found.push([
      "memory",
      "peak memory",
      memory(summary.peak_bytes),
      limit ? `${share(summary.peak_bytes / limit)} of ${memory(limit)}` : "",
      false,
    ]);
  }
  if (isKnown(figure("workers")))
    found.push([
      "workers",
      "workers",
      count(figure("workers")),
      `depth ${count(figure("depth"))}${restarts ? `, ${restarts} restarted` : ""}`,
      restarts > 0,
    ]);
  if (isKnown(figure("gpu.0.busy_fraction")))
    found.push([
      "gpu",
      "GPU busy",
      share(figure("gpu.0.busy_fraction")),
      isKnown(figure("gpu.0.used_bytes"))
        ? `${memory(figure("gpu.0.used_bytes"))} of ${memory(figure("gpu.0.total_bytes"))}`
        : "",
      false,
    ]);
  if (isKnown(hits)) found.push(["cache", "cache hits", share(hitRate), memory(figure("cache_bytes")), false]);
  return found;
}

export class Headline {
  constructor() {
    this.element = make("dl", { class: "tiles" });
    this.rows = new Rows(this.element, () => {
      const cells = [make("dt"), make("dd", { class: "value" }), make("dd", { class: "remark" })];
      return { element: make("div", { class: "tile" }, ...cells), cells };
    });
  }

  show(summary, figure, now_s) {
    this.rows.show(
      tiles(summary, figure, now_s),
      (tile) => tile[0],
      ({ element, cells }, tile) => {
        mark(element, "data-tile", tile[0]);
        mark(element, "data-bad", tile[4] ? "yes" : null);
        cells.forEach((cell, i) => say(cell, tile[i + 1]));
      },
    );
  }
}
