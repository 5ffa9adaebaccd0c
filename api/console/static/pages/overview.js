// The first page: who suffers and why, then the engines, then everybody, all live.

import { lineChart } from "../chart.js";
import { foreign, h, plain, put } from "../dom.js";
import { ago, count, percent, short, span } from "../format.js";
import { identity } from "../identity.js";
import { follow, live } from "../live.js";
import { card, chip, errorBox, meter, pageHead, select, tierBar, tile } from "../parts.js";
import { complaints, History, snapshot, streamPath, tiers, total } from "../snapshots.js";
import { table } from "../table.js";
import { tenantLink } from "./names.js";

const WORST_EVERY_S = 5;
const WORST = 12;
const ROWS = 100;
export const WELL = "All is well: nothing was refused, failed, slow or short of its share.";
const SORTS = [["activity", "Most active"], ["burn", "Worst latency"], ["refusals", "Most refused"], ["waiting", "Longest queue"], ["tokens", "Most tokens"], ["name", "Name"]];
const history = new History();

export function showOverview({ signal }) {
  return identity.isAdmin ? operatorsView(signal) : tenantsView(signal);
}

function operatorsView(signal) {
  const parts = { tiles: h("div", { class: "tiles" }), worst: h("div"), engines: h("div"), shares: h("div"), burn: h("div"), speed: h("div"), note: h("span", { class: "muted small" }) };
  const sort = select(SORTS, "activity", { "aria-label": "Order of the tenants" });
  const tenants = tenantTable();
  const problem = h("div", { "aria-live": "polite" });
  let reading = new AbortController();
  let more = [];
  watch();

  function watch() {
    reading.abort();
    reading = new AbortController();
    follow({ path: streamPath({ sort: sort.value, rows: ROWS }), name: "overview", signal: AbortSignal.any([signal, reading.signal]), show: draw, failed: (error) => put(problem, errorBox(error)) });
  }

  function draw(found) {
    put(problem);
    remember(found);
    const byId = new Map([...more, ...found.tenants].map((tenant) => [tenant.id, tenant]));
    drawTiles(parts.tiles, found);
    put(parts.worst, worst([...byId.values()]));
    put(parts.engines, engineTable(found.engines));
    put(parts.shares, shares(found.tenants));
    put(parts.burn, burnChart(found.tenants));
    put(parts.speed, speedChart());
    put(parts.note, `${found.model} · version ${found.version} · the last ${span(found.window_s)}`);
    tenants.show(found.tenants);
    hasMore = found.totals.tenants > found.tenants.length;
  }

  // Who suffers may be beyond the rows of the table, so the worst are asked for where there are more.
  let hasMore = false;
  live({
    signal, every: WORST_EVERY_S,
    load: async () => (hasMore ? Promise.all(["burn", "refusals"].map((order) => snapshot({ sort: order, rows: WORST }, signal))) : []),
    show: (views) => { more = views.flatMap((view) => view.tenants); },
  });
  sort.addEventListener("change", watch);
  return h("div", { class: "stack" },
    pageHead("Overview", { chips: [parts.note] }), problem, parts.tiles,
    card("Who suffers, and why", parts.worst, { flush: true }),
    card("Engines", parts.engines, { flush: true }),
    h("div", { class: "halves" }, card("Share of the engines", parts.shares), h("div", { class: "stack" }, card("Latency budget spent", parts.burn), card("Tokens each second", parts.speed))),
    card("Tenants", tenants.element, { flush: true, actions: [sort] }));
}

function tenantsView(signal) {
  const tiles = h("div", { class: "tiles" });
  const why = h("div");
  const speed = h("div");
  const problem = h("div", { "aria-live": "polite" });
  const sessions = sessionTable();
  follow({
    signal, path: streamPath({ rows: 20 }), name: "overview",
    show: (found) => {
      put(problem);
      remember(found);
      const own = found.tenants[0];
      put(tiles, tile("Running", count(own?.running ?? 0)), tile("Waiting", count(own?.waiting ?? 0)),
        tile("First token", own?.ttft_ms ? span(own.ttft_ms.p50 / 1000) : "–", { note: own?.ttft_ms ? `1 in 100 above ${span(own.ttft_ms.p99 / 1000)}` : "" }),
        tile("Refused", count(total(own?.refusals)), { tone: total(own?.refusals) ? "warn" : "" }));
      put(why, own ? worst([own], WELL) : h("p", { class: "empty" }, "No request came in the last minutes. Try the playground."));
      put(speed, speedChart());
      sessions.show(found.sessions);
    },
    failed: (error) => put(problem, error.code === "missing_scope" ? h("p", { class: "notice" }, "This key may not read usage, so there is no overview.") : errorBox(error)),
  });
  return h("div", { class: "stack" },
    pageHead("Overview"), problem, tiles, card("How your requests do", why, { flush: true }), card("Tokens each second", speed), card("Sessions on the engines", sessions.element, { flush: true }));
}

function drawTiles(box, { totals, engines, tenants }) {
  const ready = engines.filter((engine) => engine.status === "ready").length;
  const waits = totals.waiting > totals.running ? "warn" : "";
  put(box,
    tile("Engines ready", `${ready} of ${engines.length}`, { tone: ready === engines.length && ready ? "" : "bad" }),
    tile("Running", count(totals.running)), tile("Waiting", count(totals.waiting), { tone: waits }),
    tile("Requests/s", short(totals.requests_per_s)),
    tile("Answer tokens/s", short(totals.generated_tokens_per_s), { note: `${short(totals.prompt_tokens_per_s)} prompt tokens/s` }),
    tile("Refused/s", short(totals.refused_per_s), { tone: totals.refused_per_s > 0 ? "warn" : "" }),
    tile("Tenants", count(totals.tenants), { note: `${count(totals.sessions)} sessions, ${count(totals.adapters)} adapters` }));
  box.hidden = tenants === undefined;
}

function remember({ at, totals, tenants }) {
  history.add("generated", at, totals.generated_tokens_per_s);
  history.add("prompt", at, totals.prompt_tokens_per_s);
  for (const tenant of tenants.slice(0, 40)) history.add(`burn ${tenant.id}`, at, tenant.slo_burn ?? 0);
}

/** The tenants that suffer, worst first, each with its reasons. */
export function worst(tenants, calm = "Nobody. No tenant was refused, failed, slow or short of its share.") {
  const found = tenants.map((tenant) => ({ tenant, why: complaints(tenant) })).filter(({ why }) => why.some(({ tone }) => tone === "bad" || tone === "warn"))
    .sort((a, b) => b.why[0].weight - a.why[0].weight).slice(0, WORST);
  if (!found.length) return h("p", { class: "empty" }, calm);
  return h("ul", { class: "worst" }, found.map(({ tenant, why }) => h("li", {},
    nameOf(tenant),
    h("span", { class: "row" }, why.slice(0, 3).map(({ tone, text }) => chip(text, tone))),
    h("span", { class: "muted small figures" }, tenant.ttft_ms ? `first token ${span(tenant.ttft_ms.p50 / 1000)}, 1 in 100 above ${span(tenant.ttft_ms.p99 / 1000)}` : `${count(tenant.waiting)} waiting`))));
}

function nameOf(tenant) {
  const name = foreign(tenant.name ?? tenant.id);
  return identity.isAdmin ? h("a", { href: `#/tenants/${encodeURIComponent(tenant.id)}` }, name) : name;
}

function engineTable(engines) {
  return table({
    caption: "Engines now", quiet: true, rows: engines, empty: "No engine has reported yet.",
    columns: [
      { label: "Engine", clip: true, cell: (engine) => foreign(engine.id) },
      { label: "State", cell: (engine) => h("span", {}, chip(engine.status), engine.stale_s ? h("span", { class: "small muted" }, ` silent for ${span(engine.stale_s)}`) : null, engine.reason ? h("div", { class: "small muted" }, foreign(engine.reason)) : null) },
      { label: "Running", number: true, cell: (engine) => count(engine.running) },
      { label: "Waiting", number: true, cell: (engine) => count(engine.waiting) },
      { label: "Prompt tokens queued", number: true, cell: (engine) => short(engine.queued_tokens) },
      { label: "Tokens/s", number: true, cell: (engine) => short(engine.generated_tokens_per_s) },
      { label: "Step", number: true, cell: (engine) => engine.step_ms ? span(engine.step_ms / 1000) : "–" },
      { label: "KV in use", cell: (engine) => fullness(engine.pages?.device) },
      { label: "Adapters", number: true, cell: (engine) => count(engine.adapters_resident) },
    ],
  }).element;
}

function fullness(pages) {
  if (!pages || pages.free === null) return "–";
  const share = pages.used / Math.max(1, pages.used + pages.free);
  return h("span", { class: "row nowrap" }, meter(share, "KV pages in use"), h("span", { class: "small" }, percent(share)));
}

function shares(tenants) {
  const active = tenants.filter((tenant) => tenant.service_share > 0 || tenant.fair_share > 0 && tenant.waiting + tenant.running > 0)
    .sort((a, b) => Math.max(b.service_share, b.fair_share) - Math.max(a.service_share, a.fair_share)).slice(0, 8);
  if (!active.length) return h("p", { class: "muted" }, "No engine computes for a tenant now.");
  const top = Math.max(0.01, ...active.map((tenant) => Math.max(tenant.service_share, tenant.fair_share)));
  return h("div", { class: "stack" }, h("ul", { class: "shares" }, active.map((tenant) => {
    const got = h("span", { class: "got" });
    got.style.width = `${100 * tenant.service_share / top}%`;
    const fair = h("span", { class: "fair" });
    fair.style.insetInlineStart = `${100 * tenant.fair_share / top}%`;
    const text = `gets ${percent(tenant.service_share)}, fair is ${percent(tenant.fair_share)}`;
    return h("li", {}, nameOf(tenant), h("span", { class: "track", role: "img", "aria-label": text, title: text }, got, fair), h("span", { class: "small number" }, percent(tenant.service_share)));
  })), h("p", { class: "small muted" }, "The line marks the fair share by weight, among tenants that wanted the engines."));
}

function burnChart(tenants) {
  const named = tenants.filter((tenant) => history.of(`burn ${tenant.id}`).some(([, value]) => value > 0)).sort((a, b) => (b.slo_burn ?? 0) - (a.slo_burn ?? 0)).slice(0, 6);
  if (!named.length) return h("p", { class: "muted" }, "No tenant spends its latency budget.");
  const series = named.map((tenant) => ({ name: plain(tenant.name ?? tenant.id), points: history.of(`burn ${tenant.id}`) }));
  return lineChart({ label: `Latency budget spent by ${named.length} tenants; above 1 the objective is missed`, series, limit: 1 });
}

function speedChart() {
  const points = history.of("generated");
  if (points.length < 2) return h("p", { class: "muted" }, "The chart begins with the next figures.");
  return lineChart({ label: `Answer tokens each second, now ${short(points.at(-1)[1])}`, series: [{ name: "Answers", points }, { name: "Prompts", points: history.of("prompt") }] });
}

function tenantTable() {
  return table({
    caption: "Tenants with requests in this window", quiet: true, empty: "No tenant has sent a request yet.",
    columns: [
      { label: "Tenant", clip: true, sort: (tenant) => tenant.name, cell: nameOf },
      { label: "Running", number: true, sort: (tenant) => tenant.running, cell: (tenant) => count(tenant.running) },
      { label: "Waiting", number: true, sort: (tenant) => tenant.waiting, cell: (tenant) => count(tenant.waiting) },
      { label: "Req/s", number: true, sort: (tenant) => tenant.requests_per_s, cell: (tenant) => short(tenant.requests_per_s) },
      { label: "Tokens/s", number: true, sort: (tenant) => tenant.generated_tokens_per_s, cell: (tenant) => short(tenant.generated_tokens_per_s) },
      { label: "First token", number: true, sort: (tenant) => tenant.ttft_ms?.p50, cell: (tenant) => tenant.ttft_ms ? span(tenant.ttft_ms.p50 / 1000) : "–" },
      { label: "p99", number: true, sort: (tenant) => tenant.ttft_ms?.p99, cell: (tenant) => tenant.ttft_ms ? span(tenant.ttft_ms.p99 / 1000) : "–" },
      { label: "Between tokens", number: true, sort: (tenant) => tenant.inter_token_p99_ms, cell: (tenant) => tenant.inter_token_p99_ms ? span(tenant.inter_token_p99_ms / 1000) : "–" },
      { label: "Refused", number: true, sort: (tenant) => total(tenant.refusals), cell: (tenant) => count(total(tenant.refusals)) },
      { label: "Share / fair", number: true, sort: (tenant) => tenant.service_share, cell: (tenant) => `${percent(tenant.service_share)} / ${percent(tenant.fair_share)}` },
      { label: "Prompts from", cell: (tenant) => tierBar(tiers(tenant.prompt_tokens_by_tier)) },
      { label: "Burn", number: true, sort: (tenant) => tenant.slo_burn, cell: (tenant) => tenant.slo_burn === null || tenant.slo_burn === undefined ? "–" : h("span", { class: tenant.slo_burn >= 1 ? "over" : "" }, `${tenant.slo_burn.toFixed(1)}×`) },
    ],
  });
}

/** The sessions of a snapshot. The operator sees whose they are by `names`; null leaves the tenant out, for a narrower place. */
export function sessionTable(names = new Map()) {
  const isShort = identity.isAdmin && names === null;
  return table({
    caption: "Sessions that an engine knows", empty: "No session has run lately.",
    columns: [
      { label: "Session", cell: (session) => identity.isAdmin ? h("code", { title: session.id }, isShort ? `…${session.id.slice(-6)}` : session.id) : h("a", { href: `#/sessions/${encodeURIComponent(session.id)}` }, h("code", {}, session.id)) },
      { label: "State", cell: (session) => chip(session.status) },
      ...(identity.isAdmin && names ? [{ label: "Tenant", clip: true, cell: (session) => tenantLink(session.tenant_id, names) }] : []),
      { label: "Model", clip: true, cell: (session) => session.model ? foreign(session.model) : h("span", { class: "muted" }, "base model") },
      ...(isShort ? [] : [{ label: "Turns", number: true, sort: (session) => session.turns, cell: (session) => count(session.turns) }]),
      { label: "Tokens", number: true, sort: (session) => session.tokens, cell: (session) => short(session.tokens) },
      { label: "Prompt from", cell: (session) => tierBar(tiers(session.prompt_tokens_by_tier)) },
      { label: "Missed because", cell: (session) => session.miss_reason ? chip(session.miss_reason, "warn") : null },
      { label: "Active", number: true, sort: (session) => session.active_at, cell: (session) => ago(session.active_at) },
    ],
  });
}

