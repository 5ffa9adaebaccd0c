// The aliases of an adapter: what each leads to, its history, and the way back.

import { foreign, h, plain } from "../../dom.js";
import { ago, moment } from "../../format.js";
import { api, query } from "../../http.js";
import { card, chip, confirm, dialog, field, form, select } from "../../parts.js";
import { pagedTable, table } from "../../table.js";
import { newestFirst, targetText } from "./targets.js";

export function aliasesCard({ adapter, base, mayChange, refresh, signal }) {
  const rows = Object.entries(adapter.aliases).map(([alias, target]) => ({ id: alias, alias, target }));
  const list = table({
    caption: "An alias is a name for a version, or divides requests between versions (canary)", rows, empty: "No alias yet.",
    columns: [
      { label: "Alias", clip: true, cell: ({ alias }) => foreign(alias) },
      { label: "Selects", cell: ({ target }) => targetText(target) },
      { label: "Kind", cell: ({ target }) => chip("weights" in target ? "canary" : "fixed", "weights" in target ? "info" : "") },
      { label: "", cell: ({ alias, target }) => h("div", { class: "actions" },
        h("button", { type: "button", "aria-label": `History of ${plain(alias)}`, on: { click: () => showHistory(base, alias, signal) } }, "History"),
        mayChange ? [
          h("button", { type: "button", "aria-label": `Roll back ${plain(alias)}`, on: { click: () => rollBack(alias) } }, "Roll back"),
          h("button", { type: "button", "aria-label": `Change ${plain(alias)}`, on: { click: () => edit(alias, target) } }, "Change"),
          h("button", { type: "button", class: "danger", "aria-label": `Remove ${plain(alias)}`, on: { click: () => remove(alias) } }, "Remove")] : null) },
    ],
  });
  const add = mayChange && adapter.versions.length ? [h("button", { type: "button", on: { click: () => edit(null, null) } }, "New alias")] : [];
  return card("Aliases", list.element, { flush: true, actions: add });

  async function remove(alias) {
    if (await confirm("Remove this alias?", `Requests for ${plain(adapter.name)}@${plain(alias)} then get a 404.`, { button: "Remove", send: () => api.delete(pathOf(base, alias)) })) refresh();
  }

  async function rollBack(alias) {
    const send = () => api.post(`${pathOf(base, alias)}/rollback`);
    if (await confirm(`Roll ${plain(alias)} back?`, "It gets the target that it had before. A roll-out of it ends. Sessions keep the version that they have.", { button: "Roll back", tone: "primary", send })) refresh();
  }

  async function edit(alias, target) {
    if (await aliasDialog(adapter, base, alias, target)) refresh();
  }
}

function pathOf(base, alias) {
  return `${base}/aliases/${encodeURIComponent(alias)}`;
}

function showHistory(base, alias, signal) {
  const list = pagedTable({
    caption: "What the alias led to, newest first", noun: "change", signal,
    load: (after, limit) => api.get(query(`${pathOf(base, alias)}/history`, { after, limit }), { signal }),
    columns: [
      { label: "Led to", cell: (event) => targetText(event.target) },
      { label: "By", clip: true, cell: (event) => h("span", {}, chip(event.reason), " ", h("code", { class: "small muted" }, plain(event.actor))) },
      { label: "When", number: true, cell: (event) => h("span", { title: moment(event.at) }, ago(event.at)) },
    ],
  });
  return dialog(`History of ${plain(alias)}`, (close) => h("div", { class: "stack" }, list.element,
    h("div", { class: "actions" }, h("button", { class: "primary", type: "button", on: { click: () => close() } }, "Close"))), { kind: "wide" });
}

function aliasDialog(adapter, base, alias, target) {
  const versions = newestFirst(adapter.versions);
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
      return api.put(pathOf(base, name.value), kind.value === "fixed" ? { version: Number(one.value) } : { weights: Object.fromEntries(given) });
    },
    done: () => close(true),
  }));
}
