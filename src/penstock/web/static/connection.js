// The connection to the server: a stream of events that is resumed whenever it breaks.
// In: the run to follow. Out: events; the state: connecting, live, waiting (between tries), refused, paused.

import { Refusal, request } from "./session.js";

const FIRST_PAUSE_S = 1;
const LONGEST_PAUSE_S = 10;
const GROWTH = 1.7;
const SILENCE_MS = 25_000; // The server sends something every 10 s: a connection that is silent for longer is dead.
const REPEATED_S = 2; // An entry may be written a moment after the point of its second, so the last two seconds are requested again.
const HIDDEN = "hidden";

export class Connection {
  #round = 0;
  #abort = null;
  #wake = null;
  #isRefused = false;

  /** `onState(state, words, pause_s)`. */
  constructor(onState) {
    this.onState = onState;
    // A browser keeps six connections to a server for all of its tabs: six hidden tabs would block the seventh.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#abort?.abort(HIDDEN);
      else if (!this.#isRefused) this.#wake?.();
    });
  }

  /** Follow something else. `followed`: {run, prepare(), since(), on: {event: (data) => ...}}. */
  follow(followed) {
    this.#round += 1;
    this.#abort?.abort();
    this.#wake?.();
    void this.#keep(this.#round, followed);
  }

  /** Try at once instead of at the end of the pause. */
  tryNow() {
    this.#wake?.();
  }

  async #keep(round, followed) {
    let pause_s = FIRST_PAUSE_S;
    while (round === this.#round) {
      if (document.hidden) {
        this.onState("paused", "paused while this tab is hidden", 0);
        await this.#pause(Infinity);
        continue;
      }
      const abort = new AbortController();
      this.#abort = abort;
      let words = "the connection broke";
      try {
        this.onState("connecting", "connecting", 0);
        await followed.prepare?.();
        if (round !== this.#round) return;
        await this.#read(followed, abort, () => {
          pause_s = FIRST_PAUSE_S;
          this.onState("live", "live", 0);
        });
      } catch (problem) {
        if (round !== this.#round) return;
        // The form for the token explains more.
        if (problem instanceof Refusal) words = problem.status === 401 ? "the token is refused" : problem.message;
        else if (!abort.signal.aborted) words = String(problem?.message ?? problem);
        // Another try would be refused again: wait for a token, another run, or the button.
        this.#isRefused = problem instanceof Refusal && problem.status >= 400 && problem.status < 500;
      }
      if (round !== this.#round) return;
      if (this.#isRefused) {
        this.onState("refused", words, 0);
        await this.#pause(Infinity);
        this.#isRefused = false;
      } else if (abort.signal.reason !== HIDDEN) {
        this.onState("waiting", words, pause_s);
        await this.#pause(pause_s);
        pause_s = Math.min(LONGEST_PAUSE_S, pause_s * GROWTH);
      }
    }
  }

  #pause(pause_s) {
    return new Promise((resolve) => {
      const timer = pause_s === Infinity ? null : setTimeout(resolve, pause_s * 1000);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #read(followed, abort, onLive) {
    const query = new URLSearchParams();
    if (followed.run) query.set("run", followed.run);
    const since_s = followed.since?.();
    if (since_s) query.set("since", String(Math.max(0, since_s - REPEATED_S)));
    const response = await request(`/api/events?${query}`, { signal: abort.signal });
    onLive();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new EventParser((name, data) => {
      // A late piece of the previous stream must not reach another run's charts.
      if (abort.signal.aborted) return;
      try {
        followed.on[name]?.(JSON.parse(data));
      } catch (problem) {
        // An exception would end the stream, and the next stream would send the same event again.
        console.error(`the event "${name}" cannot be shown:`, problem);
      }
    });
    let timer = null;
    try {
      for (;;) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), SILENCE_MS);
        const { done, value } = await reader.read();
        if (done) return;
        parser.feed(value);
      }
    } finally {
      clearTimeout(timer);
      abort.abort();
    }
  }
}

/** Reads the lines of a text/event-stream that arrive in pieces; `onEvent(name, data)` gets the data as text. */
export class EventParser {
  #rest = "";
  #name = "";
  #data = [];

  constructor(onEvent) {
    this.onEvent = onEvent;
  }

  feed(piece) {
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) this.#take(line);
  }

  #take(line) {
    if (line === "") {
      if (this.#data.length) this.onEvent(this.#name || "message", this.#data.join("\n"));
      this.#name = "";
      this.#data = [];
      return;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return;
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (field === "event") this.#name = value;
    else if (field === "data") this.#data.push(value);
  }
}
