// A request's life: which parts took its time. The timeline comes from the server by the request's id.
// The operator also says which tenants and sessions are traced.

import { foreign, h, plain, say } from "../dom.js";
import { ago, count, moment, span } from "../format.js";
import { api, at } from "../http.js";
import { identity } from "../identity.js";
import { card, check, chip, confirm, facts, field, form, pageHead, tierBar } from "../parts.js";
import { table } from "../table.js";
import { forChanges, locked } from "./rights.js";

export async function showRequests({ signal, refresh }) {
  const input = h("input", { required: true, placeholder: "req_…", spellcheck: "false", autocomplete: "off", data: { filter: "" } });
  const body = form({
    fields: [field("Id of a request or a turn", input, "The header x-request-id of every answer has it, and so has every error and log line.")],
    button: "Show its timeline",
    send: async () => { location.hash = `#/requests/${encodeURIComponent(input.value.trim())}`; },
  });
  const traces = identity.isAdmin ? tracesCard((await api.get("v1/admin/traces", { signal })).data, refresh) : null;
  return h("div", { class: "stack narrow" }, pageHead("Requests"), card("Find a request", body), traces);
}

function tracesCard(switches, refresh) {
  const target = h("input", { required: true, placeholder: "ten_… or ses_…", spellcheck: "false", autocomplete: "off" });
  const tokens = check("Also log the token ids, which are as good as the text");
  const list = table({
    caption: "The engine's steps of their requests are recorded", rows: switches, empty: "Nobody's requests are traced, unless they ask for it.",
    columns: [
      { label: "Tenant or session", cell: (one) => h("code", {}, plain(one.id)) },
      { label: "Token ids", cell: (one) => one.token_ids ? chip("logged", "warn") : h("span", { class: "muted" }, "no") },
      { label: "Since", number: true, cell: (one) => ago(one.changed_at) },
      { label: "", cell: (one) => h("div", { class: "actions" }, forChanges(h("button", { type: "button", "aria-label": `Stop tracing ${plain(one.id)}`, on: { click: () => stop(one) } }, "Stop"))) },
    ],
  });
  const add = form({
    fields: [field("Id of a tenant or a session", target, "Every gateway follows within a second."), tokens.row], button: "Trace its requests", locked: locked(),
    send: () => api.put(at`v1/admin/traces/${target.value.trim()}`, { token_ids: tokens.box.checked }),
    done: () => { say("Its requests are traced"); refresh(); },
  });

  async function stop(one) {
    if (await confirm("Stop tracing?", `New requests of ${plain(one.id)} are traced no more, unless they ask for it.`, { button: "Stop tracing", tone: "primary", send: () => api.delete(at`v1/admin/traces/${one.id}`) })) refresh();
  }
  return card("Traced tenants and sessions", [list.element, h("div", { class: "body" }, add)], { flush: true });
}

export async function showRequest({ params: [id], signal }) {
  const found = await api.get(identity.isAdmin ? at`v1/admin/requests/${id}/timeline` : at`v1/requests/${id}/timeline`, { signal });
  return h("div", { class: "stack" },
    pageHead(h("span", {}, "Request ", h("code", { class: "muted" }, plain(found.id))), { crumbs: [["Requests", "#/requests"]], chips: [chip(found.status)] }),
    card("Where its time went", timeline(found)),
    h("div", { class: "halves" }, card("About", about(found)), ...found.generations.map((one, index) => card(found.generations.length > 1 ? `Answer ${index + 1}` : "Answer", answer(one)))));
}

function about(found) {
  return facts([
    ["Request", h("code", {}, foreign(found.id))], ["The client's id", found.client_request_id && foreign(found.client_request_id, "code")], ["Trace", found.trace_id && h("code", {}, foreign(found.trace_id))],
    ["Path", h("code", {}, foreign(`${found.method} ${found.path}`))], ["Model", foreign(found.adapter ?? found.model ?? "–")], ["Began", moment(found.created_at)],
    ["Took", found.total_ms === null ? null : span(found.total_ms / 1000)], ["Status of the answer", found.http_status], ["Tenant", identity.isAdmin ? h("code", {}, foreign(found.tenant_id)) : null],
    ["Session", found.session_id && !identity.isAdmin ? h("a", { href: `#/sessions/${encodeURIComponent(found.session_id)}` }, h("code", {}, foreign(found.session_id))) : null],
    ["Engine's steps", found.traced ? "recorded" : "not recorded: send the header x-graftwork-trace: 1"],
  ]);
}

function answer(one) {
  const prompt = one.prompt;
  return h("div", { class: "stack" },
    prompt ? tierBar({ device: prompt.device, host: prompt.host, disk: prompt.disk, computed: prompt.recomputed }) : null,
    facts([
      ["Prompt", prompt && `${count(prompt.device + prompt.host + prompt.disk + prompt.recomputed)} tokens, ${count(prompt.recomputed)} computed`],
      ["Missed because", prompt?.miss_reason ? chip(prompt.miss_reason, "warn") : null], ["Answer", `${count(one.completion_tokens)} tokens`],
      ["First token", one.first_token_ms === null ? null : span(one.first_token_ms / 1000)],
      ["Drafts", one.drafted_tokens ? `${count(one.accepted_tokens)} of ${count(one.drafted_tokens)} accepted` : null],
    ]));
}

/** What an engine's span did, and how long it waited for its next step and spent on masks and drafts. */
function figures(one) {
  const waited = one.duration_ms - (one.busy_ms ?? 0);
  return [
    `${count(one.steps)} steps`, one.tokens && `${count(one.tokens)} tokens`, `${count(one.batch_requests)} requests in a step`,
    `computed for ${span((one.busy_ms ?? 0) / 1000)}`, waited > 0.05 && `waited for steps for ${span(waited / 1000)}`,
    one.masks && `${count(one.masks)} masks in ${span((one.mask_ms ?? 0) / 1000)}`,
    (one.drafted || one.draft_ms) && `${count(one.accepted ?? 0)} of ${count(one.drafted ?? 0)} drafts accepted, found in ${span((one.draft_ms ?? 0) / 1000)}`,
  ].filter(Boolean);
}

/** The stages of the gateway, and inside them the spans of the engines. */
function timeline(found) {
  const spans = found.generations.flatMap((one) => one.engines.flatMap((engine) => engine.spans));
  const rows = [...found.stages.map((one) => ({ ...one, kind: "stage" })), ...spans.map((one) => ({ ...one, kind: "engine" }))];
  const end = Math.max(0.001, found.total_ms ?? 0, ...rows.map((one) => one.start_ms + (one.duration_ms ?? 0)));
  return h("ol", { class: "timeline" }, rows.map((one) => {
    const took = one.duration_ms ?? 0;
    const bar = h("span", { class: `took ${one.kind}` });
    bar.style.insetInlineStart = `${100 * one.start_ms / end}%`;
    bar.style.width = `${Math.max(0.3, 100 * took / end)}%`;
    const name = `${one.kind === "engine" ? "engine: " : ""}${one.name.replaceAll("_", " ")}`;
    const more = one.steps ? ` ${figures(one).join(", ")}` : "";
    const label = `${name}: from ${span(one.start_ms / 1000)}, for ${span(took / 1000)}${more}`;
    return h("li", {}, foreign(name), h("span", { class: "track", role: "img", "aria-label": plain(label), title: plain(label) }, bar), h("span", { class: "small number" }, span(took / 1000)),
      more ? h("span", { class: "more small muted" }, plain(more.trim())) : null);
  }));
}
