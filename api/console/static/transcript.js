// Draws the items of a history and the figures of its turns. Everything in it is text from others.

import { folded, foreign, h } from "./dom.js";
import { count, moment, span } from "./format.js";
import { chip, errorBox, tierBar } from "./parts.js";

/** One entry of a history: a message, a call, or the output of a call. */
export function item(entry) {
  if (entry.type === "message") return box(entry.role === "assistant" ? "assistant" : "", entry.role, textOf(entry).map((text) => folded(text)));
  if (entry.type.endsWith("_output")) return box("output", "output", [h("code", { class: "small muted" }, foreign(entry.call_id)), folded(textFrom(entry.output), { mono: true })]);
  return box("call", "calls", [h("strong", {}, foreign(entry.name)), " ", h("code", { class: "small muted" }, foreign(entry.call_id)), folded(pretty(entry.arguments ?? entry.input), { mono: true })]);
}

function box(kind, role, content) {
  return h("li", { class: `item ${kind}` }, h("span", { class: "role" }, role), h("div", {}, content));
}

function textOf(entry) {
  return (entry.content ?? []).map((part) => part.text ?? "");
}

function textFrom(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 2);
}

function pretty(text) {
  if (text === undefined || text === null) return "";
  if (text.length > 20000) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** What a turn has cost: where its prompt came from, its tokens, its time, why the cache missed. */
export function turnFoot(turn, { onFork, mayFork }) {
  const cache = turn.cache;
  const took = turn.finished_at ? span(turn.finished_at - turn.created_at) : null;
  const tokens = cache ? { device: cache.device_tokens, host: cache.host_tokens, disk: cache.disk_tokens, computed: cache.recomputed_tokens } : null;
  const price = turn.usage?.cost ? `${turn.usage.cost.amount} ${turn.usage.cost.currency}` : null;
  return h("li", { class: "turn-foot" },
    tokens ? tierBar(tokens) : h("span"),
    h("span", { class: "row" },
      ["completed", "awaiting_tool"].includes(turn.status) ? null : chip(turn.status),
      turn.usage ? h("span", {}, tokensText(turn.usage)) : null,
      took ? h("a", { href: `#/requests/${encodeURIComponent(turn.id)}`, title: `Timeline of the turn of ${moment(turn.created_at)}` }, took) : null,
      cache?.miss_reason ? chip(`missed: ${cache.miss_reason}`, "warn") : null,
      turn.service_tier && turn.service_tier !== "default" ? chip(turn.service_tier, "info") : null,
      turn.finish_reason && !["stop", "tool_calls"].includes(turn.finish_reason) ? chip(turn.finish_reason, "warn") : null,
      price ? h("span", { class: "cost" }, price) : null),
    mayFork && turn.checkpoint_id ? h("button", { type: "button", class: "quiet small", "aria-label": `Fork after the turn of ${moment(turn.created_at)}`, on: { click: () => onFork(turn) } }, "Fork here") : h("span"),
    turn.error ? h("div", { class: "wide" }, errorBox({ message: turn.error.message, param: turn.error.param })) : null);
}

/** `120 in, 80 out, 31 of them reasoning`. */
export function tokensText(usage) {
  const reasoning = usage.completion_tokens_details?.reasoning_tokens;
  return `${count(usage.prompt_tokens)} in, ${count(usage.completion_tokens)} out${reasoning ? `, ${count(reasoning)} of them reasoning` : ""}`;
}

/** An answer that is being written. `take` gets the session's events. */
export class LiveTurn {
  constructor(input) {
    this.text = h("div", { class: "text", dir: "auto" });
    this.calls = h("div", { class: "stack" });
    this.bar = h("div");
    this.thoughts = h("div", { class: "text muted", dir: "auto" });
    this.reasoning = h("details", { hidden: true }, h("summary", {}, "reasoning"), this.thoughts);
    this.role = h("span", { class: "role" }, "assistant");
    this.element = h("li", { class: "item assistant live", "aria-busy": "true" }, this.role, h("div", {}, this.reasoning, this.text, this.calls, this.bar));
    this.input = input ? item({ type: "message", role: "user", content: [{ text: input }] }) : null;
    this.writing = new Map();
  }

  take(type, data) {
    if (type === "turn.created" && data.cache) {
      this.bar.replaceChildren(tierBar({ device: data.cache.device_tokens, host: data.cache.host_tokens, disk: data.cache.disk_tokens, computed: data.cache.recomputed_tokens }));
    } else if (type === "reasoning.delta") {
      this.reasoning.hidden = false;
      this.thoughts.append(document.createTextNode(plainText(data.delta)));
    } else if (type === "output_text.delta") {
      this.text.append(document.createTextNode(plainText(data.delta)));
    } else if (type === "tool_call.started") {
      const code = h("div", { class: "text mono", dir: "auto" });
      this.writing.set(data.call_id, code);
      this.calls.append(h("div", {}, h("strong", {}, foreign(data.name)), code));
    } else if (type === "tool_call.arguments.delta") {
      this.writing.get(data.call_id)?.append(document.createTextNode(plainText(data.delta)));
    }
  }
}

function plainText(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, "\ufffd");
}

