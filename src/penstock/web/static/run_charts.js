// The charts of one run, chosen by the figures that the run has.
// In: points, journal and alerts as marks. Out: charts that share one cursor.

import { Chart, series } from "./chart.js";
import { make } from "./elements.js";

/** Layers of the memory from the bottom up: figure, colour. */
const LAYERS = [
  ["trainer_bytes", "blue"],
  ["workers_bytes", "orange"],
  ["arena_bytes", "green"],
  ["cache_bytes", "pink"],
  ["other_bytes", "grey"],
];
/** Colours and dashes of lines: no two neighbours share either. */
export const LINES = [
  ["blue", null],
  ["vermilion", [7, 3]],
  ["green", [2, 2]],
  ["pink", [9, 3, 2, 3]],
  ["orange", null],
  ["sky", [7, 3]],
  ["grey", [2, 2]],
  ["ink", [9, 3, 2, 3]],
];
const LIMIT = { colour: "limit", dash: [8, 4] };
const BUDGET = { colour: "budget", dash: [3, 3] };

const CHARTS = [
  {
    key: "memory",
    title: "Memory",
    unit: "bytes",
    isStacked: true,
    isTall: true,
    hasLimit: true,
    has: (points) => points.has("tree_bytes"),
    lines: (points) =>
      LAYERS.filter(([name]) => points.column(name)?.some((value) => value > 0)).map(([name, colour]) =>
        series(points, name, { colour }),
      ),
    limits: (points) => [
      ...(points.has("limit_bytes") ? [series(points, "limit_bytes", LIMIT)] : []),
      ...(points.has("budget_bytes") ? [series(points, "budget_bytes", BUDGET)] : []),
    ],
  },
  {
    key: "speed",
    title: "Samples per second",
    unit: "1/s",
    has: (points) => points.has("samples_per_s"),
    lines: (points) => perLoader(points, "samples_per_s"),
  },
  {
    key: "wait",
    title: "Waiting for data",
    unit: "fraction",
    has: (points) => points.has("wait_fraction"),
    lines: (points) => perLoader(points, "wait_fraction"),
  },
  {
    key: "gpu-memory",
    title: "GPU memory",
    unit: "bytes",
    hasLimit: true,
    has: (points) => points.numbers("gpu", "used_bytes").length > 0,
    lines: (points) => gpuMemory(points),
    limits: (points) => {
      const [first] = points.numbers("gpu", "total_bytes");
      return first === undefined ? [] : [series(points, `gpu.${first}.total_bytes`, LIMIT)];
    },
  },
  {
    key: "gpu-busy",
    title: "GPU busy",
    unit: "fraction",
    has: (points) => points.numbers("gpu", "busy_fraction").length > 0,
    lines: (points) =>
      points
        .numbers("gpu", "busy_fraction")
        .map((number, i) => series(points, `gpu.${number}.busy_fraction`, { label: `GPU ${number}`, ...line(i) })),
  },
  {
    key: "cache-rate",
    title: "Cache hit rate",
    unit: "fraction",
    has: (points) => points.has("cache_hit_rate"),
    lines: (points) => [series(points, "cache_hit_rate", line(0))],
  },
  {
    key: "cache-memory",
    title: "Cache memory",
    unit: "bytes",
    hasLimit: true,
    has: (points) => points.has("cache_hits"),
    lines: (points) => [series(points, "cache_bytes", { colour: "pink" })],
    limits: (points) => {
      const [first] = points.numbers("loader", "cache_limit_bytes");
      return first === undefined
        ? []
        : [series(points, `loader.${first}.cache_limit_bytes`, LIMIT)];
    },
  },
];

export const line = (i) => ({ colour: LINES[i % LINES.length][0], dash: LINES[i % LINES.length][1] });

/** One line for all loaders together and, if there are several, one line for each. */
function perLoader(points, name) {
  const loaders = points.numbers("loader", name);
  const all = series(points, name, { ...(loaders.length > 1 ? { label: "all" } : {}), ...line(0) });
  if (loaders.length < 2) return [all];
  return [
    all,
    ...loaders.map((number, i) =>
      series(points, `loader.${number}.${name}`, { label: `loader ${number}`, ...line(i + 1) }),
    ),
  ];
}

function gpuMemory(points) {
  const gpus = points.numbers("gpu", "used_bytes");
  if (gpus.length > 1)
    return gpus.map((number, i) => series(points, `gpu.${number}.used_bytes`, { label: `GPU ${number}`, ...line(i) }));
  return ["used_bytes", "reserved_bytes", "allocated_bytes"]
    .map((name) => `gpu.${gpus[0]}.${name}`)
    .filter((name) => points.has(name))
    .map((name, i) => series(points, name, line(i)));
}

export class RunCharts {
  #charts = new Map();

  constructor() {
    this.element = make("div", { class: "charts" });
  }

  /** Draw a chart for each recorded kind of figure. `from` and `to` bound the time; marks are {t_s, look, text}. */
  show(points, marks, from, to) {
    for (const kind of CHARTS) {
      let chart = this.#charts.get(kind.key);
      // A chart that exists is drawn even if it is empty now; otherwise it would still show another time.
      if (!chart && !kind.has(points)) continue;
      if (!chart) {
        chart = new Chart({ ...kind, onCursor: (at) => this.setCursor(at) });
        this.#charts.set(kind.key, chart);
        // Charts are in the order of the list, regardless of which figure came first.
        const order = CHARTS.map((each) => this.#charts.get(each.key)?.element).filter(Boolean);
        this.element.insertBefore(chart.element, order[order.indexOf(chart.element) + 1] ?? null);
      }
      chart.show({ series: kind.lines(points), limits: kind.limits?.(points) ?? [], marks, from, to });
    }
  }

  /** One cursor for all charts. */
  setCursor(at) {
    for (const chart of this.#charts.values()) chart.setCursor(at);
  }

  redraw() {
    for (const chart of this.#charts.values()) chart.draw();
  }

  close() {
    for (const chart of this.#charts.values()) chart.close();
  }
}
