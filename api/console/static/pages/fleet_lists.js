// The operator's lists of adapters and sessions, live from the snapshot, one page at a time.
// The operator sees which there are and how they do, and never what is in them.

import { foreign, h, put } from "../dom.js";
import { ago, bytes, count, short, span } from "../format.js";
import { live } from "../live.js";
import { chip, errorBox, pageHead, select, tierKey } from "../parts.js";
import { snapshot } from "../snapshots.js";
import { table } from "../table.js";
import { tenantLink, tenantNames } from "./names.js";
import { sessionTable } from "./overview.js";

const ROWS = 50;
const EVERY_S = 2;

export function showFleetSessions({ signal }) {
  const names = new Map();
  return listPage({
    names,
    title: "Sessions", noun: "sessions", of: "sessions", list: sessionTable(names), signal, key: tierKey(),
    sorts: [["activity", "Most active"], ["running", "Running first"], ["waiting", "Waiting first"], ["tokens", "Most tokens"]],
  });
}

export function showFleetAdapters({ signal }) {
  const names = new Map();
  const list = table({
    caption: "Adapters that requests have named", empty: "No request has named an adapter yet.",
    columns: [
      { label: "Adapter", clip: true, cell: (adapter) => h("span", {}, foreign(adapter.name), h("span", { class: "muted" }, `@${adapter.version}`)) },
      { label: "Tenant", clip: true, cell: (adapter) => tenantLink(adapter.tenant_id, names) },
      { label: "Where", cell: (adapter) => residency(adapter) },
      { label: "Size", number: true, sort: (adapter) => adapter.size_bytes, cell: (adapter) => bytes(adapter.size_bytes) },
      { label: "Running", number: true, sort: (adapter) => adapter.running, cell: (adapter) => count(adapter.running) },
      { label: "Waiting", number: true, sort: (adapter) => adapter.waiting, cell: (adapter) => count(adapter.waiting) },
      { label: "Req/s", number: true, sort: (adapter) => adapter.requests_per_s, cell: (adapter) => short(adapter.requests_per_s) },
      { label: "First token p99", number: true, sort: (adapter) => adapter.ttft_ms?.p99, cell: (adapter) => adapter.ttft_ms?.p99 ? span(adapter.ttft_ms.p99 / 1000) : "–" },
      { label: "Active", number: true, sort: (adapter) => adapter.active_at, cell: (adapter) => ago(adapter.active_at) },
    ],
  });
  return listPage({
    names, title: "Adapters", noun: "adapters", of: "adapters", list, signal,
    sorts: [["activity", "Most active"], ["running", "Running first"], ["waiting", "Waiting first"], ["ttft", "Slowest first tokens"], ["name", "Name"]],
  });
}

/** On which tier an adapter's weights are, and at which engines. */
export function residency(adapter) {
  const at = adapter.residency === "device" ? adapter.device : adapter.host;
  const many = at.length ? ` of ${at.length}` : "";
  if (adapter.residency === "device") return chip(`device${many}`, "good");
  if (adapter.residency === "host") return chip(`host${many}`, "info");
  return chip("store only", "");
}

function listPage({ title, noun, of, list, sorts, signal, names, key = null }) {
  const sort = select(sorts, sorts[0][0], { "aria-label": "Order" });
  const find = h("input", { type: "search", placeholder: `Find ${noun}`, "aria-label": `Find ${noun}`, data: { filter: "" } });
  const note = h("span", { role: "status" });
  const problem = h("div", { "aria-live": "polite" });
  const earlier = h("button", { type: "button", on: { click: () => { first = Math.max(0, first - ROWS); round(); } } }, "Earlier");
  const later = h("button", { type: "button", on: { click: () => { first += ROWS; round(); } } }, "Later");
  let first = 0;
  let timer = 0;
  const round = live({
    signal, every: EVERY_S,
    load: async () => {
      const found = await snapshot({ sort: sort.value, rows: ROWS, find: find.value.trim() || null, [of]: first || null }, signal);
      if (found[of].some((row) => !names.has(row.tenant_id))) await tenantNames(names, signal);
      return found;
    },
    show: (found) => {
      put(problem);
      const rows = found[of];
      list.show(rows);
      const all = found.totals[of];
      note.textContent = rows.length ? `${first + 1} to ${first + rows.length} of ${count(all)} ${noun}` : `0 ${noun}`;
      earlier.disabled = first === 0;
      later.disabled = first + rows.length >= all;
    },
    failed: (error) => put(problem, errorBox(error)),
  });
  sort.addEventListener("change", () => { first = 0; round(); });
  find.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => { first = 0; round(); }, 250); });
  return h("div", { class: "stack" }, pageHead(title), h("section", { class: "card", "aria-label": title },
    h("div", { class: "table-tools" }, find, sort, key), problem, list.element, h("div", { class: "table-foot" }, note, earlier, later)));
}
