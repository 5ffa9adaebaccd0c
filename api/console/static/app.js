// Starts the console: signs in, shows the pages that the key may see, and tells when the server is away.

import { foreign, h, icon, plain, put, say } from "./dom.js";
import { client } from "./http.js";
import { begin, changeSeat, identity, READER, seats, signOut } from "./identity.js";
import { dialog } from "./parts.js";
import { startRouter } from "./router.js";
import { routesFor, sectionsFor } from "./pages.js";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const banner = document.getElementById("banner");
const menu = document.getElementById("menu");

function drawFrame(sections) {
  document.body.classList.remove("signed-out");
  put(document.getElementById("who"), whoActs());
  const out = document.getElementById("sign-out");
  out.hidden = false;
  out.addEventListener("click", signOut);
  put(nav, sections.map(([heading, entries]) => [
    heading ? h("h2", {}, heading) : null,
    h("ul", {}, entries.map(([path, title, image]) => h("li", {}, h("a", { href: `#/${path}`, data: { path } }, icon(image), title)))),
  ]));
}

/** Who is signed in, and as what: a choice for a person who may act as several things. */
function whoActs() {
  const { tenant, person } = identity.current;
  const name = tenant ? foreign(tenant.name) : identity.mayChange ? "Operator" : READER;
  if (!person) return name;
  const choices = seats();
  const told = [foreign(person.name), " "];
  if (choices.length < 2) return [...told, name];
  const choice = h("select", { "aria-label": "Act as", id: "seat" },
    choices.map((one) => h("option", { value: one.id, selected: one.id === (tenant?.id ?? "") }, one.label)));
  choice.addEventListener("change", () => changeSeat(choice.value).catch((error) => {
    choice.value = tenant?.id ?? "";
    say(plain(error.message));
  }));
  return [...told, choice];
}

function mark(path) {
  setMenu(false);
  for (const link of nav.querySelectorAll("a")) {
    if (link.dataset.path === path) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

function setMenu(isOpen) {
  document.body.classList.toggle("menu-open", isOpen);
  menu.setAttribute("aria-expanded", String(isOpen));
}

function drawTheme() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => document.documentElement.dataset.theme === "dark";
  const draw = () => {
    put(button, icon(isDark() ? "sun" : "moon"));
    button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
  };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    localStorage.setItem("graftwork-theme", next);
    draw();
  });
  system.addEventListener("change", draw);
  draw();
}

let isAway = false;
client.onReach = (error) => {
  if (!error && !isAway) return;
  isAway = Boolean(error);
  banner.hidden = !error;
  if (!error) return void say("The server answers again.");
  const text = error.status === 0 ? "The server does not answer. This page tries again by itself." : `${plain(error.message)} This page tries again by itself.`;
  if (banner.textContent !== text) banner.textContent = text;
};

function shortcuts(sections) {
  const pages = sections.flatMap(([, entries]) => entries).map(([path, title, , key]) => [key, title, path]);
  let waitsForPage = 0;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) return;
    if (Date.now() - waitsForPage < 1500) {
      waitsForPage = 0;
      const found = pages.find(([key]) => key === event.key);
      if (found) location.hash = `#/${found[2]}`;
    } else if (event.key === "g") waitsForPage = Date.now();
    else if (event.key === "/") {
      const filter = main.querySelector("[data-filter], input[type=search]");
      if (filter) { event.preventDefault(); filter.focus(); }
    } else if (event.key === "?") showHelp(pages);
    else if (event.key === "t") document.getElementById("theme").click();
  });
  document.getElementById("help").addEventListener("click", () => showHelp(pages));
}

function showHelp(pages) {
  const rows = [["/", "Find in this page's list"], ["t", "Switch between light and dark"], ["?", "Show these keys"], ...pages.map(([key, title]) => [`g ${key}`, title])];
  return dialog("Keys", (close) => h("div", { class: "stack" },
    h("dl", { class: "keys" }, rows.map(([keys, text]) => [h("dt", {}, keys.split(" ").map((key) => [h("kbd", {}, key), " "])), h("dd", {}, text)])),
    h("div", { class: "actions" }, h("button", { class: "primary", on: { click: () => close() } }, "Close"))));
}

async function start() {
  document.body.classList.add("signed-out");
  drawTheme();
  document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
  menu.addEventListener("click", () => setMenu(!document.body.classList.contains("menu-open")));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") setMenu(false); });
  await begin();
  const sections = sectionsFor(identity);
  drawFrame(sections);
  shortcuts(sections);
  startRouter(main, routesFor(identity), mark);
}

start().catch((error) => {
  console.error(error);
  put(main, h("h1", {}, "The console cannot start"), h("p", { class: "error", role: "alert" }, plain(error.message)), h("p", {}, h("button", { on: { click: () => location.reload() } }, "Try again")));
});
