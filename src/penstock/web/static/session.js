// The token and every request made with it.
// In: the address' fragment, sessionStorage, what is typed. Out: answers as values, or a Refusal.

const KEY = "penstock-token";
const ANSWERS_WITHIN_MS = 15_000;

/** A refused request, with the reason. Status 0: there was no answer. */
export class Refusal extends Error {
  constructor(status, why) {
    super(why);
    this.status = status;
  }
}

let token = null;
let isTokenNeeded = false; // Whether reading needs the token; changing always does.
let onWanted = () => {};

/** `listener(why)` is called when a token is missing or wrong. */
export function whenTokenIsWanted(listener) {
  onWanted = listener;
}

/**
 * What the fragment says, as parameters, and whether it had a token. The token is kept for this tab and removed from
 * the address bar.
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
      // This browser forbids storage: the token lasts as long as the page.
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
    // This browser forbids storage: the token lasts as long as the page.
  }
}

/** One request; returns the response, not yet read. Raises Refusal. */
export async function request(path, { body, signal } = {}) {
  // Reading sends no token until a request without it is refused. On loopback reading needs no token, and an old token
  // must neither be refused nor be sent to another program that now listens on the port.
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
    // The answer has no reason; the status takes its place.
  }
  if (response.status === 401) {
    isTokenNeeded = false;
    onWanted(token === null ? "This request needs the token." : "The token is wrong.", String(why));
  }
  throw new Refusal(response.status, String(why));
}

async function send(path, { body, signal, isSigned }) {
  const headers = { Accept: "application/json" };
  // Text that cannot be in a header cannot be a token; fetch would throw an error without an explanation.
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
    isTokenNeeded = false; // The next answer may come from another server.
    throw new Refusal(0, "penstock dash does not answer");
  }
}

/** The value of one request that is answered in time. */
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
