// What a tenant-admin who has signed in manages in the own tenant: its keys, and who else has a role there.

import { foreign, h } from "../../dom.js";
import { ago } from "../../format.js";
import { api, query } from "../../http.js";
import { card, chip, pageHead } from "../../parts.js";
import { pagedTable } from "../../table.js";
import { roleText } from "../people/roles.js";
import { keysCard } from "./card.js";

export async function showKeys({ signal }) {
  return h("div", { class: "stack" }, pageHead("Keys and members"),
    keysCard("v1/keys", signal), await membersCard(signal),
    h("p", { class: "muted small" }, "Roles and limits are the operator's: ask there when somebody comes or leaves. A key outlives the role of whoever has made it."));
}

async function membersCard(signal) {
  const list = pagedTable({
    caption: "People with a role in this tenant, there or by its organisation, newest first", noun: "person", signal,
    empty: "Nobody has a role in this tenant.",
    load: (after, limit) => api.get(query("v1/members", { after, limit }), { signal }),
    text: (member) => [member.name, member.id, member.status, roleText(member.role)].join(" "),
    columns: [
      { label: "Person", clip: true, sort: (member) => member.name, cell: (member) => h("span", { title: member.id }, foreign(member.name)) },
      { label: "Role", sort: (member) => member.role, cell: (member) => roleText(member.role) },
      { label: "Status", sort: (member) => member.status, cell: (member) => chip(member.status) },
      { label: "Last sign-in", number: true, sort: (member) => member.signed_in_at, cell: (member) => member.signed_in_at === null ? "never" : ago(member.signed_in_at) },
    ],
  });
  await list.ready;
  return card("Members", list.element, { flush: true });
}
