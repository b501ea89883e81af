// Elements made of text and attributes: nothing on this page is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** An HTML element; children are elements or text. */
export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** Replace what an element holds, unless it shows the same already (so that a selection in it survives). */
export function show(element, ...children) {
  const before = element.childNodes;
  const isSame = before.length === children.length && children.every((child, place) => child.isEqualNode(before[place]));
  if (!isSame) element.replaceChildren(...children);
}

/** Switch buttons and the like on or off; if the focus is on one that is switched off, it goes to `instead`. */
export function enable(controls, instead) {
  const focused = document.activeElement;
  for (const [control, isOn] of controls) control.disabled = !isOn;
  if (focused?.disabled) instead.focus({ preventScroll: true });
}

export function number(value, digits = 1) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const milliseconds = (value) =>
  value === null || value === undefined ? "–" : `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;

export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${number(100 * share, 0)} %`);

/** A token's text with its white space made visible; what has no text at all is shown by its id. */
export function visible(text, id) {
  if (text === "") return `#${id}`;
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣").replace(/ $/, "␣");
}

// Every drafter has a colour of its own for as long as the page lives, in the order they became known.
const known = [];
const COLOURS = 8;

export function knowDrafters(names) {
  for (const name of names) if (!known.includes(name)) known.push(name);
}

/** The class that gives a drafter's colour. */
export function colour(name) {
  if (name === null || name === "") return "own";
  if (name === "grammar") return "grammar";
  knowDrafters([name]);
  return `d${known.indexOf(name) % COLOURS}`;
}
