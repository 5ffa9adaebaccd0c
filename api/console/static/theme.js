// Sets the theme before the first paint: the chosen one, or else the system's, also when that changes.
(() => {
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    const chosen = localStorage.getItem("graftwork-theme");
    const isChosen = chosen === "light" || chosen === "dark";
    document.documentElement.dataset.theme = isChosen ? chosen : system.matches ? "dark" : "light";
  };
  system.addEventListener("change", apply);
  apply();
})();
