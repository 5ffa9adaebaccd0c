// The upload of an adapter, with its progress and the tensor that the server refuses.

import { foreign, h, plain, say } from "../../dom.js";
import { bytes, percent } from "../../format.js";
import { at, client, upload } from "../../http.js";
import { card, check, field, form, pageHead } from "../../parts.js";
import { hrefOf } from "./targets.js";

export function showUpload({ query: given, signal }) {
  const known = given.get("name");
  const name = h("input", { required: true, value: known ?? "", disabled: known !== null, autocomplete: "off", spellcheck: "false" });
  const config = h("input", { type: "file", accept: ".json,application/json", required: true });
  const weights = h("input", { type: "file", accept: ".safetensors", required: true });
  const promoted = check("Requests for the plain name get this version", { checked: true });
  const origin = [
    ["run", h("input", { maxlength: 200, autocomplete: "off" })],
    ["parent", h("input", { maxlength: 80, autocomplete: "off", placeholder: known ? `${plain(known)}@1` : "support@3" })],
    ["data_digest", h("input", { pattern: "sha256:[0-9a-f]{64}", autocomplete: "off", placeholder: "sha256:…", title: "sha256: and 64 hexadecimal digits" })],
  ];
  const more = h("details", {}, h("summary", {}, "Where it comes from"), h("div", { class: "stack" },
    field("Training run", origin[0][1], "An id or an address."), field("Parent version", origin[1][1]), field("Digest of the data", origin[2][1])));
  const bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Upload" });
  const note = h("span", { class: "small muted", role: "status" });
  const drop = h("p", { class: "drop muted", on: { dragover: (event) => event.preventDefault(), drop: take } }, "Drop adapter_config.json and adapter_model.safetensors here, or choose them:");

  function take(event) {
    event.preventDefault();
    for (const file of event.dataTransfer.files) {
      const list = new DataTransfer();
      list.items.add(file);
      (file.name.endsWith(".json") ? config : weights).files = list.files;
    }
  }

  async function send() {
    const body = new FormData();
    if (known === null) body.append("name", name.value.trim());
    else body.append("name", known);
    body.append("config", config.files[0]);
    body.append("weights", weights.files[0]);
    if (!promoted.box.checked) body.append("promote", "false");
    for (const [part, input] of origin) if (input.value.trim()) body.append(part, input.value.trim());
    bar.hidden = false;
    bar.value = 0;
    const onProgress = (share) => {
      bar.value = share;
      note.textContent = share < 1 ? `${percent(share)} of ${bytes(weights.files[0].size)} sent` : "The server checks the tensors…";
    };
    try {
      return await sent(body, onProgress);
    } finally {
      bar.hidden = true;
      note.textContent = "";
    }
  }

  /** Sends the files, and once more after a new sign-in if the old one has ended. */
  async function sent(files, onProgress) {
    const path = known === null ? "v1/adapters" : at`v1/adapters/${known}/versions`;
    for (;;) {
      try {
        return await upload(path, files, { signal, onProgress });
      } catch (error) {
        if (error.status !== 401) throw error;
        await client.onSignedOut(error);
      }
    }
  }

  const body = form({
    fields: [field("Name", name, "An adapter that has this name gets a new version."), drop, field("adapter_config.json", config), field("adapter_model.safetensors", weights), promoted.row, more, bar, note],
    button: "Upload", send,
    done: (adapter) => { say("Uploaded"); location.hash = hrefOf(adapter.name); },
  });
  return h("div", { class: "stack narrow" }, pageHead(known ? h("span", {}, "New version of ", foreign(known)) : "Upload an adapter", { crumbs: [["Adapters", "#/adapters"]] }), card("Files", body),
    h("p", { class: "muted small" }, "The server checks every tensor against the base model. If it refuses one, the message names it, and nothing is stored."));
}
