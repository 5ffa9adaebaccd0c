// What is owed: all tenants in a month, one tenant month by month, and the invoice of one month with its lines.

import { barChart } from "../../chart.js";
import { foreign, h, plain, put } from "../../dom.js";
import { count, short } from "../../format.js";
import { api, at, query } from "../../http.js";
import { identity } from "../../identity.js";
import { card, chip, pageHead, select, tile } from "../../parts.js";
import { pagedTable, pageOf, table } from "../../table.js";
import { tenantNames } from "../names.js";
import { download, invoiceCsv, invoiceJson } from "./files.js";
import { column, grouped, moneyList, totalsOf } from "./money.js";
import { lastMonths, monthName, spanOf } from "./months.js";

const MONTHS = 13;
const ITEMS = {
  input: "Prompt, computed", input_device: "Prompt, from the device", input_host: "Prompt, from the host", input_disk: "Prompt, from disk",
  output: "Answers", kv_gb_hour: "KV on the device", adapter_gb: "Adapters loaded",
};
const UNITS = { token: "tokens", byte: "bytes", "byte-second": "byte-seconds" };
const RATE_UNITS = { token: "a million tokens", byte: "a GB", "byte-second": "a GB-hour" };

const invoiceHref = (tenantId, month) => (tenantId === null ? `#/invoices/${month}` : `#/invoices/${encodeURIComponent(tenantId)}/${month}`);
const isNow = (month) => month === lastMonths(1)[0];

function usage(fields) {
  return query(identity.isAdmin ? "v1/admin/usage" : "v1/usage", fields);
}

/** The operator's page: what each tenant owes for a month. */
export async function showInvoices({ signal }) {
  const months = lastMonths(MONTHS);
  const month = select(months.map((one) => [one, monthName(one)]), months[0], { "aria-label": "Month" });
  const tiles = h("div", { class: "tiles money" });
  const names = new Map();
  let rows = [];
  const list = pagedTable({
    caption: "What the requests of each tenant cost", noun: "tenant", signal, empty: "No tenant has used anything in this month.",
    load: async (after, limit) => {
      if (after === null) {
        const [byTenant, byPrice] = await Promise.all(["tenant", "price"].map((group) => api.get(usage({ group_by: group, ...spanOf(month.value) }), { signal })));
        if (byTenant.data.length) await tenantNames(names, signal);
        rows = byTenant.data.map((row) => ({ ...row, id: row.group })).sort((a, b) => b.total_tokens - a.total_tokens);
        drawTiles(tiles, byPrice.data);
      }
      return pageOf(rows, after, limit);
    },
    text: (row) => `${names.get(row.group) ?? ""} ${row.group}`,
    columns: [
      { label: "Tenant", clip: true, sort: (row) => names.get(row.group) ?? row.group, cell: (row) => h("a", { href: `#/invoices/${encodeURIComponent(row.group)}` }, foreign(names.get(row.group) ?? row.group)) },
      ...figureColumns(),
      { label: "Cost", number: true, cell: (row) => moneyList(row.costs) },
      { label: "", cell: (row) => h("div", { class: "actions" }, h("a", { class: "button", "aria-label": `Invoice of ${plain(names.get(row.group) ?? row.group)}`, href: invoiceHref(row.group, month.value) }, "Invoice")) },
    ],
  });
  await list.ready;
  month.addEventListener("change", list.restart);
  return h("div", { class: "stack" },
    pageHead("Invoices", { actions: [month, h("a", { class: "button", href: "#/prices" }, "Prices")] }), tiles, h("section", { class: "card", "aria-label": "Tenants" }, list.element));
}

function figureColumns() {
  return [["requests", "Requests"], ["prompt_tokens", "Prompt"], ["cached_tokens", "Cached"], ["completion_tokens", "Answer"]]
    .map(([name, label]) => ({ label, number: true, sort: (row) => row[name], cell: (row) => count(row[name]) }));
}

function drawTiles(box, byPrice) {
  const unpriced = byPrice.find((row) => row.group === null)?.requests ?? 0;
  put(box,
    tile("Cost", moneyList(totalsOf(byPrice.map((row) => row.costs)))),
    tile("Requests", short(byPrice.reduce((sum, row) => sum + row.requests, 0))),
    tile("Without a price", short(unpriced), { tone: unpriced ? "warn" : "", note: unpriced ? "requests that cost nothing" : "" }));
}

/** One tenant month by month: the tenant's own page, and the operator's for each tenant. */
export async function showMonths({ params: [tenantId = null], signal }) {
  const months = lastMonths(MONTHS);
  const range = { tenant_id: tenantId, from: spanOf(months.at(-1)).from, to: spanOf(months[0]).to };
  const [{ data }, tenant] = await Promise.all([
    api.get(usage({ group_by: "day", ...range }), { signal }),
    tenantId === null ? null : api.get(at`v1/admin/tenants/${tenantId}`, { signal }).catch((error) => { if (error.status === 404) return null; throw error; }),
  ]);
  const byMonth = Map.groupBy(data, (row) => row.group.slice(0, 7));
  const rows = months.filter((month) => isNow(month) || byMonth.has(month)).map((month) => sumOf(month, byMonth.get(month) ?? []));
  const list = table({
    caption: "Months in UTC", rows,
    columns: [
      { label: "Month", cell: (row) => h("a", { href: invoiceHref(tenantId, row.id) }, monthName(row.id)) },
      { label: "State", cell: (row) => stateChip(!isNow(row.id)) },
      ...figureColumns(),
      { label: "Cost", number: true, cell: (row) => moneyList(row.costs) },
    ],
  });
  const now = rows[0];
  const title = tenantId === null ? "Invoices" : h("span", {}, "Invoices of ", foreign(tenant?.name ?? tenantId));
  return h("div", { class: "stack" },
    pageHead(title, { crumbs: tenantId === null ? [] : [["Invoices", "#/invoices"]], actions: [tenant ? h("a", { class: "button", href: `#/tenants/${encodeURIComponent(tenantId)}` }, "Tenant") : null, h("a", { class: "button", href: "#/prices" }, "Prices")].filter(Boolean) }),
    h("div", { class: "tiles money" }, tile("This month so far", moneyList(now.costs)), tile("Requests", short(now.requests)), tile("Tokens", short(now.prompt_tokens + now.completion_tokens), { note: `${short(now.cached_tokens)} from the cache` })),
    daysCard(byMonth.get(now.id) ?? []), card("Months", list.element, { flush: true }));
}

function sumOf(month, days) {
  const sum = (name) => days.reduce((all, day) => all + day[name], 0);
  const names = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens"];
  return { id: month, costs: totalsOf(days.map((day) => day.costs)), ...Object.fromEntries(names.map((name) => [name, sum(name)])) };
}

/** Bars of what each day of this month costs, in the first of its currencies. */
function daysCard(days) {
  const currency = totalsOf(days.map((day) => day.costs))[0]?.currency;
  if (currency === undefined) return null;
  const values = days.map((day) => [day.group, Number(day.costs.find((cost) => cost.currency === currency)?.amount ?? 0)]);
  return card("Cost by day, this month", barChart({ label: `Cost by day of this month in ${currency}`, values, format: (value) => `${value.toLocaleString("en", { maximumSignificantDigits: 3 })}` }));
}

function stateChip(isFinal) {
  return isFinal ? chip("final", "good") : chip("so far", "info");
}

/** One invoice with its lines. The operator's address has the tenant before the month. */
export async function showInvoice({ params, signal }) {
  const month = params.at(-1);
  const tenantId = params.length > 1 ? params[0] : null;
  const path = identity.isAdmin ? "v1/admin/usage/invoice" : "v1/usage/invoice";
  const [invoice, tenant, lists] = await Promise.all([
    api.get(query(path, { tenant_id: tenantId, month }), { signal }),
    tenantId === null ? identity.current.tenant : api.get(at`v1/admin/tenants/${tenantId}`, { signal }).catch((error) => { if (error.status === 404) return { name: tenantId }; throw error; }),
    api.get(identity.isAdmin ? "v1/admin/prices" : "v1/prices", { signal }),
  ]);
  const name = `invoice-${month}-${invoice.tenant_id}`;
  return h("div", { class: "stack" },
    pageHead(h("span", {}, `${monthName(month)} · `, foreign(tenant.name)), {
      crumbs: [["Invoices", "#/invoices"], ...(tenantId === null ? [] : [[plain(tenant.name), `#/invoices/${encodeURIComponent(tenantId)}`]])], chips: [stateChip(invoice.is_final)],
      actions: [
        h("button", { type: "button", "aria-label": "Download as CSV", on: { click: () => download(`${name}.csv`, "text/csv", invoiceCsv(invoice)) } }, "CSV"),
        h("button", { type: "button", "aria-label": "Download as JSON", on: { click: () => download(`${name}.json`, "application/json", invoiceJson(invoice)) } }, "JSON"),
      ],
    }),
    h("div", { class: "tiles money" }, tile("Total", moneyList(invoice.totals)), tile("Requests", count(invoice.requests)), tile("Without a price", count(invoice.unpriced.requests), { tone: invoice.unpriced.requests ? "warn" : "" })),
    invoice.is_final ? null : h("p", { class: "muted small" }, "The month is not over: requests that are still to come change this invoice."),
    invoice.unpriced.requests ? h("p", { class: "notice" }, `${count(invoice.unpriced.requests)} requests began before there was a price for them. They are in no line.`) : null,
    linesCard(invoice, lists.data));
}

function linesCard(invoice, lists) {
  const draw = { rate: column(invoice.lines.map((line) => line.rate)), amount: column([...invoice.lines, ...invoice.totals].map(({ amount }) => amount)) };
  const rows = invoice.lines.map((line, index) => ({ ...line, id: `${line.price_list} ${index}` }));
  const list = table({
    caption: "The amounts are exact: nothing is rounded after the cost of each request", rows, empty: "Nothing with a price was used in this month.",
    columns: [
      { label: "What", cell: (line) => ITEMS[line.item] ?? line.item },
      { label: "Prices of", cell: (line) => listName(line.price_list, lists) },
      { label: "Quantity", number: true, cell: (line) => grouped(String(line.quantity)) },
      { label: "Unit", cell: (line) => h("span", { class: "muted" }, UNITS[line.unit] ?? line.unit) },
      { label: "Rate", number: true, cell: (line) => draw.rate(line.rate) },
      { label: "For", cell: (line) => h("span", { class: "muted" }, RATE_UNITS[line.unit] ?? line.unit) },
      { label: "Amount", number: true, cell: (line) => h("span", {}, draw.amount(line.amount), ` ${line.currency}`) },
    ],
  });
  const totals = h("dl", { class: "totals" }, invoice.totals.map((total) => [h("dt", {}, `Total in ${total.currency}`), h("dd", {}, draw.amount(total.amount), ` ${total.currency}`)]));
  return card("Lines", [list.element, invoice.totals.length ? totals : null], { flush: true });
}

/** What a line's price list is for; of one that the reader may not see, the end of its id. */
function listName(id, lists) {
  const found = lists.find((one) => one.id === id);
  const text = found ? `${found.tenant_id === null ? "all" : "this tenant"}${found.service_tier === null ? "" : `, ${found.service_tier}`}` : `…${id.slice(-6)}`;
  return h("span", { class: "nowrap-text", title: plain(id) }, text);
}
