// Figures over time, as columns. In: answers of /api/runs/ID/points and the stream. Out: columns to draw.

/** The greatest distance from a point at which its value is shown: beyond it, nothing was recorded. */
const reach_s = (span_s) => Math.max(6, 3 * span_s);

/** Points of one run, oldest first. */
export class Points {
  constructor() {
    this.t_s = [];
    this.span_s = [];
    this.figures = new Map();
  }

  get length() {
    return this.t_s.length;
  }

  get last_s() {
    return this.t_s.length ? this.t_s[this.t_s.length - 1] : null;
  }

  /** Append points newer than the last one; a resumed stream may repeat some. Returns how many were new. */
  add(columns) {
    const times = columns?.t_s ?? [];
    const last = this.last_s ?? -Infinity;
    let first = 0;
    while (first < times.length && times[first] <= last) first += 1;
    const before = this.length;
    const more = times.length - first;
    if (!more) return 0;
    for (let i = first; i < times.length; i += 1) {
      this.t_s.push(times[i]);
      this.span_s.push(columns.span_s?.[i] ?? 1);
    }
    for (const [name, values] of Object.entries(columns.figures ?? {})) {
      let column = this.figures.get(name);
      // A figure that appears during the run is unknown for the time before.
      if (!column) this.figures.set(name, (column = new Array(before).fill(null)));
      for (let i = first; i < times.length; i += 1) column.push(values[i] ?? null);
    }
    for (const column of this.figures.values()) while (column.length < this.length) column.push(null);
    return more;
  }

  /** Remove points older than a time. */
  trim(from_s) {
    let old = 0;
    while (old < this.length && this.t_s[old] < from_s) old += 1;
    if (!old) return;
    for (const column of [this.t_s, this.span_s, ...this.figures.values()]) column.splice(0, old);
  }

  column(name) {
    return this.figures.get(name) ?? null;
  }

  /** Whether a figure has ever been known. */
  has(name) {
    return this.column(name)?.some((value) => value !== null) ?? false;
  }

  /** The latest known value of a figure among the last few points; null: none. */
  latest(name) {
    const column = this.column(name);
    if (!column) return null;
    for (let i = column.length - 1; i >= Math.max(0, column.length - 3); i -= 1) {
      if (column[i] !== null) return column[i];
    }
    return null;
  }

  /** Numbers N for which there is a figure PREFIX.N.NAME, in order. */
  numbers(prefix, name) {
    const found = [];
    for (const key of this.figures.keys()) {
      const parts = key.split(".");
      if (parts[0] === prefix && parts[2] === name && this.has(key)) found.push(Number(parts[1]));
    }
    return found.sort((a, b) => a - b);
  }

  /** The index of the point nearest to a time; -1: there is none. */
  nearest(t_s) {
    const times = this.t_s;
    if (!times.length) return -1;
    let low = 0;
    let high = times.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] < t_s) low = middle + 1;
      else high = middle;
    }
    return low > 0 && t_s - times[low - 1] < times[low] - t_s ? low - 1 : low;
  }

  /** The index of the point that covers a time; -1: nothing was recorded then. */
  at(t_s) {
    const i = this.nearest(t_s);
    return i >= 0 && Math.abs(this.t_s[i] - t_s) <= reach_s(this.span_s[i]) ? i : -1;
  }

  /** Whether nothing was recorded between a point and the one before it. */
  isAfterGap(i) {
    if (i === 0) return true;
    return this.t_s[i] - this.t_s[i - 1] > reach_s(Math.max(this.span_s[i], this.span_s[i - 1]));
  }
}
