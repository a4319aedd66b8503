"use strict";
// This script runs before the first paint, so that pages do not flash in the wrong colour scheme.
(() => {
  let kept = null;
  try { kept = localStorage.getItem("tula-scheme"); } catch { /* storage is disabled, so follow the system */ }
  if (kept === "dark" || kept === "light") document.documentElement.dataset.scheme = kept;
})();
