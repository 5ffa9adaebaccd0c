// A request's life: which parts took its time. The timeline comes from the server by the request's id.

import { foreign, h, plain } from "../dom.js";
import { span } from "../format.js";
import { api, at } from "../http.js";
import { card, field, form, pageHead } from "../parts.js";

export function showRequests() {
  const input = h("input", { required: true, placeholder: "req_…", spellcheck: "false", autocomplete: "off", data: { filter: "" } });
  const body = form({
    fields: [field("Request id", input, "The header x-request-id of every answer has it, and so has every error and log line.")],
    button: "Show its timeline",
    send: async () => { location.hash = `#/requests/${encodeURIComponent(input.value.trim())}`; },
  });
  return h("div", { class: "stack narrow" }, pageHead("Requests"), card("Find a request", body));
}

export async function showRequest({ params: [id], signal }) {
  const found = await api.get(at`v1/requests/${id}/timeline`, { signal });
  return h("div", { class: "stack" }, pageHead(h("span", {}, "Request ", h("code", {}, plain(id))), { crumbs: [["Requests", "#/requests"]] }), card("Timeline", timeline(found)));
}

function timeline(found) {
  const spans = found.spans ?? [];
  const end = Math.max(1e-6, ...spans.map((one) => one.start_s + one.seconds));
  return h("ol", { class: "timeline" }, spans.map((one) => {
    const bar = h("span", { class: "took" });
    bar.style.insetInlineStart = `${100 * one.start_s / end}%`;
    bar.style.width = `${Math.max(0.3, 100 * one.seconds / end)}%`;
    return h("li", {}, foreign(one.name), h("span", { class: "track", role: "img", "aria-label": `${plain(one.name)}: from ${span(one.start_s)}, for ${span(one.seconds)}` }, bar), h("span", { class: "small number" }, span(one.seconds)));
  }));
}
