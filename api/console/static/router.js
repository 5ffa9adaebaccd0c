// Shows the page that the address names after `#`. Each page gets a signal that aborts when the next page is shown.
// A page that the server could not load, because it was away, is loaded again until it comes.

import { h, plain, put, say } from "./dom.js";
import { ApiError } from "./http.js";
import { pause } from "./live.js";
import { errorBox } from "./parts.js";

/** Starts the router. `routes`: {pattern, title, show}. `show(context)` returns the page's elements, or a promise. */
export function startRouter(main, routes, onShown) {
  let leaving = new AbortController();
  let failures = 0;

  /** Shows the page anew when the server may be back. */
  function retry(error, signal) {
    failures += 1;
    const timer = setTimeout(go, 1000 * pause(failures, error));
    signal.addEventListener("abort", () => clearTimeout(timer));
  }

  async function go() {
    leaving.abort();
    leaving = new AbortController();
    const { signal } = leaving;
    const [path, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
    const found = match(routes, path);
    onShown(path.split("/")[0]);
    const context = { main, signal, params: found.params, query: new URLSearchParams(search), refresh: go };
    let content;
    try {
      content = await found.route.show(context);
      failures = 0;
    } catch (error) {
      if (signal.aborted || error.name === "AbortError") return;
      if (!(error instanceof ApiError)) console.error(error);
      content = failure(error, go);
      if (error.isAway) retry(error, signal);
    }
    if (signal.aborted) return;
    if (content !== undefined) put(main, content);
    announce(main, found.route.title);
  }

  window.addEventListener("hashchange", go);
  go();
  return go;
}

function match(routes, path) {
  for (const route of routes) {
    const found = route.pattern.exec(path);
    if (found) return { route, params: found.slice(1).map(decodeURIComponent) };
  }
  return { route: { title: "Not found", show: () => notFound() }, params: [] };
}

function notFound() {
  return h("div", { class: "stack" }, h("h1", { tabindex: -1 }, "There is no such page"), h("p", {}, h("a", { href: "#/" }, "Go to the first page")));
}

function failure(error, again) {
  return h("div", { class: "stack" },
    h("h1", { tabindex: -1 }, error.status === 404 ? "Not found" : "This page cannot be shown"),
    errorBox(error),
    h("p", {}, h("button", { on: { click: again } }, "Try again")));
}

function announce(main, title) {
  const heading = main.querySelector("h1");
  document.title = `${plain(heading?.textContent ?? title)} · Graftwork`;
  if (document.activeElement === document.body || document.activeElement?.closest("nav") || !document.activeElement) heading?.focus({ preventScroll: true });
  window.scrollTo(0, 0);
  say(document.title);
}
