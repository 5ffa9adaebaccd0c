// The operator's records: who changed what, and the degraded modes.

import { foreign, h, put } from "../dom.js";
import { ago, moment } from "../format.js";
import { api, query } from "../http.js";
import { card, check, field, form, pageHead } from "../parts.js";
import { pagedTable } from "../table.js";
import { locked } from "./rights.js";

export async function showAudit({ signal }) {
  const list = pagedTable({
    caption: "Who changed what, newest first", noun: "entry", signal, empty: "Nothing was changed yet.",
    load: (after, limit) => api.get(query("v1/admin/audit", { after, limit }), { signal }),
    text: (entry) => `${entry.action} ${entry.target} ${entry.tenant_id} ${JSON.stringify(entry.details)}`,
    columns: [
      { label: "Act", cell: (entry) => h("code", {}, entry.action) },
      { label: "When", cell: (entry) => h("time", { datetime: new Date(entry.at * 1000).toISOString(), title: moment(entry.at) }, ago(entry.at)) },
      { label: "Who", cell: (entry) => h("span", { title: entry.actor }, foreign(entry.actor_name ?? entry.actor)) },
      { label: "Tenant", cell: (entry) => entry.tenant_id ? h("a", { href: `#/tenants/${encodeURIComponent(entry.tenant_id)}` }, h("code", {}, entry.tenant_id)) : null },
      { label: "Details", clip: true, cell: (entry) => h("code", { class: "small muted" }, foreign(JSON.stringify(entry.details))) },
    ],
  });
  await list.ready;
  return h("div", { class: "stack" }, pageHead("Audit"), h("section", { class: "card", "aria-label": "Audit" }, list.element));
}

export async function showModes({ signal }) {
  const modes = await api.get("v1/admin/modes", { signal });
  const cap = h("input", { type: "number", min: 1, step: 1, placeholder: "no cap", value: modes.max_output_tokens ?? "" });
  const drafts = check("Generate without lookup drafts", { checked: modes.suspend_drafts });
  const flex = check("Refuse requests of the tier flex", { checked: modes.refuse_flex });
  const note = h("span", { class: "small muted", role: "status" }, modes.changed_at ? `Changed ${ago(modes.changed_at)}` : "");
  const body = form({
    fields: [
      h("p", { class: "muted" }, "What you take away from all requests while the server has too much to do. Every gateway follows within a second."),
      field("Most tokens of one answer", cap, "Leave it empty for no cap."), drafts.row, flex.row,
    ],
    button: "Set modes", extra: [note], locked: locked(),
    send: () => api.put("v1/admin/modes", { max_output_tokens: cap.value === "" ? null : Number(cap.value), suspend_drafts: drafts.box.checked, refuse_flex: flex.box.checked }),
    done: () => put(note, "In force"),
  });
  return h("div", { class: "stack" }, pageHead("Degraded modes"), card("Modes", body));
}
