// One tenant: its state, its keys, its limits, what it uses.

import { foreign, h, put, say } from "../dom.js";
import { count, moment } from "../format.js";
import { api, at } from "../http.js";
import { card, chip, confirm, dialog, errorBox, facts, field, form, pageHead, select } from "../parts.js";
import { follow } from "../live.js";
import { streamPath } from "../snapshots.js";
import { billingCard } from "./billing/tenant_card.js";
import { keysCard } from "./keys/card.js";
import { sessionTable, WELL, worst } from "./overview.js";
import { forChanges, locked } from "./rights.js";
import { TIERS } from "./tenants.js";
import { usageCard } from "./usage.js";

const LIMITS = [
  ["requests_per_minute", "Requests per minute"], ["tokens_per_minute", "Tokens per minute"],
  ["max_concurrent_requests", "Answers at the same time"], ["monthly_tokens", "Tokens per month"],
  ["max_sessions", "Open sessions"], ["max_adapters", "Adapters"], ["max_adapter_bytes", "Bytes of adapters"],
  ["max_file_bytes", "Bytes of files"], ["max_adapter_rank", "Largest rank"], ["max_device_kv_bytes", "Bytes of KV on the device"], ["max_host_kv_bytes", "Bytes of KV on the host"],
];
/** The limits whose use the server tells, and its name there. */
const USES = { max_sessions: "sessions", max_adapters: "adapters", max_adapter_bytes: "adapter_bytes", monthly_tokens: "monthly_tokens" };
const BUDGETS = [["monthly_budget", "Budget per month"], ["soft_budget", "Cost per month that alerts"], ["currency", "Currency of budgets"]];

export async function showTenant({ params: [id], signal, refresh }) {
  const base = at`v1/admin/tenants/${id}`;
  const [tenant, quota] = await Promise.all([api.get(base, { signal }), api.get(`${base}/quota`, { signal })]);
  return h("div", { class: "stack" },
    pageHead(foreign(tenant.name), {
      crumbs: [["Tenants", "#/tenants"]], chips: [chip(tenant.status)],
      actions: forChanges(
        h("button", { type: "button", on: { click: async () => { if (await edit(base, tenant)) refresh(); } } }, "Edit"),
        suspendButton(base, tenant, refresh),
        h("button", { type: "button", class: "danger", on: { click: () => remove(base, tenant) } }, "Delete"),
      ),
    }),
    h("div", { class: "split" },
      h("div", { class: "stack" }, nowCard(tenant.id, signal), keysCard(`${base}/keys`, signal), usageCard({ signal, tenantId: tenant.id }), quotaCard(base, quota)),
      h("div", { class: "stack" },
        card("About", facts([
          ["Id", h("code", {}, tenant.id)], ["Weight", count(tenant.weight)], ["Highest tier", tenant.service_tier_ceiling],
          ["Created", moment(tenant.created_at)], ["People", h("a", { href: `#/people?find=${encodeURIComponent(tenant.id)}` }, "with a role of this tenant")],
        ])),
        billingCard(tenant, signal))));
}

/** How the tenant's requests do at this moment, and its live sessions. */
function nowCard(id, signal) {
  const figures = h("div", {}, h("p", { class: "empty" }, "Loading…"));
  const sessions = sessionTable(null);
  follow({
    signal, path: streamPath({ tenant_id: id, rows: 10 }), name: "overview",
    show: (found) => {
      put(figures, found.tenants.length ? worst(found.tenants, WELL) : h("p", { class: "empty" }, "No request came in the last minutes."));
      sessions.element.hidden = found.sessions.length === 0;
      sessions.show(found.sessions);
    },
    failed: (error) => put(figures, errorBox(error)),
  });
  return card("Now", [figures, sessions.element], { flush: true });
}

function suspendButton(base, tenant, refresh) {
  const isSuspended = tenant.status === "suspended";
  return h("button", { type: "button", on: { click: async () => {
    const was = isSuspended
      ? await api.post(`${base}/resume`)
      : await confirm("Suspend this tenant?", "Its running requests are cancelled, and new ones get a 403 until you resume it.", { button: "Suspend", send: () => api.post(`${base}/suspend`) });
    if (was) { say(isSuspended ? "Tenant resumed" : "Tenant suspended"); refresh(); }
  } } }, isSuspended ? "Resume" : "Suspend");
}

async function remove(base, tenant) {
  const done = await confirm("Delete this tenant?",
    "Its keys stop working and its requests are cancelled at once. Its sessions, adapters and cached KV are erased. This cannot be undone.",
    { button: "Delete for ever", typed: tenant.name, send: () => api.delete(base) });
  if (done) location.hash = "#/tenants";
}

function edit(base, tenant) {
  const name = h("input", { required: true, maxlength: 200, value: tenant.name, dir: "auto" });
  const weight = h("input", { type: "number", min: "0.001", max: 1000, step: "any", value: tenant.weight, required: true });
  const tier = select(TIERS, tenant.service_tier_ceiling);
  return dialog("Edit tenant", (close) => form({
    fields: [field("Name", name), field("Weight", weight, "Twice the weight gives twice the share of a full engine."), field("Highest service tier", tier)],
    button: "Save", extra: [h("button", { type: "button", on: { click: () => close(false) } }, "Cancel")],
    send: () => api.patch(base, { name: name.value, weight: Number(weight.value), service_tier_ceiling: tier.value }),
    done: () => close(true),
  }));
}

function quotaCard(base, { used, ...quota }) {
  const withUse = (limit, label) => (used && USES[limit] ? `${label} (${count(used[USES[limit]])} used)` : label);
  const numbers = LIMITS.map(([limit, label]) => [limit, label, h("input", { type: "number", min: 0, step: 1, name: limit, placeholder: "no limit", value: quota[limit] ?? "" })]);
  const texts = BUDGETS.map(([limit, label]) => [limit, label, h("input", { type: "text", name: limit, placeholder: limit === "currency" ? "USD" : "no limit", value: quota[limit] ?? "" })]);
  const inputs = [...numbers, ...texts];
  const value = (limit, input) => (input.value === "" ? null : input.type === "number" ? Number(input.value) : input.value.trim());
  const saved = h("span", { class: "small muted", role: "status" });
  const body = form({
    fields: h("div", { class: "fields" }, inputs.map(([limit, label, input]) => field(withUse(limit, label), input))),
    button: "Save limits", extra: [saved], locked: locked(),
    send: () => api.put(`${base}/quota`, { ...quota, ...Object.fromEntries(inputs.map(([limit, , input]) => [limit, value(limit, input)])) }),
    done: () => put(saved, `Saved ${moment(Date.now() / 1000)}`),
  });
  return card("Limits", body);
}
