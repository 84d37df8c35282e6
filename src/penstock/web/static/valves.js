// The valves of one loader: workers, depth, memory, applied together.
// In: the present values; what the user types. Out: POST /api/runs/ID/set, and its answer or refusal in words.

import { freshId, make, mark, say } from "./elements.js";
import { memory } from "./shown.js";
import { ask, runPath } from "./session.js";

const COUNTS = { workers: { least: 0, most: 256 }, depth: { least: 1, most: 4096 } };

export class Valves {
  #fields = new Map();
  #now = {};

  constructor(runId, loader) {
    this.runId = runId;
    this.loader = loader;
    this.answer = make("p", { class: "answer", role: "status", "aria-live": "polite" });
    this.apply = make("button", { type: "submit", class: "strong" }, "Apply");
    const id = freshId("memory");
    const field = make("input", {
      id,
      type: "text",
      size: "9",
      spellcheck: "false",
      autocomplete: "off",
      placeholder: "6GB, 50%",
    });
    this.#fields.set("memory", field);
    const fields = make(
      "fieldset",
      {},
      make("legend", { class: "unseen" }, `Valves of loader ${loader}`),
      this.#count("workers"),
      this.#count("depth"),
      make("div", { class: "valve" }, make("label", { for: id }, "memory"), field),
      this.apply,
    );
    this.element = make(
      "form",
      {
        class: "valves",
        novalidate: true,
        onsubmit: (event) => {
          event.preventDefault();
          void this.#set();
        },
      },
      fields,
      this.answer,
    );
    for (const each of this.#fields.values()) each.addEventListener("input", () => this.#markChanged());
  }

  /** Show the present values {workers, depth, memory}, except in fields that the user has changed. */
  follow(now) {
    for (const [name, field] of this.#fields) {
      const before = this.#now[name] ?? "";
      const value = now[name] === null || now[name] === undefined ? "" : String(now[name]);
      if (field.value.trim() === String(before) && field.value !== value) field.value = value;
      this.#now[name] = value;
    }
    this.#markChanged();
  }

  #count(name) {
    const id = freshId(name);
    const { least, most } = COUNTS[name];
    const field = make("input", {
      id,
      type: "text",
      inputmode: "numeric",
      pattern: "[0-9]*",
      size: "4",
      autocomplete: "off",
    });
    const step = (by) => {
      const here = Number.parseInt(field.value, 10);
      field.value = String(Math.max(least, Math.min(most, (Number.isNaN(here) ? least : here) + by)));
      this.#markChanged();
    };
    field.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      step(by);
    });
    this.#fields.set(name, field);
    return make(
      "div",
      { class: "valve" },
      make("label", { for: id }, name),
      make(
        "span",
        { class: "stepper" },
        make("button", { type: "button", "aria-label": `fewer: ${name}`, onclick: () => step(-1) }, "−"),
        field,
        make("button", { type: "button", "aria-label": `more: ${name}`, onclick: () => step(1) }, "+"),
      ),
    );
  }

  get #changed() {
    return [...this.#fields].filter(([name, field]) => field.value.trim() !== String(this.#now[name] ?? ""));
  }

  #markChanged() {
    const changed = new Set(this.#changed.map(([name]) => name));
    for (const [name, field] of this.#fields) mark(field, "data-changed", changed.has(name) ? "yes" : null);
  }

  async #set() {
    const changed = this.#changed;
    if (!changed.length) return this.#say("No value was changed.", "");
    const sent = changed.map(([name, field]) => [name, field.value.trim()]);
    const body = { loader: this.loader };
    for (const [name, value] of sent) {
      // Text that is not a number is sent as it is; the answer explains what is wrong with it.
      body[name] = name in COUNTS && /^\d+$/.test(value) ? Number(value) : value;
    }
    mark(this.element, "aria-busy", "true");
    this.#say("Applying…", "");
    try {
      const answer = await ask(`${runPath(this.runId)}/set`, body);
      const now = answer?.now ?? {};
      const words = `Now: workers ${now.workers}, depth ${now.depth}, memory ${memory(now.memory_bytes)}.`;
      this.#say(now.remark ? `${words} ${now.remark}.` : words, "good");
      // The values that were sent are in force, not the values typed in the meantime.
      for (const [name, value] of sent) this.#now[name] = value;
      this.#markChanged();
    } catch (problem) {
      const isSilent = problem.status === 0 || problem.status === 503;
      const outcome = isSilent ? "No answer; it may have been applied" : "Refused";
      this.#say(`${outcome}: ${problem.message}`, "bad");
    } finally {
      mark(this.element, "aria-busy", null);
    }
    return undefined;
  }

  #say(words, kind) {
    mark(this.answer, "data-kind", kind);
    say(this.answer, words);
  }
}
