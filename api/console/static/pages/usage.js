// What was used: tokens by day, adapter, key or tenant, and the limits of the own tenant.

import { foreign, h, put } from "../dom.js";
import { barChart } from "../chart.js";
import { count, percent, short, span } from "../format.js";
import { api, query } from "../http.js";
import { identity } from "../identity.js";
import { card, errorBox, facts, pageHead, select, tile } from "../parts.js";
import { table } from "../table.js";
import { tenantNames } from "./names.js";

const SPANS = [["7", "Last 7 days"], ["30", "Last 30 days"], ["90", "Last 90 days"]];

function usagePath(tenantId, group, days) {
  const from = new Date(Date.now() - days * 86400000).toISOString();
  const path = identity.isAdmin ? "v1/admin/usage" : "v1/usage";
  return query(path, { group_by: group, from, tenant_id: identity.isAdmin ? tenantId : null });
}

/** Tokens by day, as a chart. */
export function usageCard({ signal, tenantId = null, days = 30 }) {
  const box = h("div", {}, h("p", { class: "muted" }, "Loading…"));
  api.get(usagePath(tenantId, "day", days), { signal }).then(({ data }) => {
    const sums = sum(data);
    put(box, data.length ? [
      h("p", { class: "muted small" }, `${count(sums.requests)} requests, ${short(sums.total_tokens)} tokens, ${percent(sums.cached_tokens / sums.prompt_tokens)} of the prompts' tokens were cached`),
      barChart({ label: `Tokens by day in the last ${days} days`, values: data.map((row) => [row.group, row.total_tokens]) }),
    ] : h("p", { class: "muted" }, "Nothing was used in this time."));
  }, (error) => error.name !== "AbortError" && put(box, errorBox(error)));
  return card("Tokens by day", box);
}

export async function showUsage({ signal }) {
  const groups = [["day", "By day"], ...(identity.isAdmin ? [["tenant", "By tenant"]] : []), ["adapter", "By adapter"], ["key", "By key"], ["session", "By session"]];
  const days = select(SPANS, "30", { "aria-label": "Time" });
  const group = select(groups, identity.isAdmin ? "tenant" : "adapter", { "aria-label": "Group" });
  const tiles = h("div", { class: "tiles" });
  const chart = h("div");
  const rows = table({
    caption: "Tokens and requests", empty: "Nothing was used in this time.",
    columns: [
      { label: "Group", clip: true, sort: (row) => row.group ?? "", cell: (row) => row.group === null ? h("span", { class: "muted" }, "without a session") : nameOf(row.group) },
      ...[["requests", "Requests"], ["prompt_tokens", "Prompt"], ["cached_tokens", "Cached"], ["completion_tokens", "Answer"], ["total_tokens", "Total"]].map(([name, label]) => ({ label, number: true, sort: (row) => row[name], cell: (row) => count(row[name]) })),
      { label: "Drafted", number: true, sort: (row) => row.drafted_tokens, cell: (row) => count(row.drafted_tokens) },
      { label: "Reasoning", number: true, sort: (row) => row.reasoning_tokens, cell: (row) => count(row.reasoning_tokens) },
      { label: "Engine time", number: true, sort: (row) => row.engine_ms, cell: (row) => span(row.engine_ms / 1000) },
      { label: "Cost", number: true, cell: (row) => costs(row.costs) },
    ],
  });
  const names = new Map();

  function nameOf(id) {
    return group.value === "tenant" ? h("a", { href: `#/tenants/${encodeURIComponent(id)}` }, foreign(names.get(id) ?? id)) : foreign(id);
  }

  async function draw() {
    const [{ data }, byDay] = await Promise.all([
      api.get(usagePath(null, group.value, Number(days.value)), { signal }),
      api.get(usagePath(null, "day", Number(days.value)), { signal }),
    ]);
    if (group.value === "tenant") await tenantNames(names, signal);
    rows.show(data.map((row) => ({ ...row, id: row.group })));
    const sums = sum(byDay.data);
    put(tiles, tile("Requests", short(sums.requests)), tile("Prompt tokens", short(sums.prompt_tokens)), tile("Of these cached", percent(sums.cached_tokens / sums.prompt_tokens)), tile("Answer tokens", short(sums.completion_tokens)));
    put(chart, barChart({ label: "Tokens by day", values: byDay.data.map((row) => [row.group, row.total_tokens]) }));
  }
  for (const control of [days, group]) control.addEventListener("change", () => draw().catch((error) => put(chart, errorBox(error))));
  await draw();
  rows.sortBy(5);
  const quota = identity.isAdmin ? null : await quotaCard(signal);
  return h("div", { class: "stack" }, pageHead("Usage", { actions: [days, group] }), tiles, card("Tokens by day", chart), h("section", { class: "card", "aria-label": "Usage" }, rows.element), quota);
}

export function costs(amounts) {
  return (amounts ?? []).map(({ amount, currency }) => `${amount} ${currency}`).join(", ") || "–";
}

async function quotaCard(signal) {
  const quota = await api.get("v1/quota", { signal }).catch(() => null);
  if (!quota) return null;
  const entries = Object.entries(quota).filter(([, value]) => typeof value === "number").map(([name, value]) => [name.replaceAll("_", " "), withUse(quota.used, name, count(value))]);
  return card("Your limits", entries.length ? facts(entries) : h("p", { class: "muted" }, "The operator has set no limits for you."));
}

/** A limit with what is used of it, where the server tells. */
function withUse(used, limit, text) {
  const found = used?.[limit] ?? used?.[limit.replace(/^max_/, "")];
  return typeof found === "number" ? `${text} (${count(found)} used)` : text;
}

function sum(rows) {
  const sums = { requests: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0, total_tokens: 0 };
  for (const row of rows) for (const name of Object.keys(sums)) sums[name] += row[name];
  return sums;
}
