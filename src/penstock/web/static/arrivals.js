// What arrives from the server, in the types the rest of the page counts on: a record may hold anything.
// In: values as JSON gave them. Out: the same, with lists that are lists and texts that are texts.

/** The objects of a list; none where it is no list. */
export const objectsOf = (value) =>
  Array.isArray(value) ? value.filter((each) => each && typeof each === "object") : [];

/** The fields of an object; none where it is something else. */
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

/** The live state of a run; null: there is none. */
export function liveOf(value) {
  if (!value || value.trouble) return null;
  return { ...value, loaders: objectsOf(value.loaders), figures: fieldsOf(value.figures) };
}
