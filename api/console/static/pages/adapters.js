// A tenant's adapters: the list, one adapter with its versions and aliases, and the upload.

import { foreign, h, plain, put, say } from "../dom.js";
import { ago, bytes, count, moment, percent } from "../format.js";
import { api, at, client, query, upload } from "../http.js";
import { identity } from "../identity.js";
import { card, chip, confirm, dialog, field, form, pageHead, select } from "../parts.js";
import { snapshot } from "../snapshots.js";
import { pagedTable, table } from "../table.js";
import { residency } from "./fleet_lists.js";

const href = (name) => `#/adapters/name/${encodeURIComponent(name)}`;

export async function showAdapters({ signal }) {
  const list = pagedTable({
    caption: "Adapters, newest first", noun: "adapter", signal, empty: "No adapter yet. Upload one that PEFT has written.",
    load: (after, limit) => api.get(query("v1/adapters", { after, limit }), { signal }),
    text: (adapter) => adapter.name,
    columns: [
      { label: "Adapter", clip: true, sort: (adapter) => adapter.name, cell: (adapter) => h("a", { href: href(adapter.name) }, foreign(adapter.name)) },
      { label: "Versions", number: true, sort: (adapter) => adapter.versions.length, cell: (adapter) => count(adapter.versions.length) },
      { label: "Newest", cell: (adapter) => newest(adapter) ? h("span", {}, `version ${newest(adapter).version} `, chip(newest(adapter).status)) : null },
      { label: "Rank", number: true, cell: (adapter) => count(newest(adapter)?.rank) },
      { label: "Size", number: true, sort: (adapter) => sizeOf(adapter), cell: (adapter) => bytes(sizeOf(adapter)) },
      { label: "Aliases", clip: true, cell: (adapter) => h("span", { class: "row" }, Object.entries(adapter.aliases).map(([alias, target]) => chip(`${alias} → ${targetText(target)}`, "weights" in target ? "info" : ""))) },
      { label: "Created", number: true, sort: (adapter) => adapter.created_at, cell: (adapter) => ago(adapter.created_at) },
    ],
  });
  await list.ready;
  return h("div", { class: "stack" }, pageHead("Adapters", { actions: [uploadLink("#/adapters/upload", "Upload an adapter")] }), h("section", { class: "card", "aria-label": "Adapters" }, list.element));
}

function uploadLink(target, text) {
  return identity.can("adapters") ? h("a", { class: "button primary", href: target }, text) : h("span", { class: "muted small" }, "This key may not change adapters.");
}

function newest(adapter) {
  return adapter.versions.reduce((best, version) => (best && best.version > version.version ? best : version), null);
}

function sizeOf(adapter) {
  return adapter.versions.reduce((sum, version) => sum + version.size_bytes, 0);
}

function targetText(target) {
  if ("version" in target) return `version ${target.version}`;
  const all = Object.values(target.weights).reduce((sum, weight) => sum + weight, 0);
  return Object.entries(target.weights).map(([version, weight]) => `${percent(weight / all)} version ${version}`).join(", ");
}

export async function showAdapter({ params: [name], signal, refresh }) {
  const base = at`v1/adapters/${name}`;
  const adapter = await api.get(base, { signal });
  const mayChange = identity.can("adapters");
  const places = new Map(adapter.versions.map(({ version }) => [version, h("span", { class: "muted" }, "–")]));
  showPlaces(adapter, places, signal);
  return h("div", { class: "stack" },
    pageHead(foreign(adapter.name), {
      crumbs: [["Adapters", "#/adapters"]],
      actions: [
        h("a", { class: "button", href: `#/playground?model=${encodeURIComponent(adapter.name)}` }, "Try it"),
        mayChange ? uploadLink(`#/adapters/upload?name=${encodeURIComponent(adapter.name)}`, "Upload a version") : null,
        mayChange ? h("button", { class: "danger", type: "button", on: { click: remove } }, "Delete") : null,
      ],
    }),
    versionsCard(adapter, base, { places, mayChange, refresh }), aliasesCard(adapter, base, mayChange, refresh));

  async function remove() {
    const done = await confirm("Delete this adapter?", "All its versions go. Running requests still finish; new ones get a 404.", { button: "Delete", typed: adapter.name, send: () => api.delete(base) });
    if (done) location.hash = "#/adapters";
  }
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

function versionsCard(adapter, base, { places, mayChange, refresh }) {
  const list = table({
    caption: "The weights of a version never change", rows: [...adapter.versions].sort((a, b) => b.version - a.version).map((version) => ({ ...version, id: version.version })),
    columns: [
      { label: "Version", cell: (version) => `version ${version.version}` },
      { label: "State", cell: (version) => chip(version.status) },
      { label: "Where", cell: (version) => places.get(version.version) },
      { label: "Rank", number: true, cell: (version) => count(version.rank) },
      { label: "Modules", clip: true, cell: (version) => h("span", { class: "small" }, foreign(version.target_modules.join(", "))) },
      { label: "Size", number: true, cell: (version) => bytes(version.size_bytes) },
      { label: "Digest", clip: true, cell: (version) => h("code", { class: "small muted", title: plain(version.digest) }, `${version.digest.slice(0, 19)}…`) },
      { label: "Uploaded", number: true, cell: (version) => h("span", { title: moment(version.created_at) }, ago(version.created_at)) },
      { label: "", cell: (version) => mayChange ? h("div", { class: "actions" }, h("button", { class: "danger", type: "button", "aria-label": `Delete version ${version.version}`, on: { click: () => remove(version) } }, "Delete")) : null },
    ],
  });

  async function remove(version) {
    const done = await confirm(`Delete version ${version.version}?`, "An alias that selects it must be moved first.", { button: "Delete", send: () => api.delete(`${base}/versions/${version.version}`) });
    if (done) refresh();
  }
  return card("Versions", list.element, { flush: true });
}

function aliasesCard(adapter, base, mayChange, refresh) {
  const rows = Object.entries(adapter.aliases).map(([alias, target]) => ({ id: alias, alias, target }));
  const list = table({
    caption: "An alias is a name for a version, or divides requests between versions (canary)", rows, empty: "No alias yet.",
    columns: [
      { label: "Alias", clip: true, cell: ({ alias }) => foreign(alias) },
      { label: "Selects", cell: ({ target }) => targetText(target) },
      { label: "Kind", cell: ({ target }) => chip("weights" in target ? "canary" : "fixed", "weights" in target ? "info" : "") },
      { label: "", cell: ({ alias, target }) => mayChange ? h("div", { class: "actions" },
        h("button", { type: "button", "aria-label": `Change ${plain(alias)}`, on: { click: () => edit(alias, target) } }, "Change"),
        h("button", { type: "button", class: "danger", "aria-label": `Remove ${plain(alias)}`, on: { click: () => remove(alias) } }, "Remove")) : null },
    ],
  });

  async function remove(alias) {
    if (await confirm("Remove this alias?", `Requests for ${plain(adapter.name)}@${plain(alias)} then get a 404.`, { button: "Remove", send: () => api.delete(`${base}/aliases/${encodeURIComponent(alias)}`) })) refresh();
  }

  async function edit(alias, target) {
    if (await aliasDialog(adapter, base, alias, target)) refresh();
  }
  const add = mayChange && adapter.versions.length ? [h("button", { type: "button", on: { click: () => edit(null, null) } }, "New alias")] : [];
  return card("Aliases", list.element, { flush: true, actions: add });
}

function aliasDialog(adapter, base, alias, target) {
  const versions = [...adapter.versions].sort((a, b) => b.version - a.version);
  const name = h("input", { required: true, value: alias ?? "", disabled: alias !== null, pattern: "[a-z0-9][a-z0-9._\\-]{0,62}", autocomplete: "off" });
  const shares = versions.map((version) => {
    const had = target && "weights" in target ? target.weights[version.version] ?? 0 : target ? Number(target.version === version.version) : Number(version === versions[0]);
    return [version.version, h("input", { type: "number", min: 0, step: "any", value: had })];
  });
  const kind = select([["fixed", "One version"], ["canary", "Divide requests between versions"]], target && "weights" in target ? "canary" : "fixed");
  const one = select(versions.map((version) => [version.version, `version ${version.version}`]), target?.version ?? versions[0].version);
  const oneField = field("Version", one);
  const sharesField = h("fieldset", { class: "field" }, h("legend", {}, "Weights"), h("div", { class: "fields" }, shares.map(([version, input]) => field(`version ${version}`, input))), h("span", { class: "hint" }, "A version gets its weight's share of the requests. Zero leaves it out."));
  const draw = () => { oneField.hidden = kind.value !== "fixed"; sharesField.hidden = kind.value === "fixed"; };
  kind.addEventListener("change", draw);
  draw();
  return dialog(alias === null ? "New alias" : "Change alias", (close) => form({
    fields: [field("Alias", name, "Requests name it as adapter@alias."), field("Kind", kind), oneField, sharesField],
    button: "Save", extra: [h("button", { type: "button", on: { click: () => close(false) } }, "Cancel")],
    send: () => {
      const given = shares.map(([version, input]) => [version, Number(input.value)]).filter(([, weight]) => weight > 0);
      if (kind.value === "canary" && !given.length) throw new RangeError("Give at least one version a weight above zero.");
      return api.put(`${base}/aliases/${encodeURIComponent(name.value)}`, kind.value === "fixed" ? { version: Number(one.value) } : { weights: Object.fromEntries(given) });
    },
    done: () => close(true),
  }));
}

export function showUpload({ query: given, signal }) {
  const known = given.get("name");
  const name = h("input", { required: true, value: known ?? "", disabled: known !== null, autocomplete: "off", spellcheck: "false" });
  const config = h("input", { type: "file", accept: ".json,application/json", required: true });
  const weights = h("input", { type: "file", accept: ".safetensors", required: true });
  const bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Upload" });
  const note = h("span", { class: "small muted", role: "status" });
  const drop = h("p", { class: "drop muted", on: { dragover: (event) => event.preventDefault(), drop: take } }, "Drop adapter_config.json and adapter_model.safetensors here, or choose them:");

  function take(event) {
    event.preventDefault();
    for (const file of event.dataTransfer.files) {
      const list = new DataTransfer();
      list.items.add(file);
      (file.name.endsWith(".json") ? config : weights).files = list.files;
    }
  }

  async function send() {
    const body = new FormData();
    if (known === null) body.append("name", name.value.trim());
    else body.append("name", known);
    body.append("config", config.files[0]);
    body.append("weights", weights.files[0]);
    bar.hidden = false;
    bar.value = 0;
    const onProgress = (share) => {
      bar.value = share;
      note.textContent = share < 1 ? `${percent(share)} of ${bytes(weights.files[0].size)} sent` : "The server checks the tensors…";
    };
    try {
      return await sent(body, onProgress);
    } finally {
      bar.hidden = true;
      note.textContent = "";
    }
  }

  /** Sends the files, and once more after a new sign-in if the old one has ended. */
  async function sent(files, onProgress) {
    const path = known === null ? "v1/adapters" : at`v1/adapters/${known}/versions`;
    for (;;) {
      try {
        return await upload(path, files, { signal, onProgress });
      } catch (error) {
        if (error.status !== 401) throw error;
        await client.onSignedOut(error);
      }
    }
  }

  const body = form({
    fields: [field("Name", name, "An adapter that has this name gets a new version."), drop, field("adapter_config.json", config), field("adapter_model.safetensors", weights), bar, note],
    button: "Upload", send,
    done: (adapter) => { say("Uploaded"); location.hash = href(adapter.name); },
  });
  return h("div", { class: "stack narrow" }, pageHead(known ? h("span", {}, "New version of ", foreign(known)) : "Upload an adapter", { crumbs: [["Adapters", "#/adapters"]] }), card("Files", body),
    h("p", { class: "muted small" }, "The server checks every tensor against the base model. If it refuses one, the message names it, and nothing is stored."));
}

