"use strict";
// Runs before the first paint, so that no page flashes in the other scheme.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("tula-scheme"); } catch { /* storage is off: follow the system */ }
  if (kept === "dark" || kept === "light") document.documentElement.dataset.scheme = kept;
})();
