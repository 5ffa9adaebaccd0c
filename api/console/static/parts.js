// Small parts that many pages use: cards, tiles, chips, forms, dialogs, errors, bars.

import { foreign, h, plain, put, say } from "./dom.js";
import { count, percent } from "./format.js";

let nextId = 0;

export function uid(prefix = "f") {
  nextId += 1;
  return `${prefix}${nextId}`;
}

export function pageHead(title, { crumbs = [], chips = [], actions = [] } = {}) {
  return h("div", {},
    crumbs.length ? h("nav", { class: "crumbs", "aria-label": "Where you are" }, crumbs.map(([text, href]) => [h("a", { href }, text), h("span", { "aria-hidden": "true" }, "/")])) : null,
    h("div", { class: "page-head" }, h("h1", { tabindex: -1 }, title), chips, actions.length ? h("div", { class: "actions" }, actions) : null));
}

export function card(title, body, { actions = [], flush = false } = {}) {
  const id = uid("card");
  return h("section", { class: "card", "aria-labelledby": id },
    h("header", {}, h("h2", { id }, title), actions.length ? h("div", { class: "actions" }, actions) : null),
    h("div", { class: flush ? "flush" : "body" }, body));
}

export function tile(label, value, { note = "", tone = "" } = {}) {
  return h("dl", { class: `tile ${tone}` }, h("dt", {}, label), h("dd", {}, value, note ? h("div", { class: "note" }, note) : null));
}

const TONES = {
  active: "good", ready: "good", idle: "", running: "info", completed: "good", awaiting_tool: "warn", suspended: "warn",
  closed: "", failed: "bad", cancelled: "warn", draining: "warn", absent: "bad", revoked: "bad", expired: "bad", done: "good",
};

export function chip(text, tone = TONES[text] ?? "") {
  return h("span", { class: `chip ${tone}` }, String(text).replaceAll("_", " "));
}

export function facts(entries) {
  return h("dl", { class: "facts" }, entries.filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
}

export function errorBox(error) {
  const where = error.param ? h("span", { class: "mono" }, plain(error.param)) : null;
  return h("div", { class: "error", role: "alert" }, where, foreign(error.message ?? String(error)),
    error.requestId && error.status >= 500 ? h("div", { class: "small" }, `Request ${plain(error.requestId)}`) : null);
}

/** A labelled field. `control` gets the id of its label and hint. */
export function field(label, control, hint = "") {
  const id = control.id || uid();
  control.id = id;
  const hintId = `${id}-hint`;
  if (hint) control.setAttribute("aria-describedby", hintId);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, hint ? h("span", { class: "hint", id: hintId }, hint) : null);
}

export function check(label, props = {}) {
  const id = uid();
  const box = h("input", { type: "checkbox", id, ...props });
  return { box, row: h("div", { class: "check" }, box, h("label", { for: id }, label)) };
}

export function select(options, value, props = {}) {
  const list = h("select", props, options.map(([name, text]) => h("option", { value: name }, plain(text ?? name))));
  if (value !== undefined && value !== null) list.value = value;
  return list;
}

/**
 * A form that says what went wrong next to its button and keeps what was typed. `send` does the work.
 * `locked` is why nobody may send it here: then it only shows its values.
 */
export function form({ fields, button, send, tone = "primary", extra = [], done, locked = null }) {
  if (locked !== null) return h("div", { class: "stack" }, h("fieldset", { class: "stack", disabled: true }, fields), h("p", { class: "muted small" }, locked));
  const place = h("div", { "aria-live": "polite" });
  const submit = h("button", { class: tone, type: "submit" }, button);
  const element = h("form", { class: "form stack", novalidate: true, on: { submit: onSubmit } }, fields, place, h("div", { class: "row actions" }, extra, submit));

  async function onSubmit(event) {
    event.preventDefault();
    if (!element.reportValidity()) return;
    submit.disabled = true;
    put(place);
    try {
      const result = await send();
      await done?.(result);
    } catch (error) {
      if (error.name !== "AbortError") put(place, errorBox(error));
      if (error.status === undefined && error.name !== "AbortError" && !(error instanceof RangeError)) console.error(error);
    } finally {
      submit.disabled = false;
    }
  }
  return element;
}

/** Shows a dialog over the page. `build(close)` returns what is in it. Resolves with what `close` gets. */
export function dialog(title, build, { kind = "" } = {}) {
  return new Promise((resolve) => {
    const id = uid("dialog");
    let result;
    const box = h("dialog", { class: kind, "aria-labelledby": id });
    const close = (value) => { result = value; box.close(); };
    box.append(h("div", { class: "form" }, h("h2", { id }, title), build(close)));
    box.addEventListener("close", () => { box.remove(); resolve(result); });
    document.body.append(box);
    box.showModal();
  });
}

/** Asks before an act that cannot be undone. `typed` must be typed to allow it. Resolves with whether it was done. */
export function confirm(title, text, { button, send, typed = null, tone = "danger" }) {
  return dialog(title, (close) => {
    const input = typed === null ? null : h("input", { autocomplete: "off", spellcheck: "false" });
    const cancel = h("button", { type: "button", on: { click: () => close(false) } }, "Cancel");
    return form({
      fields: [h("p", {}, text), input ? field("Type the name to go on", input, plain(typed)) : null],
      button, tone, extra: [cancel],
      send: async () => {
        if (input && plain(input.value) !== plain(typed)) throw new RangeError("This is not the name.");
        await send();
      },
      done: () => { say(`${button}: done`); close(true); },
    });
  });
}

/** Shows a secret that the server tells only once. */
export function showSecret(title, secret, text) {
  return dialog(title, (close) => {
    const copied = h("span", { class: "small muted", role: "status" });
    const copy = h("button", { type: "button", on: { click: async () => {
      await navigator.clipboard?.writeText(secret).then(() => { copied.textContent = "Copied"; }, () => { copied.textContent = "Select the text to copy it"; });
    } } }, "Copy");
    return h("div", { class: "stack" }, h("p", {}, text), h("div", { class: "secret" }, h("code", { id: "secret" }, secret), copy),
      h("div", { class: "row" }, copied, h("div", { class: "actions", style: null }, h("button", { class: "primary", type: "button", on: { click: () => close(true) } }, "I have stored it"))));
  });
}

const TIERS = [["device", "On the device"], ["host", "On the host"], ["disk", "On disk"], ["computed", "Computed"]];

/** A bar of where a prompt's tokens came from. `tokens`: {device, host, disk, computed}. */
export function tierBar(tokens) {
  const sum = TIERS.reduce((total, [tier]) => total + (tokens[tier] ?? 0), 0);
  const label = TIERS.filter(([tier]) => tokens[tier]).map(([tier, name]) => `${name}: ${count(tokens[tier])}`).join(", ") || "No tokens";
  const bar = h("div", { class: "bar", role: "img", "aria-label": label, title: label });
  for (const [tier] of TIERS) {
    if (!tokens[tier]) continue;
    const part = h("span", { class: `tier-${tier}` });
    part.style.flex = `${tokens[tier] / sum} 0 0`;
    bar.append(part);
  }
  return bar;
}

export function tierKey() {
  return h("div", { class: "key-list", "aria-hidden": "true" }, TIERS.map(([tier, name]) => h("span", { class: `k-${tier}` }, name)));
}

export function meter(share, label) {
  const fillBar = h("span");
  fillBar.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
  return h("div", { class: `meter ${share >= 0.9 ? "high" : ""}`, role: "img", "aria-label": `${label}: ${percent(share)}` }, fillBar);
}
