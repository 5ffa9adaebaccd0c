// An adapter's tags, and what its requests have unless they say otherwise.

import { folded, h } from "../../dom.js";
import { api } from "../../http.js";
import { card, dialog, facts, field, form } from "../../parts.js";

/** Asks for the tags. Resolves with whether they were changed. */
export function tagsEditor({ adapter, base }) {
  const tags = h("input", { value: adapter.tags.join(", "), autocomplete: "off", spellcheck: "false" });
  return dialog("Tags", (close) => form({
    fields: [field("Tags", tags, "Separated by commas, such as team:care, lang:en. Lists of adapters can be narrowed by them.")],
    button: "Save", extra: [h("button", { type: "button", on: { click: () => close(false) } }, "Cancel")],
    send: () => api.patch(base, { tags: tags.value.split(",").map((tag) => tag.trim()).filter(Boolean) }),
    done: () => close(true),
  }));
}

export function defaultsCard({ adapter, base, mayChange, refresh }) {
  const { defaults } = adapter;
  const change = mayChange ? [h("button", { type: "button", on: { click: async () => { if (await defaultsEditor(adapter, base)) refresh(); } } }, "Change defaults")] : [];
  const shown = facts([
    ["System message", defaults.system ? folded(defaults.system, { limit: 600 }) : null],
    ["Sampling", json(defaults.sampling)], ["Response format", json(defaults.response_format)], ["Tools", json(defaults.tools)],
  ]);
  return card("Defaults", shown.children.length ? shown : h("p", { class: "muted" }, "None: requests have what they say."), { actions: change });
}

function json(value) {
  const isEmpty = value === undefined || value === null || Object.keys(value).length === 0;
  return isEmpty ? null : folded(JSON.stringify(value, null, 2), { mono: true, limit: 600 });
}

function defaultsEditor({ defaults }, base) {
  const system = h("textarea", { dir: "auto", rows: 3, value: defaults.system ?? "" });
  const parts = [["sampling", "Sampling", '{"temperature": 0.2}'], ["response_format", "Response format", '{"type": "json_object"}'], ["tools", "Tools", '[{"type": "function", "function": {"name": "weather"}}]']]
    .map(([name, label, example]) => [name, label, h("textarea", { class: "mono", spellcheck: "false", rows: 3, placeholder: example, value: textOf(defaults[name]) })]);
  return dialog("Defaults of its requests", (close) => form({
    fields: [
      h("p", { class: "muted small" }, "A request that has a field of its own keeps it. Sessions have the defaults of their beginning."),
      field("System message", system), parts.map(([, label, input]) => field(`${label}, as JSON`, input)),
    ],
    button: "Save", extra: [h("button", { type: "button", on: { click: () => close(false) } }, "Cancel")],
    send: () => {
      const given = parts.map(([name, label, input]) => [name, read(label, input.value)]).filter(([, value]) => value !== null);
      return api.patch(base, { defaults: { ...(system.value ? { system: system.value } : {}), ...Object.fromEntries(given) } });
    },
    done: () => close(true),
  }), { kind: "wide" });
}

function textOf(value) {
  return value === undefined || value === null || Object.keys(value).length === 0 ? "" : JSON.stringify(value, null, 2);
}

function read(label, text) {
  if (!text.trim()) return null;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new RangeError(`${label}: this is not JSON (${error.message}).`);
  }
}
