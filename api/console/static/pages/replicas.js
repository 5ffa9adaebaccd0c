// The engines: their state, their load, their memory, and drain.

import { foreign, h, plain, put } from "../dom.js";
import { count, percent, short } from "../format.js";
import { api, at } from "../http.js";
import { live } from "../live.js";
import { card, chip, confirm, errorBox, facts, meter, pageHead } from "../parts.js";
import { forChanges } from "./rights.js";

export async function showReplicas({ signal }) {
  const box = h("div", { class: "thirds" }, h("p", { class: "muted" }, "Loading…"));
  const round = live({
    signal, every: 2, load: () => api.get("v1/admin/replicas", { signal }),
    show: ({ data }) => put(box, data.length ? data.map((replica) => engine(replica, () => round())) : h("p", { class: "muted" }, "There is no engine.")),
    failed: (error) => { if (!box.querySelector(".card")) put(box, errorBox(error)); },
  });
  return h("div", { class: "stack" }, pageHead("Engines"), box);
}

function engine(replica, refresh) {
  const drain = h("button", { type: "button", disabled: replica.status !== "ready", "aria-label": `Drain ${plain(replica.id)}`, on: { click: async () => {
    const done = await confirm(`Drain ${plain(replica.id)}?`, "It gets no new requests. Its running ones end there, or go on at another engine.", { button: "Drain", send: () => api.post(at`v1/admin/replicas/${replica.id}/drain`) });
    if (done) refresh();
  } } }, "Drain");
  return card(h("span", { class: "row" }, foreign(replica.id), chip(replica.status)), [
    replica.reason ? h("p", { class: "notice" }, foreign(replica.reason)) : null,
    facts([
      ["Address", foreign(replica.address)], ["Epoch", replica.epoch], ["Generation", replica.generation], ["Version", replica.version || null],
      ["Running", known(replica.running_requests)], ["Waiting", known(replica.waiting_requests)],
      ["KV on the device", pages(replica.device_pages)], ["KV on the host", replica.host_pages && `${short(replica.host_pages.cached)} pages, ${short(replica.host_pages.free)} free`],
      ["KV on disk", replica.disk_pages === undefined ? null : `${short(replica.disk_pages)} pages`],
      ["Adapters", replica.resident_adapters && `${count(replica.resident_adapters.length)} on the device, ${count(replica.max_adapters_in_a_step)} at most in a step`],
      ["Tokens", known(replica.generated_tokens)], ["Preemptions", known(replica.preemptions)],
    ]),
  ], { actions: forChanges(drain) });
}

function known(value) {
  return value === undefined ? null : count(value);
}

function pages(found) {
  if (!found) return null;
  const all = found.free + found.cached + found.active;
  const used = all ? found.active / all : 0;
  return h("div", { class: "stack", data: { pages: all } }, meter(used, "Pages in use"), h("span", { class: "small muted" }, `${percent(used)} in use, ${short(found.cached)} cached, ${short(found.free)} free`));
}

