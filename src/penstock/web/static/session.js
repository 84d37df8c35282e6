// The token and every request made with it.
// In: the address' fragment, sessionStorage, what is typed. Out: answers as values, or a Refusal.

const KEY = "penstock-token";
const ANSWERS_WITHIN_MS = 15_000;

/** What the server refused, with its reason. Status 0: there was no answer at all. */
export class Refusal extends Error {
  constructor(status, why) {
    super(why);
    this.status = status;
  }
}

let token = null;
let isTokenNeeded = false; // For reading; for changing it is, always.
let onWanted = () => {};

/** `listener(why)` is called when a token is missing or wrong. */
export function whenTokenIsWanted(listener) {
  onWanted = listener;
}

/**
 * What the fragment says, as parameters, and whether it brought a token: that is kept for this tab and taken out of the
 * address bar.
 */
export function readFragment() {
  const said = new URLSearchParams(location.hash.slice(1));
  const hasToken = said.has("token");
  if (hasToken) {
    keepToken(said.get("token"));
    said.delete("token");
    const rest = said.toString();
    history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
  }
  if (token === null) {
    try {
      token = sessionStorage.getItem(KEY);
    } catch {
      // Storage is forbidden in this browser: the token lives as long as the page.
    }
  }
  return { said, hasToken };
}

export function keepToken(value) {
  token = value.trim() || null;
  try {
    if (token) sessionStorage.setItem(KEY, token);
    else sessionStorage.removeItem(KEY);
  } catch {
    // As above.
  }
}

/** One request; the response, not yet read. Raises Refusal. */
export async function request(path, { body, signal } = {}) {
  // Reading goes without the token until that is refused: on loopback it needs none, so one of a server that is gone
  // must not be refused, nor be shown to whoever listens on its port now.
  const isSigned = body !== undefined || isTokenNeeded;
  let response = await send(path, { body, signal, isSigned });
  if (response.status === 401 && token !== null && !isSigned) {
    isTokenNeeded = true;
    response = await send(path, { body, signal, isSigned: true });
  }
  if (response.ok) return response;
  let why = `${response.status} ${response.statusText}`.trim();
  try {
    why = (await response.json()).why ?? why;
  } catch {
    // An answer without a reason: the status stands for it.
  }
  if (response.status === 401) {
    isTokenNeeded = false;
    onWanted(token === null ? "This needs the token." : "The token is wrong.", String(why));
  }
  throw new Refusal(response.status, String(why));
}

async function send(path, { body, signal, isSigned }) {
  const headers = { Accept: "application/json" };
  // What cannot be in a header cannot be a token either; fetch would throw an error that says nothing.
  if (isSigned && token !== null && /^[\x21-\x7e]+$/.test(token)) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
      credentials: "omit",
      redirect: "error",
      signal,
    });
  } catch (problem) {
    if (signal?.aborted) throw problem;
    isTokenNeeded = false; // What answers next may be another server.
    throw new Refusal(0, "penstock dash does not answer");
  }
}

/** One request, answered in time, as a value. */
export async function ask(path, body) {
  const response = await request(path, { body, signal: AbortSignal.timeout(ANSWERS_WITHIN_MS) }).catch((problem) => {
    throw problem instanceof Refusal ? problem : new Refusal(0, "penstock dash did not answer within 15 s");
  });
  try {
    return await response.json();
  } catch {
    throw new Refusal(0, "penstock dash broke off its answer");
  }
}

export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;
