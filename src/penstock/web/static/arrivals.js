// Values from the server, in the types that the rest of the page relies on: a record may contain anything.
// In: values parsed from JSON. Out: the same values, in which every list is a list and every text is a text.

/** The objects of a list; an empty list for any other value. */
export const objectsOf = (value) =>
  Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : [];

/** An object itself; an empty object for any other value. */
export const fieldsOf = (value) => (value && typeof value === "object" && !Array.isArray(value) ? value : {});

const textOf = (value) => (typeof value === "string" ? value : value == null ? "" : JSON.stringify(value));

/** The summary of a run. */
export function summaryOf(value) {
  const run = fieldsOf(value);
  return {
    ...run,
    id: textOf(run.id),
    name: textOf(run.name),
    state: textOf(run.state),
    ended_s: run.ended_s ?? null,
    loaders: objectsOf(run.loaders),
    tried: objectsOf(run.tried),
  };
}

/** The list of runs. */
export const listingOf = (value) => ({ ...value, runs: objectsOf(value.runs).map(summaryOf) });

/** The live state of a run; null if there is none. */
export function liveOf(value) {
  if (!value || value.trouble) return null;
  return { ...value, loaders: objectsOf(value.loaders), figures: fieldsOf(value.figures) };
}
