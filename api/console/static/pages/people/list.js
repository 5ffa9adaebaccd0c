// The people who sign in, and the dialog that adds one who has not signed in yet.

import { foreign, h, plain, say } from "../../dom.js";
import { ago } from "../../format.js";
import { api, at, query } from "../../http.js";
import { chip, dialog, field, form, pageHead, select } from "../../parts.js";
import { pagedTable } from "../../table.js";
import { tenantNames } from "../names.js";
import { forChanges } from "../rights.js";
import { isOfTenant, placeField, roleList, roleText, ROLES } from "./roles.js";

export const personHref = (id) => `#/people/${encodeURIComponent(id)}`;

/** What to call a person: the e-mail address, or else the id at the identity provider. */
export const nameOf = (person) => person.email ?? person.subject;

export async function showPeople({ signal, query: given }) {
  const names = new Map();
  const list = pagedTable({
    caption: "People who have signed in or were added, newest first", noun: "person", signal, sought: given.get("find") ?? "",
    empty: "Nobody yet. People come here by their first sign-in, or when you add them.",
    load: async (after, limit) => {
      const page = await api.get(query("v1/admin/people", { after, limit }), { signal });
      if (page.data.some((person) => [...person.roles, ...person.group_roles].some(isOfTenant))) await tenantNames(names, signal);
      return page;
    },
    text: (person) => [nameOf(person), person.subject, person.id, person.status, ...[...person.roles, ...person.group_roles].flatMap((role) => [role, roleText(role, names)])].join(" "),
    columns: [
      { label: "Person", clip: true, sort: nameOf, cell: (person) => h("a", { href: personHref(person.id), title: person.id }, foreign(nameOf(person))) },
      { label: "Status", sort: (person) => person.status, cell: (person) => chip(person.status) },
      { label: "Granted roles", clip: true, cell: (person) => roleList(person.roles, names) },
      { label: "Roles by groups", clip: true, cell: (person) => roleList(person.group_roles, names) },
      { label: "Last sign-in", number: true, sort: (person) => person.signed_in_at, cell: (person) => person.signed_in_at === null ? "never" : ago(person.signed_in_at) },
    ],
  });
  await list.ready;
  const add = h("button", { class: "primary", type: "button", on: { click: () => addPerson(names, signal) } }, "Add a person");
  return h("div", { class: "stack" }, pageHead("People", { actions: forChanges(add) }), h("section", { class: "card", "aria-label": "People" }, list.element),
    h("p", { class: "muted small" }, "Keys are on the page of their tenant. The admin key is nobody's: it can always give people roles."));
}

/** Adds a person and grants a first role. A role that is refused can be corrected: the person is added once. */
async function addPerson(names, signal) {
  const subject = h("input", { required: true, maxlength: 255, autocomplete: "off", spellcheck: "false" });
  const email = h("input", { type: "email", maxlength: 320, autocomplete: "off" });
  const issuer = h("input", { type: "url", maxlength: 500, autocomplete: "off", placeholder: "this server's" });
  const role = select([["", "None for now"], ...ROLES], "");
  const place = placeField(await tenantNames(names, signal), role);
  let person = null;
  await dialog("Add a person", (close) => form({
    fields: [
      h("p", { class: "muted small" }, "Others are added by their first sign-in, without a role. Nobody is told by e-mail."),
      field("Id at the identity provider", subject, "The claim “sub” of the person's ID tokens. It never changes."),
      field("E-mail address", email, "What to call the person until the first sign-in. May be empty."),
      field("Identity provider", issuer, "The issuer, if it is not the one of this server's settings."),
      field("First role", role), place.element,
    ],
    button: "Add the person", extra: [h("button", { type: "button", on: { click: () => close() } }, "Cancel")],
    send: async () => {
      const grant = role.value === "" ? null : place.grant();
      person ??= await api.post("v1/admin/people", { subject: subject.value, email: email.value || null, issuer: issuer.value || null });
      for (const input of [subject, email, issuer]) input.disabled = true;
      if (grant !== null) await api.post(at`v1/admin/people/${person.id}/roles`, { role: grant });
    },
    done: close,
  }));
  if (!person) return;
  say(`${plain(nameOf(person))} was added`);
  location.hash = personHref(person.id);
}
