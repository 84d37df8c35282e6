// The page: the open view, the connection to the server, the token.
// In: the address' fragment (#run=ID, #compare=ID,ID, #token=...). Out: one view in <main>.

import { listingOf } from "./arrivals.js";
import { CompareView } from "./compare_view.js";
import { Connection } from "./connection.js";
import { make, mark, say } from "./elements.js";
import { RunView } from "./run_view.js";
import { RunsView } from "./runs_view.js";
import { keepToken, readFragment, whenTokenIsWanted } from "./session.js";

const byId = (id) => document.getElementById(id);
const chosen = new Set();
let view = null;
let latest = null; // The list of runs as it last came.
let opened = null; // What the fragment said about the view that is open.
let countdown = null;
let today = new Date().toDateString();

// -- the connection ---------------------------------------------------------------------------

const connection = new Connection((state, words, pause_s) => {
  clearInterval(countdown);
  document.documentElement.dataset.connection = state;
  mark(byId("connection"), "data-state", state);
  const said = {
    live: "live",
    connecting: "connecting",
    waiting: `disconnected: ${words}; trying again`,
    refused: words,
    paused: words,
  }[state];
  // A screen reader would read "connecting" before every try.
  if (state !== "connecting" || byId("connection-words").textContent === "") say(byId("connection-words"), said);
  byId("connection-again").hidden = state !== "waiting" && state !== "refused";
  say(byId("connection-wait"), "");
  if (state !== "waiting") return;
  const next = performance.now() + pause_s * 1000;
  const tick = () => say(byId("connection-wait"), `in ${Math.max(0, Math.ceil((next - performance.now()) / 1000))} s`);
  tick();
  countdown = setInterval(tick, 250);
});
byId("connection-again").addEventListener("click", () => connection.tryNow());
window.addEventListener("online", () => connection.tryNow());

// -- the token --------------------------------------------------------------------------------

whenTokenIsWanted((why, said) => {
  say(byId("token-why"), said && !why.includes(said) ? `${why} The server says: ${said}` : why);
  if (!byId("token").hidden) return;
  byId("token").hidden = false;
  byId("token-field").focus();
});
function useToken() {
  byId("token").hidden = true;
  connection.tryNow();
}

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // A pasted address contains the token, too.
  const typed = byId("token-field").value;
  keepToken(new URLSearchParams(typed.split("#").pop()).get("token") ?? typed);
  byId("token-field").value = "";
  useToken();
  byId("main").focus();
});
byId("token-close").addEventListener("click", () => {
  byId("token").hidden = true;
  byId("main").focus();
});

// -- the view ---------------------------------------------------------------------------------

function takeRuns(listing) {
  latest = listingOf(listing);
  const unread = latest.unreadable ? `, and ${latest.unreadable} that cannot be read` : "";
  say(byId("home"), latest.home ? `runs in ${latest.home}${unread}` : "");
  view?.runsChanged(latest);
  retitle();
}

function retitle() {
  const words = `${view.name} · penstock`;
  if (document.title !== words) document.title = words;
}

function chosenChanged() {
  const address = `#compare=${[...chosen].join(",")}`;
  mark(byId("to-compare"), "href", address);
  if (view instanceof CompareView) {
    history.replaceState(null, "", address);
    view.chosenChanged();
  }
}

function open() {
  const { said, hasToken } = readFragment();
  // A new address pasted into an open tab changes only the fragment; the page is not loaded again.
  if (hasToken) useToken();
  const wanted = said.has("run") ? `run ${said.get("run")}` : said.has("compare") ? "compare" : "runs";
  if (said.has("compare")) {
    chosen.clear();
    for (const id of said.get("compare").split(",")) if (id) chosen.add(id);
  }
  if (wanted === opened) {
    view.chosenChanged?.();
    return;
  }
  const isFirst = opened === null;
  opened = wanted;
  view?.close();
  if (said.has("run")) view = new RunView(said.get("run"));
  else view = said.has("compare") ? new CompareView(chosen, chosenChanged) : new RunsView(chosen, chosenChanged);
  byId("main").replaceChildren(view.element);
  mark(byId("to-runs"), "aria-current", view instanceof RunsView ? "page" : null);
  mark(byId("to-compare"), "aria-current", view instanceof CompareView ? "page" : null);
  if (latest) view.runsChanged(latest);
  chosenChanged();
  retitle();
  if (!isFirst) {
    window.scrollTo(0, 0);
    view.title.focus();
  }
  const followed = view;
  connection.follow({
    run: said.get("run"),
    prepare: () => followed.prepare?.(),
    since: () => followed.since?.(),
    on: { ...followed.on, runs: takeRuns },
  });
}

window.addEventListener("hashchange", () => {
  // "Skip to content" is a place on the page, not a view.
  if (location.hash !== "#main") open();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => view?.themeChanged?.());
// Times of today are written without the day: after midnight the page would show times of yesterday without the day,
// too.
setInterval(() => {
  const day = new Date().toDateString();
  if (day === today) return;
  today = day;
  view?.dayChanged?.();
}, 1000);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
document.querySelector(".brand").prepend(make("span", { class: "gate", "aria-hidden": "true" }));
open();
