// One adapter: its versions, aliases, roll-outs, tags and defaults.

import { foreign, h } from "../../dom.js";
import { api, at } from "../../http.js";
import { identity } from "../../identity.js";
import { confirm, pageHead } from "../../parts.js";
import { aliasesCard } from "./aliases.js";
import { defaultsCard, tagsEditor } from "./details.js";
import { tagRow, uploadLink } from "./list.js";
import { rolloutsCard } from "./rollouts.js";
import { versionsCard } from "./versions.js";

export async function showAdapter({ params: [name], signal, refresh }) {
  const base = at`v1/adapters/${name}`;
  const adapter = await api.get(base, { signal });
  const mayChange = identity.can("adapters");
  const place = { adapter, base, mayChange, refresh, signal };
  return h("div", { class: "stack" },
    pageHead(foreign(adapter.name), {
      crumbs: [["Adapters", "#/adapters"]],
      chips: [tagRow(adapter.tags)],
      actions: [
        identity.can("inference") ? h("a", { class: "button", href: `#/playground?model=${encodeURIComponent(adapter.name)}` }, "Try it") : null,
        mayChange ? uploadLink(`#/adapters/upload?name=${encodeURIComponent(adapter.name)}`, "Upload a version") : null,
        mayChange ? h("button", { type: "button", on: { click: async () => { if (await tagsEditor(place)) refresh(); } } }, "Tags") : null,
        mayChange ? h("button", { class: "danger", type: "button", on: { click: remove } }, "Delete") : null,
      ],
    }),
    versionsCard(place), aliasesCard(place), rolloutsCard(place), defaultsCard(place));

  async function remove() {
    const done = await confirm("Delete this adapter?",
      "All its versions go. Running requests still finish; new ones get a 404. For a day it can be restored from the list of deleted adapters.",
      { button: "Delete", typed: adapter.name, send: () => api.delete(base) });
    if (done) location.hash = "#/adapters";
  }
}
