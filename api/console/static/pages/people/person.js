// One person: the roles, by grants and by groups, and what ends them.

import { foreign, h, plain, say } from "../../dom.js";
import { ago, moment } from "../../format.js";
import { api, at } from "../../http.js";
import { identity } from "../../identity.js";
import { card, chip, confirm, dialog, facts, field, form, pageHead, select } from "../../parts.js";
import { table } from "../../table.js";
import { tenantNames } from "../names.js";
import { forChanges } from "../rights.js";
import { nameOf } from "./list.js";
import { isOfTenant, placeField, roleLine, ROLES, roleText } from "./roles.js";

export async function showPerson({ params: [id], signal, refresh }) {
  const base = at`v1/admin/people/${id}`;
  const person = await api.get(base, { signal });
  const names = new Map();
  if ([...person.roles, ...person.group_roles].some(isOfTenant)) await tenantNames(names, signal);
  const place = { base, person, names, refresh, signal };
  return h("div", { class: "stack" },
    pageHead(foreign(nameOf(person)), {
      crumbs: [["People", "#/people"]], chips: [chip(person.status)],
      actions: forChanges(
        h("button", { class: "primary", type: "button", on: { click: async () => { if (await grantRole(place)) refresh(); } } }, "Grant a role"),
        suspendButton(place),
        h("button", { class: "danger", type: "button", on: { click: () => remove(place) } }, "Delete")),
    }),
    person.status === "suspended" ? h("p", { class: "notice" }, "No role holds while the person is suspended.") : null,
    h("div", { class: "split" }, rolesCard(place), card("About", facts([
      ["Id", h("code", {}, person.id)], ["E-mail address", person.email === null ? "none that is verified" : foreign(person.email)],
      ["Id at the provider", foreign(person.subject, "code")], ["Provider", foreign(person.issuer)],
      ["Added", moment(person.created_at)], ["Last sign-in", person.signed_in_at === null ? "never" : h("span", { title: moment(person.signed_in_at) }, ago(person.signed_in_at))],
    ]))));
}

/** Says in a dialog what an act means for the person who acts. */
function warning(person) {
  return identity.current.person?.id === person.id ? " This is you: you may lose your access to this page at once." : "";
}

function rolesCard({ base, person, names, refresh }) {
  const rows = [...person.roles.map((role) => ({ id: role, role, by: "granted" })), ...person.group_roles.map((role) => ({ id: `group ${role}`, role, by: "group" }))];
  const list = table({
    caption: "What the person may do. The strongest role in a place counts.", rows, empty: "No role: this person cannot sign in.",
    columns: [
      { label: "Role", cell: (one) => roleLine(one.role, names) },
      { label: "From", cell: (one) => one.by === "granted" ? "a grant" : "a group of the provider" },
      { label: "", cell: (one) => one.by === "granted" ? h("div", { class: "actions" }, forChanges(h("button", { class: "danger", type: "button", "aria-label": `Take back ${roleText(one.role, names)}`, on: { click: () => revoke(one.role) } }, "Take back"))) : null },
    ],
  });

  async function revoke(role) {
    const text = `What ${plain(nameOf(person))} does as “${roleText(role, names)}” ends within a second.${warning(person)}`;
    if (await confirm("Take back this role?", text, { button: "Take back", send: () => api.delete(`${base}/roles/${encodeURIComponent(role)}`) })) refresh();
  }
  return card("Roles", list.element, { flush: true });
}

/** Resolves with the changed person, or with null. */
async function grantRole({ base, person, names, signal }) {
  const role = select(ROLES, "tenant-member");
  const place = placeField(await tenantNames(names, signal), role);
  return dialog(`Grant a role to ${plain(nameOf(person))}`, (close) => form({
    fields: [field("Role", role, "It holds at the next request."), place.element],
    button: "Grant", extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: async () => api.post(`${base}/roles`, { role: place.grant() }),
    done: (changed) => { say("The role was granted"); close(changed); },
  }));
}

function suspendButton({ base, person, refresh }) {
  const isSuspended = person.status === "suspended";
  return h("button", { type: "button", on: { click: async () => {
    const done = isSuspended
      ? await confirm("Resume this person?", "The roles hold again. The person must sign in anew.", { button: "Resume", tone: "primary", send: () => api.post(`${base}/resume`) })
      : await confirm("Suspend this person?", `All sessions, tokens and running requests of the person end within a second.${warning(person)}`, { button: "Suspend", send: () => api.post(`${base}/suspend`) });
    if (done) refresh();
  } } }, isSuspended ? "Resume" : "Suspend");
}

async function remove({ base, person }) {
  const done = await confirm("Delete this person?",
    `Name, roles, sessions and tokens go; the audit log keeps the id. A person who still has an account at the provider can sign in again, without a role: suspend somebody who shall stay out.${warning(person)}`,
    { button: "Delete for ever", typed: nameOf(person), send: () => api.delete(base) });
  if (done) location.hash = "#/people";
}
