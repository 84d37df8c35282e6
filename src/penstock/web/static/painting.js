// Draws one chart on a canvas.
// In: a picture (series, limits, marks, ticks, cursor), colours from the style sheet. Out: pixels; the positions of times.

import { isKnown } from "./shown.js";

const TOP = 16; // Room for the marks.
const BOTTOM = 20;
const RIGHT = 10;
const FAR_ABOVE = 3; // A limit this many times higher than the data would flatten the data: it stands at the edge.
const HEADROOM = 1.06;
const HEADROOM_FOR_WORDS = 1.2;

/** Colours by name from the style sheet, light or dark. */
export function theme() {
  const style = getComputedStyle(document.documentElement);
  const known = new Map();
  return (name) => {
    if (!known.has(name)) known.set(name, style.getPropertyValue(`--${name}`).trim() || "#888");
    return known.get(name);
  };
}

/** The highest value drawn; sets for each limit whether it lies above the scale. */
export function heights(picture) {
  let data = 0;
  if (picture.isStacked) {
    for (const sums of stack(picture).at(-1) ?? []) data = Math.max(data, sums);
  } else {
    for (const line of picture.series)
      for (const value of line.values) if (isKnown(value)) data = Math.max(data, value);
  }
  let most = data * HEADROOM;
  for (const limit of picture.limits) {
    const value = highest(limit.values);
    limit.isAbove = !picture.toLimit && data > 0 && value > FAR_ABOVE * data;
    most = Math.max(most, limit.isAbove ? data * HEADROOM_FOR_WORDS : value * 1.03);
  }
  return most;
}

const highest = (values) => values.reduce((most, value) => (isKnown(value) && value > most ? value : most), 0);

/** Sums from the bottom up, one array for each layer. */
function stack(picture) {
  let below = null;
  return picture.series.map(({ values }) => {
    const before = below;
    below = values.map((value, i) => (before ? before[i] : 0) + (isKnown(value) ? value : 0));
    return below;
  });
}

/** Draw. Returns {left, right, xOf(x), timeOf(px)}; null where there is no room. */
export function paint(canvas, picture, colour) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (width < 60 || height < 40) return null;
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  const { top, ticks } = picture.ticks(heights(picture), Math.max(2, Math.floor((height - TOP - BOTTOM) / 28)));
  const left = Math.ceil(Math.max(...ticks.map(({ text }) => pen.measureText(text).width))) + 10;
  const right = width - RIGHT;
  const floor = height - BOTTOM;
  const span = picture.to - picture.from || 1;
  const xOf = (x) => left + ((x - picture.from) / span) * (right - left);
  const yOf = (y) => floor - (y / (top || 1)) * (floor - TOP);
  const place = { left, right, xOf, timeOf: (px) => picture.from + ((px - left) / (right - left)) * span };

  axes(pen, picture, { ...place, yOf, floor, width }, ticks, colour);
  pen.save();
  pen.beginPath();
  pen.rect(left, TOP - 2, right - left, floor - TOP + 3);
  pen.clip();
  if (picture.isStacked) areas(pen, picture, xOf, yOf, colour);
  else for (const line of picture.series) stroke(pen, line, xOf, yOf, colour, 1.6);
  for (const limit of picture.limits) if (!limit.isAbove) stroke(pen, limit, xOf, yOf, colour, 1.5);
  pen.restore();
  limitNames(pen, picture, { left, right, yOf }, colour);
  marks(pen, picture, { left, right, xOf, floor }, colour);
  if (picture.cursor !== null) cursor(pen, picture, { left, right, xOf, yOf, floor }, colour);
  return place;
}

function axes(pen, picture, { left, right, xOf, yOf, floor, width }, ticks, colour) {
  pen.lineWidth = 1;
  pen.textBaseline = "middle";
  for (const { value, text } of ticks) {
    const y = Math.round(yOf(value)) + 0.5;
    pen.strokeStyle = colour(value === 0 ? "axis" : "grid");
    segment(pen, left, y, right, y);
    pen.fillStyle = colour("muted");
    pen.textAlign = "right";
    pen.fillText(text, left - 6, y);
  }
  pen.textBaseline = "top";
  pen.textAlign = "center";
  for (const { value, text } of picture.timeTicks(picture.from, picture.to, (right - left) / 80)) {
    const x = Math.round(xOf(value)) + 0.5;
    pen.strokeStyle = colour("axis");
    segment(pen, x, floor, x, floor + 4);
    const half = pen.measureText(text).width / 2;
    pen.fillText(text, Math.max(half, Math.min(width - half, x)), floor + 7);
  }
}

function segment(pen, x1, y1, x2, y2) {
  pen.beginPath();
  pen.moveTo(x1, y1);
  pen.lineTo(x2, y2);
  pen.stroke();
}

/** Ranges of indices, [from, to), of points without a gap between them. */
function* stretches(line) {
  let from = 0;
  for (let i = 1; i <= line.times.length; i += 1) {
    if (i === line.times.length || line.isAfterGap(i)) {
      if (i > from) yield [from, i];
      from = i;
    }
  }
}

function areas(pen, picture, xOf, yOf, colour) {
  const sums = stack(picture);
  picture.series.forEach((line, layer) => {
    const upper = sums[layer];
    const lower = layer ? sums[layer - 1] : null;
    for (const [from, to] of stretches(line)) {
      // The area of a single point would have no width.
      const widen = to - from === 1 ? 1 : 0;
      pen.beginPath();
      for (let i = from; i < to; i += 1) pen.lineTo(xOf(line.times[i]) - widen, yOf(upper[i]));
      if (widen) pen.lineTo(xOf(line.times[from]) + 1, yOf(upper[from]));
      for (let i = to - 1; i >= from; i -= 1) pen.lineTo(xOf(line.times[i]) + widen, yOf(lower ? lower[i] : 0));
      if (widen) pen.lineTo(xOf(line.times[from]) - 1, yOf(lower ? lower[from] : 0));
      pen.closePath();
      pen.fillStyle = colour(line.colour);
      pen.fill();
      // A line in the background's colour separates layers, so that they can be told apart without colours. If points
      // are closer than the line is wide, the line would hide the layer and is left out.
      if (xOf(line.times[to - 1]) - xOf(line.times[from]) < 2 * (to - from)) continue;
      pen.strokeStyle = colour("panel");
      pen.lineWidth = 1;
      pen.beginPath();
      for (let i = from; i < to; i += 1) pen.lineTo(xOf(line.times[i]), yOf(upper[i]));
      pen.stroke();
    }
  });
}

function stroke(pen, line, xOf, yOf, colour, width) {
  pen.strokeStyle = pen.fillStyle = colour(line.colour);
  pen.lineWidth = width;
  pen.lineJoin = "round";
  pen.setLineDash(line.dash ?? []);
  for (const [from, to] of stretches(line)) {
    pen.beginPath();
    let known = 0;
    for (let i = from; i < to; i += 1) {
      if (!isKnown(line.values[i])) {
        pen.stroke();
        pen.beginPath();
        known = 0;
        continue;
      }
      pen.lineTo(xOf(line.times[i]), yOf(line.values[i]));
      known += 1;
    }
    pen.stroke();
    if (known === 1) pen.fillRect(xOf(line.times[to - 1]) - 1, yOf(line.values[to - 1] ?? 0) - 1, 3, 3);
  }
  pen.setLineDash([]);
}

function limitNames(pen, picture, { left, right, yOf }, colour) {
  pen.textAlign = "right";
  pen.textBaseline = "bottom";
  let x = right - 4;
  for (const limit of picture.limits) {
    const last = limit.values.findLast(isKnown);
    if (last === undefined) continue;
    const text = limit.isAbove ? `${limit.label} ${limit.text} ↑` : limit.label;
    // The text is above its line, or below it if the line is at the upper edge.
    const above = yOf(last) - 2;
    const y = limit.isAbove ? TOP + 13 : above < TOP + 13 ? yOf(last) + 16 : above;
    const wide = pen.measureText(text).width;
    if (x - wide < left) continue;
    // A background behind the words, which may lie over an area of any colour.
    pen.fillStyle = colour("panel");
    pen.fillRect(x - wide - 3, y - 13, wide + 6, 13);
    pen.fillStyle = colour(limit.colour);
    pen.fillText(text, x, y);
    x -= wide + 14;
  }
}

function marks(pen, picture, { left, right, xOf, floor }, colour) {
  let last = -Infinity;
  for (const each of picture.marks) {
    const x = Math.round(xOf(each.t_s)) + 0.5;
    // Thousands of entries may lie on the same few pixels: one sign represents all of them.
    if (x < left || x > right || (x - last < 2 && each.look === "note")) continue;
    last = x;
    pen.strokeStyle = pen.fillStyle = colour(`mark-${each.look}`);
    pen.globalAlpha = 0.35;
    pen.lineWidth = 1;
    segment(pen, x, TOP - 4, x, floor);
    pen.globalAlpha = 1;
    sign(pen, each.look, x, 7);
  }
}

/** Each look has a shape of its own. */
function sign(pen, look, x, y) {
  pen.beginPath();
  if (look === "alert") {
    pen.moveTo(x - 5, y + 4);
    pen.lineTo(x + 5, y + 4);
    pen.lineTo(x, y - 5);
  } else if (look === "trouble") {
    pen.moveTo(x, y - 5);
    pen.lineTo(x + 5, y);
    pen.lineTo(x, y + 5);
    pen.lineTo(x - 5, y);
  } else if (look === "decision") {
    pen.rect(x - 4, y - 4, 8, 8);
  } else {
    pen.arc(x, y, 3.5, 0, 7);
  }
  pen.fill();
}

function cursor(pen, picture, { left, right, xOf, yOf, floor }, colour) {
  const x = Math.round(xOf(picture.cursor)) + 0.5;
  if (x < left - 1 || x > right + 1) return;
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 1;
  segment(pen, x, TOP - 4, x, floor);
  if (picture.isStacked) return;
  for (const line of picture.series) {
    const i = line.at(picture.cursor);
    if (i < 0 || !isKnown(line.values[i])) continue;
    pen.beginPath();
    pen.arc(xOf(line.times[i]), yOf(line.values[i]), 3, 0, 7);
    pen.fillStyle = colour(line.colour);
    pen.fill();
  }
}
