// The names of tenants by their ids, for the operator's lists that have only ids.

import { foreign, h } from "../dom.js";
import { api, query } from "../http.js";

const MOST_PAGES = 20;

/** Fills `names` with the newest tenants, unless it is filled, and returns it. The tenants beyond them are left out. */
export async function tenantNames(names, signal) {
  let after = null;
  for (let pages = 0; pages < MOST_PAGES && (after !== null || names.size === 0); pages += 1) {
    const page = await api.get(query("v1/admin/tenants", { after, limit: 100 }), { signal });
    for (const tenant of page.data) names.set(tenant.id, tenant.name);
    if (!page.has_more) break;
    after = page.last_id;
  }
  return names;
}

export function tenantLink(id, names) {
  return h("a", { href: `#/tenants/${encodeURIComponent(id)}`, title: id }, names.has(id) ? foreign(names.get(id)) : h("code", {}, id));
}
