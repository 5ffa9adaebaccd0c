// The versions of an adapter: where each is now, where it comes from, and those that can be restored.

import { foreign, h, plain, put, say } from "../../dom.js";
import { ago, bytes, count, moment } from "../../format.js";
import { api } from "../../http.js";
import { card, chip, confirm, errorBox, facts } from "../../parts.js";
import { snapshot } from "../../snapshots.js";
import { table } from "../../table.js";
import { residency } from "../fleet_lists.js";
import { newestFirst } from "./targets.js";

export function versionsCard({ adapter, base, mayChange, refresh, signal }) {
  const places = new Map(adapter.versions.map(({ version }) => [version, h("span", { class: "muted" }, "–")]));
  const problem = h("div", { "aria-live": "polite" });
  const list = table({
    caption: "The weights of a version never change", empty: "No version answers: restore one, or upload one.",
    rows: newestFirst([...adapter.versions, ...adapter.deleted_versions]).map((version) => ({ ...version, id: version.version })),
    columns: [
      { label: "Version", cell: (version) => `version ${version.version}` },
      { label: "State", cell: (version) => h("span", { class: "row" }, chip(version.status), version.held ? heldChip(adapter) : null) },
      { label: "Where", cell: (version) => places.get(version.version) ?? null },
      { label: "Rank", number: true, cell: (version) => count(version.rank) },
      { label: "Modules", clip: true, cell: (version) => h("span", { class: "small" }, foreign(version.target_modules.join(", "))) },
      { label: "Size", number: true, cell: (version) => bytes(version.size_bytes) },
      { label: "Origin", clip: true, cell: (version) => origin(version) },
      { label: "Uploaded", number: true, cell: (version) => h("span", { title: moment(version.created_at) }, ago(version.created_at)) },
      { label: "", cell: (version) => mayChange ? h("div", { class: "actions" }, version.status === "deleted" ? restoreButton(version) : removeButton(version)) : null },
    ],
  });
  showPlaces(adapter, places, signal);
  return card("Versions", [problem, list.element], { flush: true });

  function removeButton(version) {
    return h("button", { class: "danger", type: "button", "aria-label": `Delete version ${version.version}`, on: { click: () => remove(version) } }, "Delete");
  }

  function restoreButton(version) {
    return h("button", { type: "button", "aria-label": `Restore version ${version.version}`, on: { click: () => restore(version) } }, "Restore");
  }

  async function remove(version) {
    const done = await confirm(`Delete version ${version.version}?`, "An alias that selects it must be moved first. For a day the version can be restored here.", { button: "Delete", send: () => api.delete(`${base}/versions/${version.version}`) });
    if (done) refresh();
  }

  async function restore(version) {
    put(problem);
    try {
      await api.post(`${base}/versions/${version.version}/restore`);
      say(`Version ${version.version} is restored`);
      refresh();
    } catch (error) {
      if (error.name !== "AbortError") put(problem, errorBox(error));
    }
  }
}

function heldChip(adapter) {
  const text = `${plain(adapter.name)} without a version passes it over until it is promoted`;
  return h("span", { title: text }, chip("not promoted", "warn"));
}

/** The digest, and what the push said of the training. */
function origin(version) {
  const { run, parent, data_digest: data, pushed_by: key } = version.provenance;
  const digest = h("code", { class: "small muted", title: plain(version.digest) }, `${version.digest.slice(0, 19)}…`);
  if (!run && !parent && !data) return digest;
  return h("details", { class: "small" }, h("summary", {}, run ? foreign(run) : parent ? foreign(parent) : "training"), facts([
    ["Run", run ? foreign(run) : null], ["Parent", parent ? foreign(parent) : null],
    ["Data", data ? h("code", {}, data) : null], ["Digest", h("code", {}, version.digest)], ["Pushed by", key ? h("code", {}, key) : null],
  ]));
}

/** Fills the places of the versions: on which tier each is now. */
async function showPlaces(adapter, places, signal) {
  try {
    const found = await snapshot({ rows: 50, find: adapter.name }, signal);
    for (const one of found.adapters) if (one.name === adapter.name && places.has(one.version)) put(places.get(one.version), residency(one));
  } catch (error) {
    if (error.status === undefined && error.name !== "AbortError") throw error; // without usage, or without a snapshot, nothing is shown
  }
}
