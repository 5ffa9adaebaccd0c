// Draws charts as SVG. All numbers come from snapshots; every chart has a text that says what it shows.

import { h, put, s } from "./dom.js";

const FIRST_WIDTH = 600;

/** A figure whose `draw(width)` is called again when it gets another width, so that texts keep their size. */
function figure(draw, ...more) {
  const place = h("div", {}, draw(FIRST_WIDTH));
  let drawn = FIRST_WIDTH;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width < 40 || width === drawn) return;
    drawn = width;
    put(place, draw(width));
  }).observe(place);
  return h("figure", {}, place, ...more);
}

/** A number beside an axis: at most three digits. */
function axis(value) {
  return Number(value).toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 });
}

/** Lines over time. `series`: [{name, points: [[x, y]]}]; x in seconds. `limit` draws a dashed line. */
export function lineChart({ label, series, height = 140, limit = null, format = axis, from = null, to = null }) {
  return figure((width) => lines({ label, series, height, limit, format, from, to, width }), legend(series));
}

function lines({ label, series, height, limit, format, from, to, width }) {
  const points = series.flatMap((one) => one.points);
  const x0 = from ?? Math.min(...points.map(([x]) => x));
  const x1 = Math.max(to ?? Math.max(...points.map(([x]) => x)), x0 + 1);
  const top = niceTop(Math.max(limit ?? 0, ...points.map(([, y]) => y ?? 0)));
  const left = 44;
  const place = ([x, y]) => [left + (width - left) * (x - x0) / (x1 - x0), 8 + (height - 26) * (1 - y / top)];
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const y = place([0, top * share])[1];
    svg.append(s("path", { class: "grid", d: `M${left} ${y}H${width}` }), s("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, format(top * share)));
  }
  if (limit !== null) svg.append(s("path", { class: "limit", d: `M${left} ${place([0, limit])[1]}H${width}` }));
  series.forEach((one, index) => {
    const known = one.points.filter(([, y]) => y !== null && y !== undefined);
    if (known.length) svg.append(s("polyline", { class: `s${index % 6 + 1}`, points: known.map((point) => place(point).map((n) => n.toFixed(1)).join(",")).join(" ") }));
  });
  svg.append(s("text", { x: left, y: height - 4 }, clock(x0)), s("text", { x: width, y: height - 4, "text-anchor": "end" }, clock(x1)));
  return svg;
}

/** Bars, one for each [label, value]. */
export function barChart({ label, values, height = 120, format = axis }) {
  return figure((width) => bars({ label, values, height, format, width }));
}

function bars({ label, values, height, format, width }) {
  const top = niceTop(Math.max(...values.map(([, value]) => value), 0));
  const left = 44;
  const step = (width - left) / Math.max(values.length, 12);
  const wide = Math.max(1, Math.min(28, step * 0.7));
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const y = 8 + (height - 26) * (1 - share);
    svg.append(s("path", { class: "grid", d: `M${left} ${y}H${width}` }), s("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, format(top * share)));
  }
  values.forEach(([name, value], index) => {
    const size = (height - 26) * value / top;
    svg.append(s("rect", { class: "s1", rx: 2, x: left + index * step + (step - wide) / 2, y: 8 + height - 26 - size, width: wide, height: size }, s("title", {}, `${name}: ${format(value)}`)));
  });
  if (values.length) {
    svg.append(s("text", { x: left, y: height - 4 }, values[0][0]));
    if (values.length > 4) svg.append(s("text", { x: left + values.length * step, y: height - 4, "text-anchor": "end" }, values.at(-1)[0]));
  }
  return svg;
}

export function sparkline(values, label) {
  const top = Math.max(...values, 1e-9);
  const points = values.map((value, index) => `${(80 * index / Math.max(values.length - 1, 1)).toFixed(1)},${(19 - 18 * value / top).toFixed(1)}`).join(" ");
  return s("svg", { class: "chart", viewBox: "0 0 80 20", width: 80, height: 20, role: "img", "aria-label": label }, s("polyline", { class: "s1", points }));
}

function legend(series) {
  if (series.length < 2) return null;
  return h("figcaption", { class: "key-list" }, series.map((one, index) => h("span", { class: `s${index % 6 + 1}` }, h("bdi", {}, one.name))));
}

function niceTop(most) {
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((top) => top >= most);
}

function clock(x) {
  return new Date(x * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}
