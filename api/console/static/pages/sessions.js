// A tenant's sessions, page by page, fresh every few seconds.

import { foreign, h } from "../dom.js";
import { ago, count } from "../format.js";
import { api, query } from "../http.js";
import { identity } from "../identity.js";
import { live } from "../live.js";
import { chip, dialog, field, form, pageHead, select } from "../parts.js";
import { pagedTable } from "../table.js";
import { costs } from "./usage.js";

export function modelName(model) {
  return model.version === null ? model.name : `${model.name}@${model.version}`;
}

export const sessionHref = (id) => `#/sessions/${encodeURIComponent(id)}`;

export async function showSessions({ signal }) {
  const list = pagedTable({
    caption: "Sessions, newest first", noun: "session", signal,
    empty: "No session yet. Start one here, in the playground, or with the API.",
    load: (after, limit) => api.get(query("v1/sessions", { after, limit }), { signal }),
    text: (session) => `${session.id} ${modelName(session.model)} ${session.status} ${Object.values(session.metadata).join(" ")}`,
    columns: [
      { label: "Session", cell: (session) => h("a", { href: sessionHref(session.id) }, h("code", {}, session.id)) },
      { label: "Status", sort: (session) => session.status, cell: (session) => chip(session.status) },
      { label: "Model", clip: true, sort: (session) => modelName(session.model), cell: (session) => foreign(modelName(session.model)) },
      { label: "About", clip: true, cell: (session) => h("span", { class: "small muted" }, foreign(Object.entries(session.metadata).map(([name, value]) => `${name}: ${value}`).join(", "))) },
      { label: "Fork of", cell: (session) => session.forked_from ? h("a", { href: sessionHref(session.forked_from) }, h("code", {}, `…${session.forked_from.slice(-6)}`)) : null },
      { label: "Events", number: true, sort: (session) => session.last_seq, cell: (session) => count(session.last_seq) },
      { label: "Cost", number: true, cell: (session) => costs(session.usage?.costs) },
      { label: "Changed", number: true, sort: (session) => session.updated_at, cell: (session) => ago(session.updated_at) },
    ],
  });
  await list.ready;
  live({ load: () => list.reload(), show: () => {}, every: 5, signal });
  const create = h("button", { class: "primary", type: "button", on: { click: newSession } }, "New session");
  return h("div", { class: "stack" }, pageHead("Sessions", { actions: identity.can("inference") ? [create] : [] }), h("section", { class: "card", "aria-label": "Sessions" }, list.element));
}

async function newSession() {
  const { data } = await api.get("v1/models");
  const model = select(data.map(({ id }) => [id]), data[0]?.id);
  const instructions = h("textarea", { dir: "auto" });
  const made = await dialog("New session", (close) => form({
    fields: [field("Model", model), field("Instructions", instructions, "What the model is told before the first turn. May be empty.")],
    button: "Start session", extra: [h("button", { type: "button", on: { click: () => close(null) } }, "Cancel")],
    send: () => api.post("v1/sessions", { model: model.value, instructions: instructions.value || null }),
    done: close,
  }));
  if (made) location.hash = sessionHref(made.id);
}
