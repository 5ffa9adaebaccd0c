// The list of tenants, and the form that creates one with its first key.

import { foreign, h, plain, say } from "../dom.js";
import { ago, count } from "../format.js";
import { api, at, query } from "../http.js";
import { chip, dialog, field, form, pageHead, select, showSecret } from "../parts.js";
import { pagedTable } from "../table.js";
import { forChanges } from "./rights.js";

export const TIERS = [["flex"], ["default"], ["priority"]];

export async function showTenants({ signal }) {
  const list = pagedTable({
    caption: "Tenants, newest first", noun: "tenant", signal,
    empty: "There is no tenant yet. Create the first one.",
    load: (after, limit) => api.get(query("v1/admin/tenants", { after, limit }), { signal }),
    text: (tenant) => `${tenant.name} ${tenant.id}`,
    columns: [
      { label: "Tenant", clip: true, sort: (tenant) => tenant.name, cell: (tenant) => h("a", { href: `#/tenants/${tenant.id}` }, foreign(tenant.name)) },
      { label: "Status", sort: (tenant) => tenant.status, cell: (tenant) => chip(tenant.status) },
      { label: "Weight", number: true, sort: (tenant) => tenant.weight, cell: (tenant) => count(tenant.weight) },
      { label: "Highest tier", cell: (tenant) => tenant.service_tier_ceiling },
      { label: "Created", number: true, sort: (tenant) => tenant.created_at, cell: (tenant) => ago(tenant.created_at) },
      { label: "Id", cell: (tenant) => h("code", { class: "muted" }, tenant.id) },
    ],
  });
  await list.ready;
  const create = h("button", { class: "primary", type: "button", on: { click: async () => { if (await createTenant()) await list.reload(); } } }, "New tenant");
  return h("div", { class: "stack" }, pageHead("Tenants", { actions: forChanges(create) }), h("section", { class: "card", "aria-label": "Tenants" }, list.element));
}

async function createTenant() {
  const name = h("input", { required: true, maxlength: 200, autocomplete: "off" });
  const weight = h("input", { type: "number", min: "0.001", max: 1000, step: "any", value: "1", required: true });
  const tier = select(TIERS, "default");
  const key = h("input", { value: "first", maxlength: 200, required: true, autocomplete: "off" });
  const made = await dialog("New tenant", (close) => form({
    fields: [
      field("Name", name),
      field("Weight", weight, "Twice the weight gives twice the share of a full engine."),
      field("Highest service tier", tier),
      field("Name of its first key", key),
    ],
    button: "Create tenant",
    extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: async () => {
      const tenant = await api.post("v1/admin/tenants", { name: name.value, weight: Number(weight.value), service_tier_ceiling: tier.value });
      return { tenant, key: await api.post(at`v1/admin/tenants/${tenant.id}/keys`, { name: key.value }) };
    },
    done: close,
  }));
  if (!made) return false;
  say(`Tenant ${plain(made.tenant.name)} created`);
  await showSecret(`The key of ${plain(made.tenant.name)}`, made.key.key, "This is the only time that the server shows this key. Store it now.");
  return true;
}
