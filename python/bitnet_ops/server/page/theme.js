// The chosen theme, before anything is painted; "system" leaves it to the browser.
try {
  const theme = localStorage.getItem("bitnet-ops-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // A browser that keeps nothing follows the system.
}
