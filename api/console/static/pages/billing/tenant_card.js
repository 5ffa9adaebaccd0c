// The operator's card on a tenant's page: what this month costs so far, and the prices that are the tenant's own.

import { h, put, say } from "../../dom.js";
import { count, moment } from "../../format.js";
import { api, query } from "../../http.js";
import { card, errorBox, facts } from "../../parts.js";
import { forChanges } from "../rights.js";
import { moneyList } from "./money.js";
import { lastMonths, monthName } from "./months.js";
import { setPrices } from "./price_form.js";

export function billingCard(tenant, signal) {
  const box = h("div", {}, h("p", { class: "muted" }, "Loading…"));
  const [month] = lastMonths(1);
  const set = h("button", { type: "button", on: { click: async () => {
    if (!await setPrices({ names: new Map([[tenant.id, tenant.name]]), tenantId: tenant.id })) return;
    say("Prices set");
    await draw();
  } } }, "Set prices");

  async function draw() {
    try {
      const [invoice, prices] = await Promise.all([
        api.get(query("v1/admin/usage/invoice", { tenant_id: tenant.id, month }), { signal }),
        api.get(query("v1/admin/prices", { tenant_id: tenant.id }), { signal }),
      ]);
      put(box, facts([
        [monthName(month), h("a", { href: `#/invoices/${encodeURIComponent(tenant.id)}` }, moneyList(invoice.totals))],
        ["Without a price", invoice.unpriced.requests ? `${count(invoice.unpriced.requests)} requests` : null],
        ["Own prices", ownPrices(prices.data)],
      ]));
    } catch (error) {
      if (error.name !== "AbortError") put(box, errorBox(error));
    }
  }
  draw();
  return card("Costs", box, { actions: forChanges(set) });
}

function ownPrices(lists) {
  const shown = lists.filter((one) => one.in_force || one.valid_from > Date.now() / 1000);
  if (!shown.length) return "none: those of all tenants";
  return h("ul", {}, shown.map((one) => h("li", {}, `${one.service_tier ?? "all tiers"}: ${one.rates.input} in, ${one.rates.output} out, ${one.currency}`, one.in_force ? null : h("span", { class: "muted small" }, ` from ${moment(one.valid_from)}`))));
}
