// The keys of a tenant: a list, and the dialogs that make, rotate and revoke one. Its secret is shown once.

import { foreign, h, plain, say } from "../../dom.js";
import { ago, moment } from "../../format.js";
import { api, query } from "../../http.js";
import { card, check, chip, confirm, dialog, field, form, select, showSecret } from "../../parts.js";
import { pagedTable } from "../../table.js";
import { forChanges } from "../rights.js";

const OVERLAPS = [["0", "no time: it ends at once"], ["3600", "an hour"], ["86400", "a day"], ["604800", "a week"]];
const SCOPES = [["inference", "Inference and sessions"], ["read", "Read sessions"], ["adapters", "Change adapters"], ["usage", "Read usage and limits"], ["export", "Export everything"]];

/** The keys of one tenant. `keys` is the path of its list: the operator's of any tenant, or `v1/keys`. */
export function keysCard(keys, signal) {
  const list = pagedTable({
    caption: "Keys, newest first. The server shows a key only when it is made.", noun: "key", signal,
    empty: "No key yet: nobody can use this tenant.",
    load: (after, limit) => api.get(query(keys, { after, limit }), { signal }),
    columns: [
      { label: "Name", clip: true, cell: (key) => foreign(key.name) },
      { label: "Key", cell: (key) => key.person_id ? h("span", { class: "muted", title: "The person acts with it, nobody has its text, and it ends with the role." }, "a person's") : h("code", {}, key.redacted) },
      { label: "State", cell: (key) => stateOf(key) },
      { label: "May", cell: (key) => h("span", { class: "small" }, key.scopes.join(", "), key.adapters ? h("div", {}, `models: ${key.adapters.join(", ") || "none"}`) : null, key.allowed_ips ? h("div", {}, `from: ${key.allowed_ips.join(", ")}`) : null) },
      { label: "Last used", number: true, cell: (key) => ago(key.last_used_at) },
      { label: "", cell: (key) => key.person_id || key.revoked_at || isExpired(key) ? null : h("div", { class: "actions" }, forChanges(
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
