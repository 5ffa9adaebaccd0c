// One tenant: its state, its keys, its limits, what it uses.

import { foreign, h, plain, put, say } from "../dom.js";
import { ago, count, moment } from "../format.js";
import { api, at, query } from "../http.js";
import { card, chip, check, confirm, dialog, errorBox, facts, field, form, pageHead, select, showSecret } from "../parts.js";
import { follow } from "../live.js";
import { streamPath } from "../snapshots.js";
import { pagedTable } from "../table.js";
import { billingCard } from "./billing/tenant_card.js";
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
const OVERLAPS = [["0", "no time: it ends at once"], ["3600", "an hour"], ["86400", "a day"], ["604800", "a week"]];
const BUDGETS = [["monthly_budget", "Budget per month"], ["soft_budget", "Cost per month that alerts"], ["currency", "Currency of budgets"]];
const SCOPES = [["inference", "Inference and sessions"], ["read", "Read sessions"], ["adapters", "Change adapters"], ["usage", "Read usage and limits"], ["export", "Export everything"]];

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
      h("div", { class: "stack" }, nowCard(tenant.id, signal), keysCard(base, signal), usageCard({ signal, tenantId: tenant.id }), quotaCard(base, quota)),
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

function keysCard(base, signal) {
  const keys = `${base}/keys`;
  const list = pagedTable({
    caption: "Keys, newest first. The server shows a key only when it is made.", noun: "key", signal,
    empty: "No key yet: nobody can use this tenant.",
    load: (after, limit) => api.get(query(keys, { after, limit }), { signal }),
    columns: [
      { label: "Name", clip: true, cell: (key) => foreign(key.name) },
      { label: "Key", cell: (key) => h("code", {}, key.redacted) },
      { label: "State", cell: (key) => stateOf(key) },
      { label: "May", cell: (key) => h("span", { class: "small" }, key.scopes.join(", "), key.adapters ? h("div", {}, `models: ${key.adapters.join(", ") || "none"}`) : null, key.allowed_ips ? h("div", {}, `from: ${key.allowed_ips.join(", ")}`) : null) },
      { label: "Last used", number: true, cell: (key) => ago(key.last_used_at) },
      { label: "", cell: (key) => key.revoked_at || isExpired(key) ? null : h("div", { class: "actions" }, forChanges(
        key.replaced_by ? null : h("button", { type: "button", "aria-label": `Rotate ${plain(key.name)}`, on: { click: () => rotate(key) } }, "Rotate"),
        h("button", { type: "button", class: "danger", "aria-label": `Revoke ${plain(key.name)}`, on: { click: () => revoke(key) } }, "Revoke"))) },
    ],
  });
  const create = h("button", { type: "button", on: { click: make } }, "New key");

  async function make() {
    const made = await newKey(keys);
    if (!made) return;
    await showSecret(`The key “${plain(made.name)}”`, made.key, "This is the only time that the server shows this key. Store it now.");
    await list.reload();
  }

  async function rotate(key) {
    const fresh = await rotateKey(keys, key);
    if (!fresh) return;
    await showSecret(`The new key “${plain(key.name)}”`, fresh.key, "This is the only time that the server shows this key. Store it now.");
    await list.reload();
  }

  async function revoke(key) {
    if (await confirm("Revoke this key?", "It stops working for ever, and its running requests are cancelled.", { button: "Revoke", send: () => api.delete(`${keys}/${encodeURIComponent(key.id)}`) })) await list.reload();
  }

  return card("Keys", list.element, { flush: true, actions: forChanges(create) });
}

function isExpired(key) {
  return key.expires_at !== null && key.expires_at <= Date.now() / 1000;
}

function stateOf(key) {
  if (key.revoked_at) return chip("revoked");
  if (isExpired(key)) return chip("expired");
  return h("span", {}, chip("active"), key.expires_at ? h("div", { class: "small muted" }, `until ${moment(key.expires_at)}`) : null);
}

function newKey(keys) {
  const name = h("input", { required: true, maxlength: 200, autocomplete: "off" });
  const until = h("input", { type: "datetime-local" });
  const models = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "all" });
  const networks = h("input", { autocomplete: "off", spellcheck: "false", placeholder: "all" });
  const scopes = SCOPES.map(([scope, label]) => [scope, check(label, { checked: true })]);
  return dialog("New key", (close) => form({
    fields: [
      field("Name", name), h("fieldset", { class: "field" }, h("legend", {}, "May"), scopes.map(([, { row }]) => row)),
      field("Models", models, "Names separated by commas, without versions; the base model counts."),
      field("Networks", networks, "From where it may be used, separated by commas, such as 192.0.2.0/24, 2001:db8::/32."),
      field("Ends at", until, "Leave it empty for a key that does not end."),
    ],
    button: "Create key", extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: () => {
      const chosen = scopes.filter(([, { box }]) => box.checked).map(([scope]) => scope);
      if (!chosen.length) throw new RangeError("Choose at least one thing that the key may do.");
      return api.post(keys, { name: name.value, scopes: chosen, adapters: listOf(models.value), allowed_ips: listOf(networks.value), expires_at: until.value ? new Date(until.value).getTime() / 1000 : null });
    },
    done: close,
  }));
}

/** The parts of a text between its commas; null if there are none. */
function listOf(text) {
  const parts = text.split(",").map((part) => part.trim()).filter(Boolean);
  return parts.length ? parts : null;
}

/** Asks how long the old key stays valid, and rotates it. Resolves with the new key, or with null. */
function rotateKey(keys, key) {
  const overlap = select(OVERLAPS, "0");
  return dialog("Rotate this key?", (close) => form({
    fields: [
      h("p", {}, "You get a new key that allows the same. The old key, and browsers that are signed in with it, work on for the time that you choose."),
      field("The old key stays valid for", overlap),
    ],
    button: "Rotate", extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: () => api.post(`${keys}/${encodeURIComponent(key.id)}/rotate`, { overlap_s: Number(overlap.value) }),
    done: (fresh) => { say("Rotate: done"); close(fresh); },
  }));
}

function quotaCard(base, quota) {
  const numbers = LIMITS.map(([limit, label]) => [limit, label, h("input", { type: "number", min: 0, step: 1, name: limit, placeholder: "no limit", value: quota[limit] ?? "" })]);
  const texts = BUDGETS.map(([limit, label]) => [limit, label, h("input", { type: "text", name: limit, placeholder: limit === "currency" ? "USD" : "no limit", value: quota[limit] ?? "" })]);
  const inputs = [...numbers, ...texts];
  const value = (limit, input) => (input.value === "" ? null : input.type === "number" ? Number(input.value) : input.value.trim());
  const saved = h("span", { class: "small muted", role: "status" });
  const body = form({
    fields: h("div", { class: "fields" }, inputs.map(([, label, input]) => field(label, input))),
    button: "Save limits", extra: [saved], locked: locked(),
    send: () => api.put(`${base}/quota`, { ...quota, ...Object.fromEntries(inputs.map(([limit, , input]) => [limit, value(limit, input)])) }),
    done: () => put(saved, `Saved ${moment(Date.now() / 1000)}`),
  });
  return card("Limits", body);
}
