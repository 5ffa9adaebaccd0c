// The playground: one message to several models at once, side by side. It keeps its lanes while other pages are shown.

import { h, plain, put } from "../dom.js";
import { api, at, query } from "../http.js";
import { check, errorBox, field, pageHead } from "../parts.js";
import { Lane } from "./lane.js";
import { messagesOf } from "./messages.js";

const MOST_LANES = 6;
let kept = null;

export async function showPlayground({ query: given, signal }) {
  kept ??= new Playground((await api.get("v1/models", { signal })).data.map(({ id }) => id));
  const session = given.get("session");
  if (session) await kept.openSession(session, signal);
  else kept.begin(given.get("model"));
  history.replaceState(null, "", "#/playground");
  return kept.element;
}

class Playground {
  constructor(models) {
    this.models = models;
    this.lanes = [];
    this.place = h("div", { class: "lanes" });
    this.problem = h("div", { "aria-live": "polite" });
    this.input = h("textarea", { dir: "auto", rows: 2, placeholder: "Say the same to every model here", "aria-label": "Message to every lane" });
    this.settings = new Settings();
    this.sendButton = h("button", { class: "primary", type: "submit" }, "Send");
    const stop = h("button", { type: "button", on: { click: () => this.lanes.forEach((lane) => lane.stop()) } }, "Stop");
    const composer = h("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); this.send(); } } }, this.input, h("div", { class: "row" }, stop, this.sendButton));
    this.input.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); this.send(); } });
    this.addButton = h("button", { type: "button", on: { click: () => this.add(this.models.find((name) => !this.lanes.some((lane) => lane.model === name)) ?? this.models[0]) } }, "Add a lane");
    this.element = h("div", { class: "stack playground" },
      pageHead("Playground", { actions: [this.addButton, h("button", { type: "button", on: { click: () => this.clear() } }, "Start over")] }),
      this.settings.element, this.problem, this.place, composer);
  }

  /** Shows an adapter beside the base model, unless lanes are there already. */
  begin(model) {
    if (model && !this.models.includes(model)) this.models.push(model);
    if (this.lanes.length === 0) {
      const first = model ?? this.models[1] ?? this.models[0];
      this.add(first);
      if (first !== this.models[0]) this.add(this.models[0]);
    } else if (model && !this.lanes.some((lane) => lane.model === model)) this.add(model);
  }

  async openSession(id, signal) {
    const path = at`v1/sessions/${id}`;
    const [session, items] = await Promise.all([api.get(path, { signal }), api.get(query(`${path}/items`, { order: "desc", limit: 100 }), { signal })]);
    const { name, version } = session.model;
    const model = version === null ? name : `${name}@${version}`;
    if (!this.models.includes(model)) this.models.push(model);
    const messages = messagesOf(session.instructions, items.data.toReversed());
    this.clear();
    this.add(model, messages);
    this.add(this.models[0], messages);
  }

  add(model, messages = []) {
    if (this.lanes.length >= MOST_LANES) return void put(this.problem, errorBox({ message: `${MOST_LANES} lanes are the most: close one first.` }));
    const lane = new Lane({
      model, messages, models: this.models, settings: this.settings,
      onFork: (one, history) => this.add(one, history),
      onClose: (one) => { this.lanes = this.lanes.filter((other) => other !== one); this.draw(); },
    });
    this.lanes.push(lane);
    this.draw();
    return lane;
  }

  clear() {
    for (const lane of this.lanes) lane.stop();
    this.lanes = [];
    this.draw();
    if (this.place.isConnected) this.begin(null);
  }

  draw() {
    put(this.problem);
    put(this.place, this.lanes.map((lane) => lane.element));
    this.addButton.disabled = this.lanes.length >= MOST_LANES;
  }

  send() {
    const text = this.input.value;
    if (!text.trim()) return;
    put(this.problem);
    try {
      this.settings.check();
    } catch (error) {
      return void put(this.problem, errorBox({ message: plain(error.message) }));
    }
    const free = this.lanes.filter((lane) => lane.isFree);
    if (!free.length) return void put(this.problem, errorBox({ message: "Every lane still writes, or waits for a tool. Stop them or answer them first." }));
    this.input.value = "";
    for (const lane of free) lane.say(text);
    this.input.focus();
  }
}

/** What all lanes send beside their messages. */
class Settings {
  constructor() {
    this.system = h("textarea", { dir: "auto", rows: 2 });
    this.temperature = h("input", { type: "number", min: 0, max: 2, step: 0.1, placeholder: "default" });
    this.most = h("input", { type: "number", min: 1, step: 1, value: 256 });
    this.seed = h("input", { type: "number", step: 1, placeholder: "random" });
    this.tools = h("textarea", { class: "mono", spellcheck: "false", rows: 4, placeholder: '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]' });
    this.schema = h("textarea", { class: "mono", spellcheck: "false", rows: 4, placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}}' });
    this.scores = check("Log-probabilities", { checked: true });
    this.element = h("details", { class: "card" }, h("summary", {}, "Settings, tools and schema"), h("div", { class: "body stack" },
      field("System message", this.system),
      h("div", { class: "fields" }, field("Temperature", this.temperature), field("Most tokens", this.most), field("Seed", this.seed, "The same seed gives each lane the same noise.")),
      this.scores.row,
      h("div", { class: "halves" }, field("Tools, as JSON", this.tools, "In OpenAI's form."), field("JSON Schema of the answer", this.schema, "The answer follows it exactly, or the server refuses the schema."))));
  }

  check() {
    this.body();
  }

  get wantsScores() {
    return this.scores.box.checked;
  }

  /** The fields of a request. Raises an error that names the field whose JSON is wrong. */
  body() {
    const body = { max_tokens: number(this.most), temperature: number(this.temperature), seed: number(this.seed) };
    const tools = json(this.tools, "Tools");
    const schema = json(this.schema, "The schema");
    if (tools) body.tools = tools;
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    if (this.wantsScores) Object.assign(body, { logprobs: true, top_logprobs: 5 });
    return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== null));
  }
}

function number(input) {
  return input.value === "" ? null : Number(input.value);
}

function json(input, name) {
  if (!input.value.trim()) return null;
  try {
    return JSON.parse(input.value);
  } catch (error) {
    throw new RangeError(`${name}: this is not JSON (${error.message}).`);
  }
}
