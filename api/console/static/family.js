// Finds the sessions that one history has branched into, and draws them as a tree.

import { foreign, h } from "./dom.js";
import { ago, many } from "./format.js";
import { api, at, query } from "./http.js";
import { chip, errorBox } from "./parts.js";

const MOST_ANCESTORS = 30;
const PAGES_AT_ONCE = 5;

/** An element that fills itself with the tree around `session`. */
export function familyTree(session, signal) {
  const box = h("div", { class: "tree" }, h("p", { class: "muted" }, "Looking for forks…"));
  find(session, box, signal).catch((error) => error.name !== "AbortError" && box.replaceChildren(errorBox(error)));
  return box;
}

async function find(session, box, signal) {
  const known = new Map([[session.id, session]]);
  let root = session;
  for (let steps = 0; root.forked_from && steps < MOST_ANCESTORS; steps += 1) {
    const parent = await api.get(at`v1/sessions/${root.forked_from}`, { signal }).catch((error) => { if (error.status === 404) return null; throw error; });
    if (!parent) break;
    known.set(parent.id, parent);
    root = parent;
  }
  await descend(root, session, known, root.id, box, signal);
}

/** Forks are younger than their root, and ids sort by age, so only the sessions after the root are read. */
async function descend(root, session, known, after, box, signal) {
  let next = after;
  let hasMore = true;
  for (let pages = 0; hasMore && pages < PAGES_AT_ONCE; pages += 1) {
    const page = await api.get(query("v1/sessions", { order: "asc", after: next, limit: 100 }), { signal });
    for (const one of page.data) if (known.has(one.forked_from)) known.set(one.id, one);
    hasMore = page.has_more;
    next = page.last_id;
  }
  const more = hasMore ? h("button", { class: "link small", type: "button", on: { click: () => descend(root, session, known, next, box, signal) } }, "Look among newer sessions") : null;
  const alone = known.size === 1 ? h("p", { class: "muted small" }, "This session has no forks.") : h("p", { class: "muted small" }, many(known.size, "session"));
  box.replaceChildren(...[known.size === 1 ? null : h("ul", {}, branch(root, session, [...known.values()])), alone, more].filter(Boolean));
}

function branch(one, here, all) {
  const forks = all.filter((other) => other.forked_from === one.id && other !== one);
  const label = h("code", {}, `…${one.id.slice(-8)}`);
  return h("li", {},
    h("span", { class: "row" },
      one.id === here.id ? h("span", { class: "here", "aria-current": "true" }, label) : h("a", { href: `#/sessions/${encodeURIComponent(one.id)}` }, label),
      chip(one.status), h("span", { class: "small muted" }, foreign(one.model.name), " ", ago(one.updated_at))),
    forks.length ? h("ul", {}, forks.map((fork) => branch(fork, here, all))) : null);
}
