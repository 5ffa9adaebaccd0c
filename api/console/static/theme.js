// Sets the chosen theme before the first paint. Without a choice, the system's theme holds.
(() => {
  const chosen = localStorage.getItem("graftwork-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
