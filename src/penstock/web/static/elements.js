// Elements of the page. Texts of users stay text: nothing in this page parses HTML.
// In: names, attributes, texts. Out: DOM nodes.

/** An element. Attributes that begin with "on" are listeners; attributes that are null or false are left out. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Change a text only if it differs, so that screen readers keep their place and selections stay. */
export function say(element, text) {
  const wanted = String(text);
  if (element.textContent !== wanted) element.textContent = wanted;
}

/** Set or remove an attribute, only if that changes something. */
export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, String(value));
  }
}

/** Keeps one child of `parent` for each key, in order. Rows that stay are not moved, so that they keep the focus. */
export class Rows {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.rows = new Map();
  }

  /** `items` with their keys; `update(row, item)` fills each. */
  show(items, keyOf, update) {
    const wanted = new Map(items.map((item) => [keyOf(item), item]));
    for (const [key, row] of this.rows) {
      if (!wanted.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    let before = this.parent.firstElementChild;
    for (const [key, item] of wanted) {
      let row = this.rows.get(key);
      if (!row) {
        row = this.create(item);
        this.rows.set(key, row);
      }
      if (row.element === before) before = before.nextElementSibling;
      else this.parent.insertBefore(row.element, before);
      update(row, item);
    }
  }
}

let lastId = 0;

/** An id for a label and the element that it labels. */
export const freshId = (stem) => `${stem}-${++lastId}`;
