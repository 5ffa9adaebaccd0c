// The roll-outs of an adapter: a version that takes over an alias step by step, and is taken back if it is worse.

import { foreign, h, plain, put } from "../../dom.js";
import { ago, count, moment, span } from "../../format.js";
import { api, query } from "../../http.js";
import { live } from "../../live.js";
import { card, chip, confirm, dialog, errorBox, field, form, select } from "../../parts.js";
import { table } from "../../table.js";
import { newestFirst } from "./targets.js";

const SHOWN = 20;
const EVERY_S = 3;
const TONES = { running: "info", completed: "good", rolled_back: "bad", cancelled: "warn" };
const LIMITS = [
  ["error_rate", "More errors, in %", 2], ["refusal_rate", "More refusals, in %", 5],
  ["first_token_ratio", "Time to the first token, as a multiple", 2], ["min_requests", "Requests before a verdict", 10],
];
const UNITS = { s: 1, m: 60, h: 3600, d: 86400 };

export function rolloutsCard({ adapter, base, mayChange, refresh, signal }) {
  const problem = h("div", { "aria-live": "polite" });
  const list = table({
    caption: "A new version takes over an alias in steps, and is rolled back by itself if it is worse", empty: "No roll-out yet.",
    columns: [
      { label: "Alias", clip: true, cell: (one) => foreign(one.alias) },
      { label: "From", cell: (one) => `version ${one.stable}` },
      { label: "To", cell: (one) => `version ${one.version}` },
      { label: "State", cell: (one) => h("span", {}, chip(one.state, TONES[one.state] ?? ""), one.reason ? h("div", { class: "small muted" }, foreign(one.reason)) : null) },
      { label: "Steps", cell: (one) => steps(one) },
      { label: "In this step", cell: (one) => figures(one) },
      { label: "Began", number: true, cell: (one) => h("span", { title: moment(one.created_at) }, ago(one.created_at)) },
      { label: "", cell: (one) => mayChange && one.state === "running" ? h("div", { class: "actions" }, h("button", { type: "button", class: "danger", "aria-label": `Cancel the roll-out of ${plain(one.alias)}`, on: { click: () => cancel(one) } }, "Cancel")) : null },
    ],
  });
  let running = null;
  const round = live({
    signal, every: EVERY_S,
    load: () => api.get(query(`${base}/rollouts`, { limit: SHOWN }), { signal }),
    show: ({ data }) => {
      put(problem);
      list.show(data);
      const now = data.filter(({ state }) => state === "running").length;
      if (running !== null && now < running) refresh(); // the alias leads elsewhere now
      running = now;
    },
    failed: (error) => put(problem, errorBox(error)),
  });
  const isPossible = mayChange && adapter.versions.length > 1 && Object.values(adapter.aliases).some((target) => "version" in target);
  const start = isPossible ? [h("button", { type: "button", on: { click: async () => { if (await startDialog(adapter, base)) refresh(); } } }, "Start a roll-out")] : [];
  return card("Roll-outs", [problem, list.element], { flush: true, actions: start });

  async function cancel(one) {
    const done = await confirm("Cancel this roll-out?", `${plain(one.alias)} leads to version ${one.stable} again.`, { button: "Cancel the roll-out", send: () => api.post(`${base}/rollouts/${encodeURIComponent(one.id)}/cancel`) });
    if (done) round();
  }
}

function steps(rollout) {
  return h("ol", { class: "steps" }, rollout.steps.map((step, index) => {
    const place = index < rollout.step || rollout.state === "completed" ? "done" : index === rollout.step ? rollout.state : "to come";
    const text = `${count(step.weight)} % for ${span(step.seconds)}`;
    return h("li", { class: place === "running" ? "now" : place === "to come" ? "muted" : "", "aria-current": place === "running" ? "step" : null }, text, place === "done" ? h("span", { class: "visually-hidden" }, ", done") : null);
  }));
}

function figures(rollout) {
  const found = Object.entries(rollout.figures);
  if (!found.length) return h("span", { class: "muted" }, "–");
  return h("div", { class: "small" }, found.map(([version, one]) => h("div", {},
    `version ${version}: ${count(one.requests)} requests, ${count(one.errors)} failed, ${count(one.refusals)} refused`,
    one.first_token_s === null ? null : `, first token ${span(one.first_token_s)}`)));
}

function startDialog(adapter, base) {
  const aliases = Object.entries(adapter.aliases).filter(([, target]) => "version" in target);
  const alias = select(aliases.map(([name, target]) => [name, `${name}, now version ${target.version}`]), "prod");
  if (!alias.value) alias.value = aliases[0][0];
  const version = select(newestFirst(adapter.versions).map((one) => [one.version, `version ${one.version}`]));
  const given = h("input", { required: true, value: "10:10m, 50:30m", autocomplete: "off", spellcheck: "false" });
  const limits = LIMITS.map(([name, label, value]) => [name, label, h("input", { type: "number", min: name === "min_requests" || name === "first_token_ratio" ? 1 : 0, step: name === "min_requests" ? 1 : "any", value, required: name === "min_requests", placeholder: "no limit" })]);
  return dialog("Start a roll-out", (close) => form({
    fields: [
      field("Alias", alias), field("New version", version),
      field("Steps", given, "The share of the new version in percent, and how long at least: s, m, h or d. After the last step it has the alias alone."),
      h("fieldset", { class: "field" }, h("legend", {}, "It is rolled back if it has, against the version before"), h("div", { class: "fields" }, limits.map(([, label, input]) => field(label, input)))),
    ],
    button: "Start", extra: [h("button", { type: "button", on: { click: () => close(false) } }, "Cancel")],
    send: () => api.post(`${base}/rollouts`, { alias: alias.value, version: Number(version.value), steps: readSteps(given.value), limits: Object.fromEntries(limits.map(([name, , input]) => [name, limitOf(name, input.value)])) }),
    done: () => close(true),
  }), { kind: "wide" });
}

function limitOf(name, text) {
  if (text === "") return null;
  return name.endsWith("_rate") ? Number(text) / 100 : Number(text);
}

/** Reads `10:10m, 50:1h`. Raises an error that names the part that is none. */
export function readSteps(text) {
  return text.split(",").map((part) => part.trim()).filter(Boolean).map((part) => {
    const found = /^([0-9.]+) *%? *: *([0-9.]+) *([smhd])$/.exec(part);
    if (!found) throw new RangeError(`“${plain(part)}” is no step: write a share and a time, such as 10:30m.`);
    return { weight: Number(found[1]), seconds: Number(found[2]) * UNITS[found[3]] };
  });
}
