// Reads the live snapshot of the server, and keeps the last minutes of what the charts show.
// The server makes one snapshot a second for all watchers; an unchanged one costs an answer without a body.

import { fetchApi, query } from "./http.js";
import { identity } from "./identity.js";

const KEPT_S = 600;
const seen = new Map();

/** The address of the stream of snapshots for these parameters. */
export function streamPath(fields) {
  return query(identity.isAdmin ? "v1/admin/overview" : "v1/overview", { ...fields, stream: true });
}

/** The snapshot for these parameters: sort, rows, find, tenants, adapters, sessions (first rows). */
export async function snapshot(fields, signal) {
  const path = query(identity.isAdmin ? "v1/admin/overview" : "v1/overview", fields);
  const before = seen.get(path);
  const answer = await fetchApi("GET", path, { signal, headers: before ? { "if-none-match": before.etag } : {} });
  if (answer.status === 304) return before.body;
  const body = await answer.json();
  const etag = answer.headers.get("etag");
  if (etag) {
    if (seen.size > 20) seen.clear();
    seen.set(path, { etag, body });
  }
  return body;
}

/** Points of the charts, by name, while this page of the browser is open. */
export class History {
  #points = new Map();

  add(name, at, value) {
    const points = this.#points.get(name) ?? [];
    if (points.at(-1)?.[0] === at) return;
    points.push([at, value]);
    while (points.length && points[0][0] < at - KEPT_S) points.shift();
    this.#points.set(name, points);
  }

  of(name) {
    return this.#points.get(name) ?? [];
  }
}

/** What is wrong with a tenant's service, most serious first: [{tone, text}]. Empty if nothing is. */
export function complaints(tenant) {
  const found = [];
  if (tenant.status !== "active" && tenant.status) found.push({ weight: 0, tone: "", text: tenant.status });
  const failures = total(tenant.failures);
  if (failures) found.push({ weight: 5 + failures, tone: "bad", text: `${failures} failed: ${names(tenant.failures)}` });
  if ((tenant.slo_burn ?? 0) >= 1) found.push({ weight: 4 + tenant.slo_burn, tone: "bad", text: `misses its latency objective, ${tenant.slo_burn.toFixed(1)}× the budget` });
  const isShort = tenant.waiting > 0 && tenant.fair_share > 0 && tenant.service_share < 0.8 * tenant.fair_share;
  if (isShort) found.push({ weight: 3, tone: "bad", text: `gets ${Math.round(100 * tenant.service_share)} % of the engines, its share is ${Math.round(100 * tenant.fair_share)} %` });
  const refused = total(tenant.refusals);
  if (refused) found.push({ weight: 2 + Math.min(refused / 100, 1), tone: "warn", text: `${refused} refused: ${names(tenant.refusals)}` });
  if (tenant.waiting > 3 && tenant.waiting > tenant.running) found.push({ weight: 1.5, tone: "warn", text: `${tenant.waiting} wait, ${tenant.running} run` });
  const computed = tenant.prompt_tokens_by_tier?.recomputed ?? 0;
  const prompts = total(tenant.prompt_tokens_by_tier);
  if (found.length && prompts > 2000 && computed / prompts > 0.8) found.push({ weight: 0.5, tone: "info", text: `${Math.round(100 * computed / prompts)} % of its prompts are computed, not cached` });
  return found.sort((a, b) => b.weight - a.weight);
}

export function total(counts) {
  return Object.values(counts ?? {}).reduce((sum, value) => sum + value, 0);
}

function names(counts) {
  return Object.entries(counts).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name]) => name.replaceAll("_", " ")).join(", ");
}

/** The token counts of a snapshot in the form of `tierBar`. */
export function tiers(counts) {
  return { device: counts?.device ?? 0, host: counts?.host ?? 0, disk: counts?.disk ?? 0, computed: counts?.recomputed ?? 0 };
}
