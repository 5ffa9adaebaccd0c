// Price lists: the operator sees and sets those of all tenants, a tenant sees its own.

import { foreign, h, plain, say } from "../../dom.js";
import { moment } from "../../format.js";
import { api } from "../../http.js";
import { identity } from "../../identity.js";
import { card, chip, facts, pageHead, select } from "../../parts.js";
import { pagedTable, pageOf } from "../../table.js";
import { tenantNames } from "../names.js";
import { forChanges } from "../rights.js";
import { column } from "./money.js";
import { setPrices } from "./price_form.js";

export const RATES = [
  ["input", "Input", "Prompt tokens that are computed", "per million tokens"],
  ["input_device", "Device", "Prompt tokens cached on the device", "per million tokens"],
  ["input_host", "Host", "Prompt tokens cached on the host", "per million tokens"],
  ["input_disk", "Disk", "Prompt tokens cached on disk", "per million tokens"],
  ["output", "Output", "Tokens of answers", "per million tokens"],
  ["kv_gb_hour", "KV", "KV held on the device", "per GB and hour"],
  ["adapter_gb", "Adapters", "Adapters loaded to the device", "per GB"],
];
const SHOWN = [["now", "In force and to come"], ["all", "Also replaced ones"]];

export function showPrices({ signal }) {
  return identity.isAdmin ? allPrices(signal) : ownPrices(signal);
}

async function allPrices(signal) {
  const shown = select(SHOWN, "now", { "aria-label": "Which price lists" });
  const names = new Map();
  let lists = [];
  let draw = null;
  const list = pagedTable({
    caption: "Input, cached input and output by million tokens, KV by GB and hour, adapters by GB", noun: "price list", signal, tools: [shown],
    empty: "There are no prices yet, so nothing costs anything. Set the first ones.",
    load: async (after, limit) => {
      if (after === null) {
        lists = (await api.get("v1/admin/prices", { signal })).data;
        if (names.size === 0 && lists.some((one) => one.tenant_id !== null)) await tenantNames(names, signal);
        draw = Object.fromEntries(RATES.map(([name]) => [name, column(lists.map((one) => one.rates[name]))]));
      }
      const wanted = shown.value === "all" ? lists : lists.filter((one) => stateOf(one) !== "replaced");
      return pageOf(wanted, after, limit);
    },
    text: (one) => `${nameOf(one)} ${one.tenant_id} ${one.service_tier ?? "all tiers"} ${one.currency}`,
    columns: [
      { label: "For", clip: true, sort: (one) => nameOf(one), cell: (one) => one.tenant_id === null ? "All tenants" : h("a", { href: `#/tenants/${encodeURIComponent(one.tenant_id)}` }, foreign(nameOf(one))) },
      { label: "Tier", sort: (one) => one.service_tier ?? "", cell: (one) => one.service_tier ?? h("span", { class: "muted" }, "all") },
      ...RATES.map(([name, label]) => ({ label, number: true, sort: (one) => Number(one.rates[name]), cell: (one) => draw[name](one.rates[name]) })),
      { label: "In", cell: (one) => one.currency },
      { label: "Valid from", number: true, sort: (one) => one.valid_from, cell: (one) => h("span", { class: "small" }, moment(one.valid_from)) },
      { label: "State", cell: (one) => stateChip(one) },
      { label: "", cell: (one) => stateOf(one) === "replaced" ? null : h("div", { class: "actions" }, forChanges(h("button", { type: "button", "aria-label": `Change the prices of ${plain(useOf(one, nameOf(one)))}`, on: { click: () => set(one) } }, "Change"))) },
    ],
  });
  await list.ready;

  function nameOf(one) {
    return one.tenant_id === null ? "All tenants" : names.get(one.tenant_id) ?? one.tenant_id;
  }

  async function set(before) {
    const made = await setPrices({ before, names: await tenantNames(names, signal) });
    if (!made) return;
    say(`Prices of ${plain(useOf(made, nameOf(made)))} set`);
    await list.restart();
  }
  shown.addEventListener("change", list.restart);
  return h("div", { class: "stack" },
    pageHead("Prices", { actions: [h("a", { class: "button", href: "#/invoices" }, "Invoices"), ...forChanges(h("button", { class: "primary", type: "button", on: { click: () => set(null) } }, "Set prices"))] }),
    h("section", { class: "card", "aria-label": "Price lists" }, list.element),
    h("p", { class: "muted small" }, "A request has the nearest list that is in force when it begins: of its tenant and tier, else of its tenant, else of its tier, else of all. A list never changes: new prices are a new list, and requests that were recorded keep theirs."));
}

function useOf(one, name) {
  return one.service_tier === null ? name : `${name}, tier ${one.service_tier}`;
}

function stateOf(one) {
  if (one.in_force) return "in force";
  return one.valid_from > Date.now() / 1000 ? "to come" : "replaced";
}

const TONES = { "in force": "good", "to come": "info", replaced: "" };

function stateChip(one) {
  return chip(stateOf(one), TONES[stateOf(one)]);
}

async function ownPrices(signal) {
  const { data } = await api.get("v1/prices", { signal });
  const cards = data.map((one) => card(one.service_tier === null ? "All requests" : `Requests of the tier ${one.service_tier}`, rateFacts(one)));
  return h("div", { class: "stack" },
    pageHead("Prices", { actions: [h("a", { class: "button", href: "#/invoices" }, "Costs and invoices")] }),
    data.length ? h("div", { class: cards.length > 1 ? "halves" : "narrow" }, cards) : h("section", { class: "card", "aria-label": "Prices" }, h("p", { class: "empty" }, "Your requests have no prices, so they cost nothing.")),
    data.length > 1 ? h("p", { class: "muted small" }, "A price of a tier goes before a price of all requests.") : null);
}

/** The rates of a price list in words. */
export function rateFacts(one) {
  const draw = column(RATES.map(([name]) => one.rates[name]));
  return h("div", { class: "stack" },
    h("dl", { class: "rates" }, RATES.map(([name, , text, unit]) => [h("dt", {}, text), h("dd", {}, draw(one.rates[name])), h("dd", { class: "unit muted small" }, `${one.currency} ${unit}`)])),
    facts([["Valid from", moment(one.valid_from)]]));
}
