// Who is signed in, and what happens when the sign-in ends: a dialog over the page, which keeps all that was typed.

import { h, put } from "./dom.js";
import { ApiError, client } from "./http.js";
import { errorBox, field, uid } from "./parts.js";

const RENEW_EVERY_S = 300;

export const identity = {
  current: null,
  get isAdmin() { return this.current?.role === "admin"; },
  can(scope) { return this.current?.tenant?.scopes.includes(scope) ?? false; },
};

let asking = null;
let isActive = true;

async function call(method, headers = {}) {
  const sent = { ...headers };
  if (method !== "GET") sent["x-graftwork-csrf"] = client.csrf;
  let answer;
  try {
    answer = await fetch("console/session", { method, headers: sent, cache: "no-store", credentials: "same-origin" });
  } catch {
    throw new ApiError(0, { message: "The server does not answer. Try again in a moment." });
  }
  if (answer.status === 204) return null;
  const body = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new ApiError(answer.status, body.error ?? {}, answer.headers);
  return body;
}

function take(session) {
  const before = identity.current;
  identity.current = session;
  client.csrf = session.csrf_token;
  return before === null || who(before) === who(session);
}

function who(session) {
  return `${session.role} ${session.tenant?.id ?? ""}`;
}

/** Finds the present sign-in, or asks for a key. */
export async function begin() {
  try {
    take(await call("GET"));
  } catch (error) {
    if (error.status !== 401 && error.status !== 403 && error.status !== 0) throw error;
    await askForKey(null);
  }
  document.addEventListener("pointerdown", () => { isActive = true; });
  document.addEventListener("keydown", () => { isActive = true; });
  setInterval(renew, RENEW_EVERY_S * 1000);
}

async function renew() {
  if (!isActive || asking || document.hidden) return;
  isActive = false;
  try {
    take(await call("POST"));
  } catch { /* the next request asks for a key if it must */ }
}

client.onSignedOut = async (error) => {
  asking ??= askForKey(error).finally(() => { asking = null; });
  await asking;
};

client.onForged = async () => {
  const session = await call("GET").catch(() => null);
  if (session === null) return false;
  if (!take(session)) location.reload();
  return true;
};

export async function signOut() {
  await call("DELETE").catch(() => {});
  location.hash = "#/";
  location.reload();
}

function askForKey(error) {
  return new Promise((resolve) => {
    const had = identity.current;
    const title = uid("sign-in");
    const input = h("input", { type: "password", autocomplete: "current-password", spellcheck: "false", required: true, name: "key" });
    const place = h("div", { "aria-live": "assertive" });
    const button = h("button", { class: "primary", type: "submit" }, "Sign in");
    const box = h("dialog", { class: had ? "sign-in" : "sign-in first", "aria-labelledby": title });
    const form = h("form", { on: { submit: onSubmit } },
      h("h2", { id: title, class: "brand" }, had ? "Sign in again" : "Graftwork console"),
      h("p", { class: "muted" }, had ? reason(error) : "Use the admin key, or a tenant's key. You see what that key may see."),
      field("Key", input, had ? "" : "The browser keeps a cookie that ends with the key, and never the key itself."),
      place, h("div", { class: "actions" }, button));

    async function onSubmit(event) {
      event.preventDefault();
      const key = input.value.trim();
      if (!key) return;
      button.disabled = true;
      put(place);
      try {
        const isSame = take(await call("POST", { authorization: `Bearer ${key}` }));
        if (!isSame) return void location.reload();
        input.value = "";
        box.close("in");
      } catch (failure) {
        put(place, errorBox(failure));
        input.setAttribute("aria-invalid", "true");
        input.focus();
      } finally {
        button.disabled = false;
      }
    }

    box.append(form);
    box.addEventListener("cancel", (event) => event.preventDefault());
    box.addEventListener("close", () => {
      if (box.returnValue !== "in") return box.showModal();
      box.remove();
      return resolve();
    });
    document.body.append(box);
    box.showModal();
  });
}

function reason(error) {
  const text = error?.code === "console_session_expired" ? "Your sign-in has ended." : "The key of this sign-in no longer works.";
  return `${text} The page behind this keeps what you have typed.`;
}
