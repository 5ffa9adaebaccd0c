// Who is signed in, and what happens when the sign-in ends: a dialog over the page, which keeps all that was typed.
// Somebody signs in with a key, or as a person with the identity provider, which is another site: the browser goes there.

import { foreign, h, put } from "./dom.js";
import { ApiError, api, client } from "./http.js";
import { errorBox, field, uid } from "./parts.js";

const RENEW_EVERY_S = 300;
/** What an operator is called whose role changes nothing. */
export const READER = "Operator, read only";

export const identity = {
  current: null,
  get isAdmin() { return this.current?.role === "admin"; },
  /** Whether an operator may change anything. The role `operator-readonly` only reads, and the server refuses the rest. */
  get mayChange() { return this.current?.may_change ?? false; },
  /** Whether this is a person with the role tenant-admin in the tenant in which they act. No key may do what they may. */
  get managesTenant() { return manages(this.current ?? {}); },
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

function manages({ person, tenant, tenants }) {
  return Boolean(person && tenant) && tenants.some((one) => one.id === tenant.id && one.role === "tenant-admin");
}

/** Everything by which the frame and the pages are chosen. If it differs after a sign-in, the page begins anew. */
function who(session) {
  const scopes = [...session.tenant?.scopes ?? []].sort();
  return JSON.stringify([session.role, session.tenant?.id, session.may_change, session.person?.id, manages(session), scopes]);
}

/** What a person may act as: [{id, label}], where the operator has no id. Empty for a key. */
export function seats() {
  const { person, operator_role: role, tenants } = identity.current;
  if (!person) return [];
  return [...role ? [{ id: "", label: role === "operator" ? "Operator" : READER }] : [], ...tenants.map((one) => ({ id: one.id, label: one.name }))];
}

/** Acts as an operator, for an empty id, or in another tenant. The page begins anew. */
export async function changeSeat(id) {
  await api.put("console/session/seat", { tenant_id: id || null });
  location.hash = "#/";
  location.reload();
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
    const withProvider = h("div", {});
    const form = h("form", { on: { submit: onSubmit } },
      h("h2", { id: title, class: "brand" }, had ? "Sign in again" : "Graftwork console"),
      h("p", { class: "muted" }, had ? reason(error) : "Use the admin key, or a tenant's key. You see what that key may see."),
      withProvider,
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

    async function onReturn() {
      put(place);
      try {
        if (!take(await call("GET"))) return void location.reload();
        box.close("in");
      } catch (failure) {
        put(place, errorBox(failure));
      }
    }

    box.append(form);
    if (!had) put(place, failedSignIn());
    offerProvider(withProvider, had, onReturn);
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

/** Shows the way to the identity provider, if the server has one. Over a page, it opens beside it: the page stays. */
async function offerProvider(place, had, onReturn) {
  let provider = null;
  try {
    const answer = await fetch("console/sign-in/provider", { cache: "no-store", credentials: "same-origin" });
    provider = (await answer.json()).provider;
  } catch { /* keys still work */ }
  if (!provider) return;
  const words = h("span", {}, "Sign in with ", foreign(provider.name));
  put(place,
    had ? h("p", { class: "actions" },
      h("a", { class: "button", href: "console/sign-in", target: "_blank", rel: "noopener", id: "sign-in-with" }, words),
      h("button", { type: "button", on: { click: onReturn } }, "I have signed in"))
      : h("p", { class: "actions" }, h("a", { class: "button", href: "console/sign-in", id: "sign-in-with" }, words)),
    h("p", { class: "muted" }, "Or use a key:"));
}

const FAILURES = {
  sign_in_denied: "The identity provider has refused the sign-in, or you have.",
  sign_in_state: "This sign-in was not begun in this browser, or took too long. Begin again.",
  sign_in_used: "This sign-in was used before. Begin again.",
  no_role: "You have signed in, but have no role here. Ask the operator for one.",
  person_suspended: "You are suspended. Ask the operator.",
  oidc_provider_away: "The identity provider does not answer. Try again in a moment.",
  no_oidc_provider: "This server has no identity provider. Use a key.",
};

/** Returns what went wrong with a sign-in that has just come back, and cleans the address; null without one. */
function failedSignIn() {
  const asked = new URLSearchParams(location.search);
  const code = asked.get("sign_in");
  if (code === null) return null;
  const person = /^per_[0-9a-z]{1,40}$/.exec(asked.get("person") ?? "");
  history.replaceState(null, "", location.pathname + location.hash);
  const text = Object.hasOwn(FAILURES, code) ? FAILURES[code] : "The sign-in has failed. Begin again; the server's log has the reason.";
  return h("p", { class: "error", role: "alert" }, text, person ? [" Your id is ", h("code", {}, person[0]), "."] : null);
}

function reason(error) {
  if (error?.code === "access_ended") return "Your role here was taken back, or you are suspended. The page behind this keeps what you have typed.";
  const text = error?.code === "console_session_expired" ? "Your sign-in has ended." : "The key of this sign-in no longer works.";
  return `${text} The page behind this keeps what you have typed.`;
}
