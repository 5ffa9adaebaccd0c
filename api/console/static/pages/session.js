// One session: its transcript with the figures of each turn, its cache, its forks, and a place to go on.

import { foreign, h, plain, put, say } from "../dom.js";
import { bytes, count, moment, span } from "../format.js";
import { api, at, events, fetchApi, query } from "../http.js";
import { familyTree } from "../family.js";
import { identity } from "../identity.js";
import { live } from "../live.js";
import { card, chip, confirm, errorBox, facts, field, form, pageHead, tierBar, tierKey } from "../parts.js";
import { item, LiveTurn, turnFoot } from "../transcript.js";
import { modelName, sessionHref } from "./sessions.js";
import { costs } from "./usage.js";

const PAGE = 50;
const ENDS = new Set(["turn.completed", "turn.awaiting_tool", "turn.failed", "turn.cancelled"]);

export async function showSession({ params: [id], signal }) {
  const page = new SessionPage(id, signal);
  await page.load();
  page.watch();
  return page.element;
}

class SessionPage {
  constructor(id, signal) {
    this.base = at`v1/sessions/${id}`;
    this.signal = signal;
    this.items = [];
    this.turns = [];
    this.hasEarlier = false;
    this.isFollowing = false;
    this.mayRun = identity.can("inference");
    this.list = h("ol", { class: "items", "aria-label": "Transcript" });
    this.earlier = h("button", { type: "button", hidden: true, on: { click: () => this.showEarlier() } }, "Show earlier entries");
    this.side = h("div", { class: "stack" });
    this.head = h("div");
    this.composer = h("div");
    this.tree = h("div");
    this.problem = h("div", { "aria-live": "polite" });
    this.element = h("div", { class: "stack" }, this.head, this.problem,
      h("div", { class: "split" }, h("div", { class: "stack" }, tierKey(), this.earlier, this.list, this.composer), this.side));
  }

  async load() {
    const { signal } = this;
    const [session, items, turns] = await Promise.all([
      api.get(this.base, { signal }),
      api.get(query(`${this.base}/items`, { order: "desc", limit: Math.min(100, Math.max(PAGE, this.items.length)) }), { signal }),
      api.get(query(`${this.base}/turns`, { limit: 100 }), { signal }),
    ]);
    const isNew = this.session === undefined;
    this.session = session;
    const fresh = items.data.toReversed();
    const older = this.items.findIndex((one) => one.id === fresh[0]?.id);
    this.items = older > 0 ? [...this.items.slice(0, older), ...fresh] : fresh;
    if (older <= 0) this.hasEarlier = items.has_more;
    this.turns = turns.data;
    if (isNew) put(this.tree, familyTree(session, signal));
    this.draw();
    this.drawCache();
  }

  draw() {
    const { session } = this;
    const footOf = new Map(this.turns.map((turn) => [turn.output.at(-1)?.id ?? turn.id, turn]));
    const drawn = this.items.flatMap((entry) => {
      const turn = footOf.get(entry.id);
      footOf.delete(entry.id);
      return turn ? [item(entry), this.foot(turn)] : [item(entry)];
    });
    const loose = this.turns.filter((turn) => !turn.output.length && ["failed", "cancelled"].includes(turn.status)).toReversed();
    put(this.list, drawn, loose.map((turn) => this.foot(turn)), this.liveTurn ? [this.liveTurn.input, this.liveTurn.element] : null);
    if (!this.list.children.length) put(this.list, h("li", { class: "empty" }, "Nothing was said yet."));
    this.earlier.hidden = !this.hasEarlier;
    put(this.head, pageHead(h("span", {}, "Session ", h("code", { class: "muted" }, session.id.slice(-8))), {
      crumbs: [["Sessions", "#/sessions"]], chips: [chip(session.status)], actions: this.actions(),
    }));
    this.drawComposer();
    put(this.side, card("Cache", this.cacheBox ??= h("div")), card("Forks", this.tree), card("About", this.about()));
  }

  foot(turn) {
    return turnFoot(turn, { mayFork: this.mayRun && this.session.status !== "running", onFork: (one) => this.fork(one.checkpoint_id) });
  }

  about() {
    const { session } = this;
    return facts([
      ["Id", h("code", {}, session.id)], ["Model", foreign(modelName(session.model))], ["Created", moment(session.created_at)], ["Changed", moment(session.updated_at)],
      ["Fork of", session.forked_from ? h("a", { href: sessionHref(session.forked_from) }, h("code", {}, `…${session.forked_from.slice(-8)}`)) : null],
      ["Turns", session.usage ? count(session.usage.requests) : null], ["Tokens", session.usage ? count(session.usage.total_tokens) : null],
      ["Cost", session.usage?.costs.length ? costs(session.usage.costs) : null],
      ["Tools", session.tools.length ? foreign(session.tools.map((tool) => tool.name ?? tool.function?.name ?? tool.type).join(", ")) : null],
      ["Instructions", session.instructions ? foreign(session.instructions.slice(0, 500)) : null],
      ...Object.entries(session.metadata).map(([name, value]) => [foreign(name), foreign(value)]),
    ]);
  }

  actions() {
    const { session } = this;
    const button = (text, act, props = {}) => h("button", { type: "button", on: { click: act }, ...props }, text);
    if (session.status === "closed" || !this.mayRun) return [];
    return [
      session.status === "running" ? button("Cancel turn", () => this.act("cancel")) : null,
      session.head ? button("Fork", () => this.fork(null)) : null,
      session.head ? h("a", { class: "button", href: `#/playground?session=${encodeURIComponent(session.id)}` }, "Compare in playground") : null,
      session.status === "idle" ? button("Suspend", () => this.act("suspend")) : null,
      button("Close", () => this.close(), { class: "danger" }),
    ].filter(Boolean);
  }

  async guarded(work) {
    put(this.problem);
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") put(this.problem, errorBox(error));
    }
  }

  act(name) {
    return this.guarded(async () => { await api.post(`${this.base}/${name}`); await this.load(); });
  }

  async close() {
    if (await confirm("Close this session?", "Its running turn is cancelled, and it takes no more turns. It can still be read until its retention ends.", { button: "Close session", send: () => api.delete(this.base) })) await this.guarded(() => this.load());
  }

  fork(checkpoint) {
    return this.guarded(async () => {
      const { data } = await api.post(`${this.base}/fork`, checkpoint ? { at: checkpoint } : {});
      say("Fork created");
      location.hash = sessionHref(data[0].id);
    });
  }

  showEarlier() {
    return this.guarded(async () => {
      const page = await api.get(query(`${this.base}/items`, { order: "desc", limit: PAGE, after: this.items[0].id }), { signal: this.signal });
      this.items = [...page.data.toReversed(), ...this.items];
      this.hasEarlier = page.has_more;
      this.draw();
    });
  }

  async drawCache() {
    const found = await api.get(`${this.base}/cache`, { signal: this.signal }).catch((error) => (error.name === "AbortError" ? null : error));
    if (!found || this.signal.aborted) return;
    if (found instanceof Error) return void put(this.cacheBox, errorBox(found));
    const { tiers } = found;
    const isAway = tiers.device.bytes === null;
    put(this.cacheBox, h("div", { class: "stack" },
      tierBar({ device: tiers.device.tokens, host: tiers.host.tokens, disk: tiers.disk.tokens, computed: found.missing_tokens ?? 0 }),
      isAway ? h("p", { class: "notice small" }, "The engine does not answer: these are the figures of the last turn.") : null,
      facts([
        ...["device", "host", "disk"].map((tier) => [`On the ${tier}`.replace("the disk", "disk"), `${count(tiers[tier].tokens)} tokens, ${bytes(tiers[tier].bytes)}`]),
        ["Nowhere", found.missing_tokens === null ? null : `${count(found.missing_tokens)} tokens`],
        ["Last turn computed", `${count(found.recomputed_tokens)} tokens`],
        ["Last miss", found.last_miss_reason ? chip(found.last_miss_reason, "warn") : null],
        ["Kept on the device", found.lease ? `for ${span(found.lease.seconds)}` : null],
      ])));
  }

  drawComposer() {
    const { status } = this.session;
    const wanted = status === "closed" ? "closed" : !this.mayRun ? "read" : status === "running" ? "running" : status === "awaiting_tool" ? `tools ${this.session.awaiting.join()}` : "text";
    if (this.composing === wanted) return;
    this.composing = wanted;
    if (wanted === "closed") put(this.composer, h("p", { class: "muted" }, "This session is closed."));
    else if (wanted === "read") put(this.composer, h("p", { class: "muted" }, "You may read this session, and not go on with it."));
    else if (wanted === "running") put(this.composer);
    else if (wanted === "text") put(this.composer, this.messageForm());
    else this.guarded(() => this.drawToolForm());
  }

  messageForm() {
    const input = h("textarea", { required: true, dir: "auto", placeholder: "Say something to this session" });
    input.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) input.form.requestSubmit(); });
    return card("Next turn", form({
      fields: [field("Message", input, "Ctrl+Enter sends it.")], button: "Send",
      send: () => this.stream(`${this.base}/turns`, { input: input.value, stream: true }, input.value),
    }));
  }

  async drawToolForm() {
    const { tool_calls: calls } = await api.get(`${this.base}/tool_outputs`, { signal: this.signal });
    const inputs = calls.map((call) => [call, h("textarea", { dir: "auto", class: "mono", required: true })]);
    put(this.composer, card("The model waits for its tools", form({
      fields: inputs.map(([call, input]) => field(plain(`Output of ${call.name}`), input, plain(call.arguments.slice(0, 300)))),
      button: "Send outputs",
      send: () => this.stream(`${this.base}/tool_outputs`, { outputs: inputs.map(([call, input]) => ({ call_id: call.call_id, output: input.value })), stream: true }, null),
    })));
  }

  /** Starts a turn and shows it while it is written. */
  async stream(path, body, input) {
    const answer = await fetchApi("POST", path, { body, signal: this.signal });
    await this.follow(answer, new LiveTurn(input), null);
  }

  /** Shows the events of a running turn until it ends. `turnId` of null takes those of every turn. */
  async follow(answer, turn, turnId) {
    this.isFollowing = true;
    this.liveTurn = turn;
    this.session = { ...this.session, status: "running" };
    this.draw();
    turn.element.scrollIntoView({ block: "nearest" });
    try {
      if (!answer.headers.get("content-type").startsWith("text/event-stream")) return;
      for await (const event of events(answer)) {
        const data = JSON.parse(event.data);
        if (event.event === "error") throw Object.assign(new Error(data.error.message), data.error);
        if (turnId !== null && data.turn_id !== turnId) continue;
        turn.take(event.event, data);
        if (ENDS.has(event.event)) break;
      }
    } finally {
      this.isFollowing = false;
      this.liveTurn = null;
      if (!this.signal.aborted) { await this.load(); say("The turn has ended"); }
    }
  }

  watch() {
    live({
      signal: this.signal, every: 3,
      load: async () => (this.isFollowing ? null : api.get(this.base, { signal: this.signal })),
      show: (session) => {
        if (!session || this.isFollowing) return;
        if (session.status === "running") this.guarded(() => this.followRunning(session));
        else if (session.last_seq !== this.session.last_seq || session.status !== this.session.status) this.guarded(() => this.load());
      },
    });
  }

  async followRunning(session) {
    if (this.isFollowing) return;
    this.isFollowing = true;
    try {
      const after = this.session.status === "running" ? Math.max(0, session.last_seq - 500) : this.session.last_seq;
      const answer = await fetchApi("GET", query(`${this.base}/events`, { after }), { signal: this.signal });
      await this.follow(answer, new LiveTurn(null), session.running_turn);
    } finally {
      this.isFollowing = false;
    }
  }
}
