// One lane of the playground: a model, its conversation, and the answer that is being written.

import { folded, foreign, h, plain, put, say, visible } from "../dom.js";
import { count, span } from "../format.js";
import { events, fetchApi } from "../http.js";
import { chip, errorBox, field, form, select, tierBar } from "../parts.js";
import { tokensText } from "../transcript.js";
import { openCalls, toSend } from "./messages.js";
import { TokenView } from "./tokens.js";

export class Lane {
  constructor({ model, messages, models, settings, onFork, onClose }) {
    this.model = model;
    this.messages = messages.map((message) => ({ ...message }));
    this.settings = settings;
    this.onFork = onFork;
    this.stopper = null;
    const chosen = select(models.map((name) => [name]), model, { "aria-label": "Model of this lane" });
    chosen.addEventListener("change", () => { this.model = chosen.value; });
    this.list = h("ol", { class: "lane-messages", "aria-label": `Conversation with ${plain(model)}` });
    this.foot = h("div", { class: "lane-foot", "aria-live": "polite" });
    this.element = h("section", { class: "card lane", "aria-label": `Lane of ${plain(model)}` },
      h("header", {}, chosen, h("div", { class: "actions" },
        h("button", { type: "button", class: "quiet", "aria-label": `Fork the lane of ${plain(model)}`, on: { click: () => onFork(this.model, this.messages) } }, "Fork"),
        h("button", { type: "button", class: "quiet", "aria-label": `Close the lane of ${plain(model)}`, on: { click: () => { this.stop(); onClose(this); } } }, "Close"))),
      this.list, this.foot);
    this.draw();
  }

  get isFree() {
    return this.stopper === null && openCalls(this.messages).length === 0;
  }

  say(text) {
    this.messages.push({ role: "user", content: text });
    return this.run();
  }

  stop() {
    this.stopper?.abort();
  }

  draw() {
    put(this.list, this.messages.map((message, index) => this.line(message, index)));
    put(this.foot, openCalls(this.messages).length && !this.stopper ? this.toolForm() : null);
  }

  line(message, index) {
    const forkable = message.role === "assistant" && index < this.messages.length - 1;
    return h("li", { class: `said ${message.role}` }, h("span", { class: "role" }, message.role),
      message.reasoning ? thoughts(folded(message.reasoning), false) : null,
      message.scores?.length ? new TokenView(message.scores).element : message.content ? folded(message.content) : null,
      (message.tool_calls ?? []).map((call) => h("div", { class: "call" }, h("strong", {}, foreign(call.function.name)), folded(call.function.arguments, { mono: true }))),
      message.took === undefined ? null : figures(message),
      forkable ? h("button", { type: "button", class: "quiet small", on: { click: () => this.onFork(this.model, this.messages.slice(0, index + 1)) } }, "Fork after this") : null);
  }

  toolForm() {
    const inputs = openCalls(this.messages).map((call) => [call, h("textarea", { dir: "auto", class: "mono", required: true, rows: 2 })]);
    return h("div", { class: "body" }, form({
      fields: inputs.map(([call, input]) => field(plain(`Output of ${call.function.name}`), input)), button: "Send outputs",
      send: () => {
        for (const [call, input] of inputs) this.messages.push({ role: "tool", tool_call_id: call.id, content: input.value });
        this.run();
      },
    }));
  }

  async run() {
    const answer = { role: "assistant", content: "", reasoning: "", tool_calls: [], scores: [] };
    const view = new TokenView([]);
    const calls = h("div");
    const thinking = h("div", { class: "text", dir: "auto" });
    const reasoning = thoughts(thinking, true);
    reasoning.hidden = true;
    const line = h("li", { class: "said assistant", "aria-busy": "true" }, h("span", { class: "role" }, "assistant"), reasoning, view.element, calls);
    this.stopper = new AbortController();
    this.draw();
    this.list.append(line);
    line.scrollIntoView({ block: "nearest" });
    const clock = { began: performance.now(), first: null };
    try {
      const body = { ...this.settings.body(), model: this.model, messages: toSend(this.settings.system.value, this.messages), stream: true, stream_options: { include_usage: true } };
      const response = await fetchApi("POST", "v1/chat/completions", { body, signal: this.stopper.signal, headers: { "x-graftwork-trace": "1" } });
      answer.requestId = response.headers.get("x-request-id");
      for await (const event of events(response)) {
        if (event.data === "[DONE]") break;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw Object.assign(new Error(chunk.error.message), chunk.error);
        clock.first ??= isFirst(chunk.choices?.[0]?.delta) ? performance.now() : null;
        take(answer, chunk, view);
        const thought = chunk.choices?.[0]?.delta?.reasoning_content;
        if (thought) { reasoning.hidden = false; thinking.append(document.createTextNode(visible(thought))); }
        if (answer.tool_calls.length) put(calls, answer.tool_calls.map((call) => h("div", { class: "call" }, h("strong", {}, foreign(call.function.name)), " ", foreign(call.function.arguments, "code"))));
      }
    } catch (error) {
      if (error.name !== "AbortError") this.failure = error;
      else answer.finish = "stopped";
    }
    this.stopper = null;
    this.end(answer, clock);
  }

  end(answer, clock) {
    const failure = this.failure;
    this.failure = null;
    if (answer.content || answer.reasoning || answer.tool_calls.length || !failure) {
      answer.took = (performance.now() - clock.began) / 1000;
      answer.first = clock.first ? (clock.first - clock.began) / 1000 : null;
      this.messages.push(answer);
    }
    this.draw();
    if (failure) {
      const again = h("button", { type: "button", on: { click: () => { put(this.foot); this.run(); } } }, "Try again");
      put(this.foot, h("div", { class: "body stack" }, errorBox(failure), h("div", {}, again)));
      this.foot.scrollIntoView({ block: "nearest" });
      if (failure.status === undefined && !failure.code) console.error(failure);
    } else say(`${plain(this.model)} has answered`);
  }
}

function isFirst(delta) {
  return Boolean(delta?.content || delta?.reasoning_content || delta?.tool_calls);
}

/** What the model reasoned before its answer, folded once the answer is there. */
function thoughts(text, open) {
  return h("details", { class: "muted small", open }, h("summary", {}, "reasoning"), text);
}

function take(answer, chunk, view) {
  if (chunk.usage) answer.usage = chunk.usage;
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { delta, logprobs } = choice;
  if (choice.finish_reason) answer.finish = choice.finish_reason;
  if (delta?.content) answer.content += delta.content;
  if (delta?.reasoning_content) answer.reasoning += delta.reasoning_content;
  if (logprobs?.content?.length) {
    answer.scores.push(...logprobs.content);
    view.add(logprobs.content);
  } else if (delta?.content) view.addText(delta.content);
  for (const part of delta?.tool_calls ?? []) {
    const call = answer.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } };
    if (part.id) call.id = part.id;
    if (part.function?.name) call.function.name = part.function.name;
    if (part.function?.arguments) call.function.arguments += part.function.arguments;
  }
}

function figures(answer) {
  const { took, first } = answer;
  const details = answer.usage?.prompt_tokens_details;
  const made = answer.usage?.completion_tokens;
  const texts = [
    first === null ? null : `first token ${span(first)}`,
    made && first !== null && took > first ? `${count(made / (took - first))} tokens/s` : null,
    answer.usage ? tokensText(answer.usage) : null,
  ].filter(Boolean);
  return h("div", { class: "figures" },
    details ? tierBar({ device: details.device_tokens, host: details.host_tokens, disk: details.disk_tokens, computed: details.recomputed_tokens }) : null,
    h("span", { class: "small muted" }, texts.join(" · ")),
    answer.requestId ? h("a", { class: "small", href: `#/requests/${encodeURIComponent(answer.requestId)}` }, "Timeline") : null,
    answer.finish && !["stop", "tool_calls"].includes(answer.finish) ? chip(answer.finish, "warn") : null);
}
