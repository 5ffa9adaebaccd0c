// Roles of people: their names, and the choice of one. A role is a text such as `operator` or `tenant-admin:ten_…`.

import { h, plain } from "../../dom.js";
import { field, uid } from "../../parts.js";
import { tenantLink } from "../names.js";

export const ROLES = [
  ["operator", "Operator"], ["operator-readonly", "Operator, read only"],
  ["tenant-admin", "Tenant admin"], ["tenant-member", "Tenant member"], ["tenant-viewer", "Tenant viewer"],
];
const NAMES = new Map(ROLES);

/** Whether a role holds in one tenant. */
export const isOfTenant = (role) => role.includes(":ten_");

function parts(role) {
  const [kind, place = ""] = role.split(":");
  return { name: NAMES.get(kind) ?? kind, place };
}

/** `Tenant admin of Acme`, without links, for titles and for a search. */
export function roleText(role, names) {
  const { name, place } = parts(role);
  return place ? `${name} of ${plain(names.get(place) ?? place)}` : name;
}

/** The same with a link to the tenant. */
export function roleLine(role, names) {
  const { name, place } = parts(role);
  if (!place) return name;
  return h("span", {}, `${name} of `, place.startsWith("ten_") ? tenantLink(place, names) : h("code", { title: "all tenants of this organisation" }, place));
}

export function roleList(roles, names) {
  if (!roles.length) return h("span", { class: "muted" }, "none");
  return h("ul", {}, roles.map((role) => h("li", {}, roleLine(role, names))));
}

/**
 * The field for the place of the role that is chosen in `role`; hidden for an operator's. `names` are tenants by their ids.
 * `grant()` returns the text of the role. It throws a RangeError for a name that no tenant has, or that several have.
 */
export function placeField(names, role) {
  const listId = uid("tenants");
  const input = h("input", { list: listId, autocomplete: "off", spellcheck: "false", dir: "auto", maxlength: 200 });
  const element = h("div", {}, field("In the tenant", input, "A tenant's name or id. The id of an organisation gives the role in all its tenants."),
    h("datalist", { id: listId }, [...names].map(([id, name]) => h("option", { value: plain(name) }, id))));
  const turn = () => { element.hidden = !role.value.startsWith("tenant"); input.required = !element.hidden; };
  role.addEventListener("change", turn);
  turn();

  function grant() {
    if (element.hidden) return role.value;
    const typed = plain(input.value.trim());
    if (/^(ten|org)_/.test(typed)) return `${role.value}:${typed}`;
    const found = [...names].filter(([, name]) => plain(name) === typed);
    if (found.length === 1) return `${role.value}:${found[0][0]}`;
    throw new RangeError(found.length ? `${found.length} tenants have this name: give the id of one, ${found.slice(0, 3).map(([id]) => id).join(", ")}.` : "No tenant has this name. Give its id.");
  }
  return { element, grant };
}
