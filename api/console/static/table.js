// A table whose rows come page by page. Loads the next page when asked, and all of them only for a search.

import { h, put, say } from "./dom.js";
import { count, many } from "./format.js";
import { errorBox } from "./parts.js";

const PAGE = 50;
const SEARCH_PAGES = 40;

/** A table of rows that are all here. `columns`: {label, cell, number, head, clip, sort}. */
export function table({ caption, columns, rows, empty = "Nothing yet.", quiet = false }) {
  const body = h("tbody", { role: "rowgroup" });
  const sorting = { column: null, down: true };
  const heads = columns.map((column) => head(column, sorting, () => { order(); redraw(); }));
  const element = h("table", { class: "cards", role: "table" },
    h("caption", { class: quiet ? "visually-hidden" : "" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), body);
  const nothing = h("p", { class: "empty" }, empty);
  const box = h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, element, nothing);
  let shown = [];

  function order() {
    if (!sorting.column?.sort) return;
    const by = sorting.column.sort;
    const turn = sorting.down ? -1 : 1;
    shown = [...shown].sort((a, b) => turn * compare(by(a), by(b)));
    heads.forEach((cell, index) => {
      if (columns[index] === sorting.column) cell.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
      else cell.removeAttribute("aria-sort");
    });
  }

  function redraw() {
    const focused = document.activeElement?.closest("tr")?.dataset.key;
    put(body, shown.map((row) => line(columns, row)));
    if (focused && body.contains(document.activeElement) === false) body.querySelector(`tr[data-key="${CSS.escape(focused)}"] a, tr[data-key="${CSS.escape(focused)}"] button`)?.focus({ preventScroll: true });
    nothing.hidden = shown.length > 0;
    element.hidden = shown.length === 0;
  }

  function show(next) {
    shown = next;
    order();
    redraw();
  }
  show(rows ?? []);
  return { element: box, show, sortBy: (index, down = true) => { sorting.column = columns[index]; sorting.down = down; order(); redraw(); } };
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}

function head(column, sorting, redraw) {
  const props = { scope: "col", role: "columnheader", class: column.number ? "number" : "" };
  if (!column.sort) return h("th", props, column.label || h("span", { class: "visually-hidden" }, column.name ?? "Actions"));
  const button = h("button", { type: "button", on: { click: () => {
    sorting.down = sorting.column === column ? !sorting.down : column.number === true;
    sorting.column = column;
    redraw();
  } } }, column.label);
  return h("th", props, button);
}

function line(columns, row) {
  return h("tr", { role: "row", data: { key: row.id ?? "" } }, columns.map((column, index) => {
    const props = { class: [column.number && "number", column.clip && "clip"].filter(Boolean).join(" "), data: { label: column.label } };
    if (index === 0) return h("th", { scope: "row", role: "rowheader", class: props.class }, column.cell(row));
    return h("td", { role: "cell", ...props }, column.cell(row));
  }));
}

/**
 * A table that loads pages of a list. `load(after, limit, signal)` returns the server's page; `text(row)` is what a
 * search looks at, and `sought` what it finds at first. Returns {element, reload, restart}.
 */
export function pagedTable({ caption, columns, load, text, signal, empty, tools = [], noun = "row", sought = "" }) {
  const plural = many(0, noun).slice(2);
  const inner = table({ caption, columns, rows: [], empty });
  const problem = h("div", { "aria-live": "polite" });
  const note = h("span", { role: "status" });
  const more = h("button", { type: "button", on: { click: () => next().catch(fail) } }, "Load more");
  const search = text ? h("input", { type: "search", placeholder: `Find ${plural}`, "aria-label": `Find ${plural}`, data: { filter: "" }, on: { input: () => find().catch(fail) } }) : null;
  let rows = [];
  let after = null;
  let hasMore = true;
  let loading = null;

  function draw() {
    const wanted = search?.value.trim().toLowerCase() ?? "";
    const shown = wanted ? rows.filter((row) => text(row).toLowerCase().includes(wanted)) : rows;
    inner.show(shown);
    more.hidden = !hasMore;
    note.textContent = wanted ? `${count(shown.length)} of ${count(rows.length)} loaded ${plural}` : `${many(rows.length, noun)}${hasMore ? ", more to load" : ""}`;
  }

  function next(limit = PAGE) {
    loading ??= (async () => {
      more.disabled = true;
      try {
        const page = await load(after, limit, signal);
        rows = [...rows, ...page.data];
        after = page.last_id;
        hasMore = page.has_more;
        put(problem);
        draw();
      } finally {
        more.disabled = false;
        loading = null;
      }
    })();
    return loading;
  }

  async function find() {
    draw();
    for (let pages = 0; search.value.trim() && hasMore && pages < SEARCH_PAGES && !signal.aborted; pages += 1) await next(100);
  }

  function fail(error) {
    if (error.name !== "AbortError") put(problem, errorBox(error));
  }

  async function reload() {
    const wanted = Math.min(100, Math.max(PAGE, rows.length));
    const page = await load(null, wanted, signal);
    if (rows.length > wanted) rows = [...page.data, ...rows.filter((row) => !page.data.some((fresh) => fresh.id === row.id))];
    else { rows = page.data; after = page.last_id; hasMore = page.has_more; }
    draw();
  }

  /** Begins anew, for a list whose rows are others now. */
  async function restart() {
    await loading?.catch(() => {});
    rows = [];
    after = null;
    hasMore = true;
    await next().catch(fail);
  }

  if (search) search.value = sought;
  const ready = next().then(() => { if (sought) find().catch(fail); }, (error) => { if (rows.length === 0) throw error; fail(error); });
  const element = h("div", {}, search || tools.length ? h("div", { class: "table-tools" }, search, tools) : null, problem, inner.element,
    h("div", { class: "table-foot" }, note, more));
  return { element, reload, restart, ready, say: () => say(note.textContent) };
}

/** One page of rows that are all here, as the server would send it. */
export function pageOf(rows, after, limit) {
  const first = after === null ? 0 : rows.findIndex((row) => row.id === after) + 1;
  const data = rows.slice(first, first + limit);
  return { data, last_id: data.at(-1)?.id ?? after, has_more: first + limit < rows.length };
}
