// Scales of a chart: ticks of values and times. Pure.

import { clock, day, duration, hourMinute, memoryUnit } from "./shown.js";

/** The step of 1, 2 or 5 times a power of ten that divides `most` into about `wanted` parts. */
function niceStep(most, wanted) {
  const rough = most / wanted || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
}

const MOST_TICKS = 100; // Otherwise the loop would not end at 1e300, where adding a step changes nothing.

const plain = (value) => String(Number(value.toPrecision(6)));

/** Ticks from 0 to at least `most`: {top, ticks: [{value, text}]}. Unit: bytes, fraction, 1/s. */
export function valueTicks(most, unit, wanted) {
  if (unit === "fraction") {
    return {
      top: 1,
      ticks: (wanted > 3 ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]).map((value) => ({ value, text: `${value * 100}%` })),
    };
  }
  const [name, scale] = unit === "bytes" ? memoryUnit(most * 1.05) : ["", 1];
  const step = niceStep((most || scale) / scale, wanted) * scale;
  const top = Math.max(step, most);
  const ticks = [];
  for (let i = 0; i * step <= top * 1.0001 && i < MOST_TICKS; i += 1) {
    const number = (i * step) / scale;
    const text =
      unit === "bytes" ? `${plain(number)} ${name}` : number.toLocaleString("en-US", { maximumSignificantDigits: 6 });
    ticks.push({ value: i * step, text: i === 0 ? "0" : text });
  }
  return { top, ticks };
}

const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

function timeStep(span_s, wanted) {
  const rough = span_s / Math.max(1, wanted);
  return STEPS_S.find((step) => step >= rough) ?? Math.ceil(rough / 86400) * 86400;
}

/** Ticks of local time. */
export function timeTicks(from_s, to_s, wanted) {
  const step_s = timeStep(to_s - from_s, wanted);
  // Ticks are aligned to local time: ticks every 6 hours include the local midnight, not midnight in UTC.
  const shift_s = -new Date(from_s * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let at = Math.ceil((from_s + shift_s) / step_s) * step_s - shift_s; at <= to_s; at += step_s) {
    if (ticks.length >= MOST_TICKS) break;
    const date = new Date(at * 1000);
    const isMidnight = date.getHours() === 0 && date.getMinutes() === 0 && date.getSeconds() === 0;
    ticks.push({ value: at, text: isMidnight ? day(date) : step_s < 60 ? clock(date) : hourMinute(date) });
  }
  return ticks;
}

/** Ticks of time since a start. */
export function elapsedTicks(from_s, to_s, wanted) {
  const step_s = timeStep(to_s - from_s, wanted);
  const ticks = [];
  for (let at = Math.ceil(from_s / step_s) * step_s; at <= to_s; at += step_s) {
    if (ticks.length >= MOST_TICKS) break;
    ticks.push({ value: at, text: duration(at) });
  }
  return ticks;
}
