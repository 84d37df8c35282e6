// Values as people read them, in the same form as on the terminal.
// In: numbers, texts of users, names of figures. Out: short strings.

import { FIGURES } from "./figures.js";

const NUMBERED = /^(loader|gpu)\.\d+\./;

/** Label, unit and help text of a figure, from the table that the server sends. */
export const figureOf = (name) =>
  FIGURES[name.replace(NUMBERED, "$1.N.")] ?? { label: name, unit: "count", help: name };

const UNITS = [
  ["KiB", 2 ** 10],
  ["MiB", 2 ** 20],
  ["GiB", 2 ** 30],
  ["TiB", 2 ** 40],
];

/** Whether a figure is known. */
export const isKnown = (value) => typeof value === "number" && Number.isFinite(value);

/** "1.50 GiB": binary units, three significant digits. */
export function memory(count) {
  if (!isKnown(count)) return "-";
  const size = Math.abs(count);
  const sign = count < 0 ? "-" : "";
  if (size < 1024) return `${sign}${size.toFixed(0)} B`;
  for (const [unit, scale] of UNITS) {
    const scaled = size / scale;
    if (scaled < 1023.5 || unit === "TiB") {
      return `${sign}${scaled.toFixed(scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0)} ${unit}`;
    }
  }
  return "-";
}

/** The unit for a scale up to `most` bytes: its name and its size in bytes. */
export function memoryUnit(most) {
  let found = ["B", 1];
  for (const each of UNITS) if (most >= each[1]) found = each;
  return found;
}

/** "1,234" from a hundred on, three digits below. */
export function rate(perSecond) {
  if (!isKnown(perSecond)) return "-";
  return perSecond >= 100 ? count(perSecond) : String(Number(perSecond.toPrecision(3)));
}

/** "12%", "3.4%". */
export function share(fraction) {
  if (!isKnown(fraction)) return "-";
  return `${(fraction * 100).toFixed(fraction >= 0.1 || fraction === 0 ? 0 : 1)}%`;
}

/** "12,345". */
export const count = (value) => (isKnown(value) ? Math.round(value).toLocaleString("en-US") : "-");

const two = (value) => String(value).padStart(2, "0");

/** "2:05", "1:02:05", "3d 04:00". */
export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const minute = Math.floor(whole / 60) % 60;
  const hours = Math.floor(whole / 3600);
  if (hours >= 48) return `${Math.floor(hours / 24)}d ${two(hours % 24)}:${two(minute)}`;
  return hours ? `${hours}:${two(minute)}:${two(whole % 60)}` : `${minute}:${two(whole % 60)}`;
}

/** Local time of day, with the day if it is not today: "14:03:22", "Nov 15 14:03". */
export function when(t_s, now_s = Date.now() / 1000) {
  if (!isKnown(t_s)) return "-";
  const at = new Date(t_s * 1000);
  const isToday = at.toDateString() === new Date(now_s * 1000).toDateString();
  return isToday ? clock(at) : `${day(at)} ${two(at.getHours())}:${two(at.getMinutes())}`;
}

/** Local date and time in full. */
export function whenInFull(t_s) {
  const at = new Date(t_s * 1000);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${clock(at)}`;
}

export const clock = (at) => `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
export const hourMinute = (at) => `${two(at.getHours())}:${two(at.getMinutes())}`;
export const day = (at) => `${at.toLocaleString("en-US", { month: "short" })} ${at.getDate()}`;

/** Any text on one line, shortened if necessary by whole characters, never by half of an emoji. */
export function oneLine(text, longest = 80) {
  const wanted = String(text ?? "");
  const plain = wanted
    .slice(0, 4 * longest)
    .replace(/[\p{C}\s]+/gu, " ")
    .trim();
  const letters = Array.from(plain);
  if (letters.length <= longest && wanted.length <= 4 * longest) return plain;
  return letters.slice(0, longest - 1).join("") + "…";
}

/** "4 workers, depth 3, 6GB, batch 32, cache 20.0 GiB": the settings that are present. */
export function configuration(settings) {
  if (!settings) return "";
  const parts = [];
  if (settings.workers != null) parts.push(`${settings.workers} worker${settings.workers === 1 ? "" : "s"}`);
  if (settings.depth != null) parts.push(`depth ${settings.depth}`);
  else if (settings.prefetch_factor != null) parts.push(`prefetch ${settings.prefetch_factor}`);
  const held = settings.memory;
  if (held != null && held !== "auto") {
    parts.push(typeof held === "string" ? held : held > 1 ? memory(held) : share(held));
  }
  if (settings.batch_size != null) parts.push(`batch ${settings.batch_size}`);
  if (settings.cache_bytes) parts.push(`cache ${memory(settings.cache_bytes)}`);
  return oneLine(parts.join(", "), 80);
}

/** The settings of each loader of a run (`summaryOf`), now or at its end. */
export function settingsOf(run) {
  const latest = new Map();
  for (const each of [...run.tried].sort((a, b) => a.ended_s - b.ended_s)) {
    latest.set(each.loader, each.configuration);
  }
  const words = run.loaders.map((loader, number) => {
    const given = loader.arguments ?? {};
    const settings = latest.get(number) ?? { ...given, workers: given.num_workers };
    return (run.loaders.length > 1 ? `${loader.name}: ` : "") + configuration(settings);
  });
  return oneLine(words.join("; "), 160);
}
