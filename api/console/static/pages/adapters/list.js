// A tenant's adapters, narrowed by a tag, and those that were deleted and can be restored.

import { foreign, h, plain, put, say } from "../../dom.js";
import { ago, bytes, count } from "../../format.js";
import { api, at, query } from "../../http.js";
import { identity } from "../../identity.js";
import { chip, errorBox, pageHead, select } from "../../parts.js";
import { pagedTable } from "../../table.js";
import { hrefOf, newestFirst, targetText } from "./targets.js";

export async function showAdapters({ signal, query: given }) {
  const state = select([["ready", "In use"], ["deleted", "Deleted"]], given.get("state") ?? "ready", { "aria-label": "State" });
  const tag = h("input", { type: "search", placeholder: "Only with this tag", "aria-label": "Only with this tag", value: given.get("tag") ?? "", autocomplete: "off" });
  const problem = h("div", { "aria-live": "polite" });
  let timer = 0;
  const list = pagedTable({
    caption: "Adapters, newest first", noun: "adapter", signal, tools: [tag, state],
    empty: "No adapter here. Upload one that PEFT has written, or look for another tag or state.",
    load: (after, limit) => api.get(query("v1/adapters", { after, limit, state: state.value, tag: tag.value.trim() || null }), { signal }),
    text: (adapter) => `${adapter.name} ${adapter.tags.join(" ")}`,
    columns: [
      { label: "Adapter", clip: true, sort: (adapter) => adapter.name, cell: (adapter) => state.value === "deleted" ? foreign(adapter.name) : h("a", { href: hrefOf(adapter.name) }, foreign(adapter.name)) },
      { label: "Versions", number: true, sort: (adapter) => versionsOf(adapter).length, cell: (adapter) => count(versionsOf(adapter).length) },
      { label: "Newest", cell: (adapter) => newest(adapter) ? h("span", {}, `version ${newest(adapter).version} `, chip(newest(adapter).status)) : null },
      { label: "Rank", number: true, cell: (adapter) => count(newest(adapter)?.rank) },
      { label: "Size", number: true, sort: sizeOf, cell: (adapter) => bytes(sizeOf(adapter)) },
      { label: "Aliases", clip: true, cell: (adapter) => h("span", { class: "row" }, Object.entries(adapter.aliases).map(([alias, target]) => chip(`${alias} → ${targetText(target)}`, "weights" in target ? "info" : ""))) },
      { label: "Tags", clip: true, cell: (adapter) => tagRow(adapter.tags) },
      { label: "Created", number: true, sort: (adapter) => adapter.created_at, cell: (adapter) => ago(adapter.created_at) },
      { label: "", cell: (adapter) => state.value === "deleted" && identity.can("adapters") ? h("div", { class: "actions" }, h("button", { type: "button", "aria-label": `Restore ${plain(adapter.name)}`, on: { click: () => restore(adapter) } }, "Restore")) : null },
    ],
  });

  async function restore(adapter) {
    put(problem);
    try {
      await api.post(at`v1/adapters/${adapter.name}/restore`);
      say(`${plain(adapter.name)} is restored`);
      location.hash = hrefOf(adapter.name);
    } catch (error) {
      if (error.name !== "AbortError") put(problem, errorBox(error));
    }
  }

  state.addEventListener("change", () => list.restart());
  tag.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(() => list.restart(), 250); });
  await list.ready;
  return h("div", { class: "stack" }, pageHead("Adapters", { actions: [uploadLink("#/adapters/upload", "Upload an adapter")] }), problem,
    h("section", { class: "card", "aria-label": "Adapters" }, list.element));
}

/** A link to the upload, or why there is none. */
export function uploadLink(target, text) {
  return identity.can("adapters") ? h("a", { class: "button primary", href: target }, text) : h("span", { class: "muted small" }, "This key may not change adapters.");
}

/** Tags as links to the adapters that have them. */
export function tagRow(tags) {
  return tags.length ? h("span", { class: "row" }, tags.map((tag) => h("a", { href: `#/adapters?tag=${encodeURIComponent(tag)}` }, chip(tag, "plain")))) : null;
}

/** The versions that answer; of a deleted adapter those that can be restored. */
function versionsOf(adapter) {
  return adapter.versions.length ? adapter.versions : adapter.deleted_versions;
}

function newest(adapter) {
  return newestFirst(versionsOf(adapter))[0] ?? null;
}

function sizeOf(adapter) {
  return versionsOf(adapter).reduce((sum, version) => sum + version.size_bytes, 0);
}
