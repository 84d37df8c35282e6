// The events of a run: journal and alerts in one list, newest first, and as marks on the charts.
// In: entries from the server. Out: an element; marks.

import { fieldsOf, objectsOf } from "./arrivals.js";
import { freshId, make, mark, say } from "./elements.js";
import { oneLine, whenInFull, when } from "./shown.js";

const AT_ONCE = 100;
const MOST = 5000; // The most notes, and the most alerts: as many as a record keeps. A page may stay open for weeks.
const TROUBLE = new Set(["restart", "warning", "action"]);
const SHOWN = {
  all: () => true,
  decisions: (entry) => entry.kind === "decision",
  alerts: (entry) => entry.look === "alert" || entry.look === "trouble" || entry.kind === "cleared",
  changes: (entry) => ["resize", "memory", "cache"].includes(entry.kind),
};

/** One entry of either list. */
function entryOf(kind, each) {
  if (kind === "alert") {
    const look = each.state === "raised" ? "alert" : "note";
    const words = each.state === "raised" ? `alert: ${each.what}` : `over: ${each.what}`;
    return {
      key: `a${each.number}`,
      t_s: each.t_s,
      look,
      who: each.rule,
      kind: each.state,
      text: words,
      details: fieldsOf(each.details),
    };
  }
  const look = each.kind === "decision" ? "decision" : TROUBLE.has(each.kind) ? "trouble" : "note";
  return {
    key: `j${each.number}`,
    t_s: each.t_s,
    look,
    who: each.who,
    kind: each.kind,
    text: String(each.what),
    details: fieldsOf(each.details),
  };
}

export class Journal {
  #entries = { note: new Map(), alert: new Map() };
  #wanted = "all";
  #room = AT_ONCE;
  #sorted = [];

  /** `onLook(t_s or null)` is called when the pointer or the focus reaches or leaves an entry. */
  constructor(onLook) {
    this.onLook = onLook;
    this.list = make("ol", { class: "entries" });
    this.empty = make("p", { class: "empty" }, "Nothing yet.");
    this.older = make(
      "button",
      {
        type: "button",
        class: "quiet",
        hidden: true,
        onclick: () => {
          this.#room += AT_ONCE;
          this.#show();
        },
      },
      "Show older",
    );
    const id = freshId("shown");
    const choice = make(
      "select",
      {
        id,
        onchange: (event) => {
          this.#wanted = event.target.value;
          this.#room = AT_ONCE;
          this.#show();
        },
      },
      ...Object.keys(SHOWN).map((name) => make("option", { value: name }, name)),
    );
    const title = freshId("journal");
    this.element = make(
      "section",
      { class: "panel journal", "aria-labelledby": title },
      make(
        "header",
        {},
        make("h2", { id: title }, "Journal"),
        make("label", { for: id, class: "small" }, "show"),
        choice,
      ),
      this.empty,
      this.list,
      this.older,
    );
  }

  /** Add entries of the journal; known entries are ignored. */
  addNotes(notes) {
    this.#add("note", notes);
  }

  addAlerts(alerts) {
    this.#add("alert", alerts);
  }

  /** Called at midnight, because times of the previous day then need their date. */
  dayChanged() {
    const times = new Map(this.#sorted.map((entry) => [entry.key, entry.t_s]));
    for (const item of this.list.children) this.#date(item, times.get(item.dataset.key));
  }

  /** All entries, oldest first. */
  get marks() {
    return this.#sorted;
  }

  /** Active alerts. */
  get standing() {
    const standing = new Map();
    for (const entry of this.#sorted) {
      if (!entry.key.startsWith("a")) continue;
      const rule = `${entry.who} ${entry.details.threshold ?? ""}`;
      if (entry.kind === "raised") standing.set(rule, entry.text.replace(/^alert: /, ""));
      else standing.delete(rule);
    }
    return [...standing.values()];
  }

  #add(kind, list) {
    const known = this.#entries[kind];
    let isNew = false;
    for (const each of objectsOf(list)) {
      const entry = entryOf(kind, each);
      if (known.has(entry.key)) continue;
      known.set(entry.key, entry);
      isNew = true;
    }
    if (!isNew) return;
    // Entries arrive in the order of their numbers: the first are the oldest.
    for (const key of known.keys()) {
      if (known.size <= MOST) break;
      known.delete(key);
    }
    const { note, alert } = this.#entries;
    this.#sorted = [...note.values(), ...alert.values()].sort((a, b) => a.t_s - b.t_s);
    this.#show();
  }

  #show() {
    const wanted = this.#sorted.filter(SHOWN[this.#wanted]).reverse();
    const shown = wanted.slice(0, this.#room);
    const known = new Map([...this.list.children].map((item) => [item.dataset.key, item]));
    const focused = document.activeElement;
    const items = shown.map((entry) => known.get(entry.key) ?? this.#item(entry));
    // Entries that stay are not removed and inserted again: focus and open details would be lost.
    for (const item of known.values()) if (!items.includes(item)) item.remove();
    items.forEach((item, i) => {
      if (this.list.children[i] !== item) this.list.insertBefore(item, this.list.children[i] ?? null);
    });
    if (focused !== document.activeElement && this.list.contains(focused)) focused.focus();
    this.empty.hidden = shown.length > 0;
    say(this.empty, this.#wanted === "all" ? "Nothing yet." : `No ${this.#wanted} yet.`);
    this.older.hidden = wanted.length <= shown.length;
  }

  #item(entry) {
    const look = () => this.onLook(entry.t_s);
    const away = () => this.onLook(null);
    const words = oneLine(entry.text, 400);
    const said = make("bdi", { class: "words", title: entry.text.length > 400 ? entry.text : null }, words);
    const item = make(
      "li",
      { "data-key": entry.key, "data-look": entry.look, onpointerenter: look, onpointerleave: away },
      make(
        "button",
        {
          type: "button",
          class: "time",
          onfocus: look,
          onblur: away,
          onclick: look,
          title: whenInFull(entry.t_s),
        },
        make("span", { class: "sign", "aria-hidden": "true" }),
        make("span"),
      ),
      make(
        "span",
        { class: "who" },
        oneLine(entry.who === entry.kind ? entry.who : `${entry.who} · ${entry.kind}`, 40),
      ),
      said,
    );
    this.#date(item, entry.t_s);
    const details = Object.entries(entry.details);
    if (details.length) {
      const rows = details.flatMap(([name, value]) => [
        make("dt", {}, oneLine(name, 60)),
        make("dd", {}, typeof value === "string" ? value : JSON.stringify(value)),
      ]);
      const more = make("details", {}, make("summary", {}, "details"), make("dl", {}, ...rows));
      mark(more, "class", "small");
      item.append(more);
    }
    return item;
  }

  #date(item, t_s) {
    const time = item.querySelector(".time");
    say(time.lastChild, when(t_s));
    mark(time, "aria-label", `${when(t_s)}, show on the charts`);
  }
}
