// The dialog in which the operator sets prices. Rates are text from the field to the server, so no digit is lost.

import { h, plain } from "../../dom.js";
import { api } from "../../http.js";
import { dialog, field, form, select } from "../../parts.js";
import { TIERS } from "../tenants.js";

const RATES = [
  ["input", "Input", { placeholder: "0.50", required: true }],
  ["output", "Output", { placeholder: "1.50", required: true }],
  ["input_device", "Cached on the device", { placeholder: "like input" }],
  ["input_host", "Cached on the host", { placeholder: "like input" }],
  ["input_disk", "Cached on disk", { placeholder: "like input" }],
  ["kv_gb_hour", "KV, by GB and hour", { placeholder: "0" }],
  ["adapter_gb", "Adapters, by GB loaded", { placeholder: "0" }],
];
const PATTERN = "[0-9]{1,7}([.][0-9]{1,6})?";

/**
 * Asks for prices and sets them. `before` is the list that they change, or null; `names` are the tenants by their ids;
 * `tenantId` fixes the tenant. Resolves with the new list, or with null.
 */
export function setPrices({ before = null, names = new Map(), tenantId = null }) {
  const tenant = select([["", "All tenants without prices of their own"], ...[...names].map(([id, name]) => [id, name])], before?.tenant_id ?? "");
  const tier = select([["", "All tiers without prices of their own"], ...TIERS], before?.service_tier ?? "");
  const currency = h("input", { required: true, pattern: "[A-Z]{3}", maxlength: 3, title: "A code of three capital letters, such as USD", value: before?.currency ?? "USD", autocomplete: "off" });
  const from = h("input", { type: "datetime-local" });
  const rates = RATES.map(([name, label, props]) => [name, label, h("input", { inputmode: "decimal", pattern: PATTERN, title: "A decimal number such as 0.50, with at most six decimals", autocomplete: "off", value: before?.rates[name] ?? "", ...props })]);
  return dialog(tenantId === null ? "Set prices" : `Set prices of ${plain(names.get(tenantId) ?? tenantId)}`, (close) => form({
    fields: [
      h("p", { class: "muted small" }, "Requests that begin from then on have these prices. Recorded requests keep theirs."),
      tenantId === null ? field("Tenant", tenant) : null, field("Service tier", tier),
      h("fieldset", { class: "field" }, h("legend", {}, "Rates by million tokens"), h("div", { class: "fields rate-fields" }, rates.map(([, label, input]) => field(label, input)), field("Currency", currency))),
      field("Valid from", from, "Leave it empty for prices from now on."),
    ],
    button: "Set prices", extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: () => api.post("v1/admin/prices", {
      tenant_id: tenantId ?? (tenant.value || null), service_tier: tier.value || null, currency: currency.value,
      rates: Object.fromEntries(rates.map(([name, , input]) => [name, input.value.trim()]).filter(([, text]) => text !== "")),
      ...(from.value ? { valid_from: new Date(from.value).getTime() / 1000 } : {}),
    }),
    done: close,
  }));
}
