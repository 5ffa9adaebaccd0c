// Builds elements. Text only ever becomes a text node: nothing here parses markup.
// What a tenant, a client or a model wrote is passed through `foreign`, which keeps its writing direction to itself.

const SVG = "http://www.w3.org/2000/svg";
const BIDI_CONTROLS = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f]/g;

/** Makes an element. `props`: class, on: {event: listener}, data: {name: value}; the rest are attributes. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** Makes an SVG element. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" && "value" in element) element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

/** Replaces what is in an element. */
export function put(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

/** Text from outside, isolated from the text around it: it can neither be markup nor turn the line around. */
export function foreign(text, tag = "bdi", props = {}) {
  return h(tag, { dir: "auto", ...props }, visible(text));
}

/** Text from outside for places that take no elements, such as titles and labels: without direction marks. */
export function plain(text) {
  return String(text ?? "").replace(BIDI_CONTROLS, "").replace(CONTROLS, "\ufffd");
}

/** The same text with control characters as visible marks. */
export function visible(text) {
  return String(text ?? "").replace(CONTROLS, "\ufffd");
}

const CHUNK = 20000;

/** A long text: its beginning, and a button that shows the next part. A line of megabytes costs nothing until then. */
export function folded(text, { limit = 3000, mono = false } = {}) {
  const whole = visible(text);
  const box = h("div", { class: mono ? "text mono" : "text", dir: "auto" });
  let shown = 0;
  const more = h("button", { class: "link small", type: "button", on: { click: () => show(CHUNK) } });
  function show(count) {
    const end = cut(whole, Math.min(whole.length, shown + count));
    box.append(document.createTextNode(whole.slice(shown, end)));
    shown = end;
    const left = whole.length - shown;
    more.hidden = left === 0;
    more.textContent = `Show more (${left.toLocaleString("en")} characters left)`;
  }
  show(limit);
  return h("div", { class: "folded" }, box, more);
}

function cut(text, at) {
  const code = text.charCodeAt(at - 1);
  return code >= 0xd800 && code <= 0xdbff && at < text.length ? at - 1 : at;
}

/** Says something to people who listen instead of look. */
export function say(text) {
  const place = document.getElementById("said");
  place.textContent = "";
  place.textContent = plain(text);
}

const ICONS = {
  overview: "M3 10.500 10 4l7 6.500M5 9v7h10V9",
  tenants: "M7.500 9a2.700 2.700 0 1 0 0-5.400A2.700 2.700 0 0 0 7.500 9ZM2.500 16c.3-3 2.300-4.500 5-4.500s4.700 1.500 5 4.500M13 9a2.200 2.200 0 1 0-.6-4.300M14.500 11.700c1.800.5 2.800 1.900 3 4.300",
  people: "M10 9.500a3.100 3.100 0 1 0 0-6.200 3.100 3.100 0 0 0 0 6.200ZM3.800 16.700c.4-3.500 2.900-5.200 6.200-5.200s5.800 1.700 6.200 5.200",
  adapters: "M10 17V9M10 12c-3.700 0-5.500-2-5.500-5.500C8 6.500 10 8.500 10 12ZM10 9c0-3 1.800-5 5.500-5.500.2 3.600-1.800 5.500-5.500 5.500",
  sessions: "M4 4.500h12v8.500H9l-3.500 3v-3H4z",
  keys: "M7 13.500a3.500 3.500 0 1 1 3.300-4.700H17v2.500h-2v2h-2.500v-2h-2.200A3.500 3.500 0 0 1 7 13.500ZM6.500 10h.1",
  replicas: "M4 4h12v5H4zM4 11h12v5H4zM7 6.500h.1M7 13.500h.1",
  usage: "M3.500 16.500h13M6 14V9M10 14V5M14 14v-3",
  invoices: "M5 3.500h10v13l-2-1.300-1.500 1.300-1.500-1.300-1.500 1.300-1.500-1.300-2 1.300zM8 7h4M8 10h4",
  prices: "M10.500 3.500h6v6l-7 7-6-6zM13.500 6.500h.1",
  audit: "M5 3.500h10v13H5zM8 7h4M8 10h4M8 13h2",
  modes: "M3 6h8M15 6h2M3 14h2M9 14h8M13 4v4M7 12v4",
  playground: "M4 4.500h5v11H4zM11 4.500h5v11h-5z",
  request: "M3 5h6M6 10h8M11 15h6",
  sun: "M10 13.500a3.500 3.500 0 1 0 0-7 3.500 3.500 0 0 0 0 7ZM10 2v1.500M10 16.500V18M2 10h1.500M16.500 10H18M4.300 4.300l1 1M14.700 14.700l1 1M4.300 15.700l1-1M14.700 5.300l1-1",
  moon: "M16.500 11.700A7 7 0 1 1 8.300 3.500a5.500 5.500 0 0 0 8.200 8.200Z",
};

export function icon(name) {
  return s("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}
