"use strict";
// Charts and live updates; forms.js contains the what-if and access forms. Without scripts, pages show all other content.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

function debounced(work, wait_ms) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), wait_ms); };
}

const number = (value, digits = 3) => value.toLocaleString("en", { maximumSignificantDigits: digits });

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: { Accept: "application/json" }, ...options });
  if (answer.status === 401) {
    if ($("textarea")) throw new Error("You are signed out: sign in on another page, then submit this form again.");
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    throw new Error("You are signed out.");
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    const message = problem.detail || `The service returned status ${answer.status}: try again.`;
    throw Object.assign(new Error(message), { fields: problem.errors || [] });
  }
  if (answer.status === 204) return null;
  return answer.headers.get("Content-Type").startsWith("text/html") ? answer.text() : answer.json();
}

// Colour scheme: automatic, dark, light

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.scheme || (systemDark.matches ? "dark" : "light")) === "dark";

function nextScheme() {
  const order = [undefined, "dark", "light"];
  const next = order[(order.indexOf(document.documentElement.dataset.scheme) + 1) % 3];
  if (next) document.documentElement.dataset.scheme = next;
  else delete document.documentElement.dataset.scheme;
  try { next ? localStorage.setItem("tula-scheme", next) : localStorage.removeItem("tula-scheme"); } catch { /* storage is disabled, so the choice is not kept */ }
  nameScheme();
  redrawAll();
}

function nameScheme() {
  $("#theme").setAttribute("aria-label", `Colour scheme: ${document.documentElement.dataset.scheme || "automatic"}`);
}

// Charts: each is a specification from the service, adapted to the page's style

function fitLegends(part, width) {
  if (!part || typeof part !== "object") return;
  // The service chooses the number of columns for a chart that is about 520 pixels wide.
  if (part.legend && part.legend.columns) part.legend.columns = Math.max(1, Math.min(part.legend.columns, Math.floor(part.legend.columns * width / 520 + 0.25)));
  for (const [key, inner] of Object.entries(part)) if (key !== "datasets") fitLegends(inner, width);
}

function dressed(spec, width) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), muted = style.getPropertyValue("--muted").trim();
  const line = style.getPropertyValue("--line").trim(), ground = style.getPropertyValue("--ground").trim();
  const page = structuredClone(spec);
  delete page.title;
  page.background = "transparent";
  page.config = {
    ...page.config,
    aria: false,  // screen readers read the figure's text instead of the drawing, so marks need no descriptions
    font: "system-ui, sans-serif",
    axis: { ...page.config.axis, labelColor: muted, titleColor: muted, gridColor: line, domainColor: line, tickColor: line, labelLimit: width < 480 ? 130 : 260, titleFontWeight: 500 },
    legend: { labelColor: ink, titleColor: muted },
    style: { ...page.config.style, halo: { ...page.config.style?.halo, fill: ground, stroke: ground } },
    text: { color: ink },
    rule: { color: muted },
  };
  fitLegends(page, width);
  if (page.vconcat) for (const part of page.vconcat) part.width = Math.max(160, width - 70);
  else { page.width = width; page.autosize = { type: "fit-x", contains: "padding" }; }
  return page;
}

const drawn = new Map();
// This script runs before Vega's script, so that the first chart is requested while the browser loads Vega.
const vegaRead = new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve));

function shapeOf(spec, width) {
  return JSON.stringify([{ ...spec, datasets: Object.keys(spec.datasets || {}), title: 0, description: 0 }, width, isDark()]);
}

async function draw(figure) {
  await vegaRead;
  const box = $(".canvas", figure), known = drawn.get(figure);
  if (!known || !known.spec) return;
  const { spec } = known;
  $(".subtitle", figure).textContent = spec.title?.subtitle || "";
  if (spec.usermeta?.empty) {
    known.view?.finalize();
    known.view = null;
    figure.classList.add("none");
    box.removeAttribute("role");  // a screen reader skips text and buttons inside an image
    box.replaceChildren(element("p", spec.usermeta.message, { class: "waiting" }));
    return;
  }
  figure.classList.remove("none");
  box.setAttribute("role", "img");
  const shape = shapeOf(spec, box.clientWidth);
  if (known.view && known.shape === shape && box.contains(known.view.container())) {
    // Only numbers have changed. Updating them causes no flicker and takes half as long as drawing the chart again.
    for (const [name, rows] of Object.entries(spec.datasets)) if (known.names.has(name)) known.view.data(name, rows);
    await known.view.runAsync();
  } else {
    known.view?.finalize();
    known.view = null;
    const holder = element("div");
    box.replaceChildren(holder);
    // With ast, expressions are interpreted, so that the page's security policy can forbid eval.
    const renderer = spec.usermeta?.renderer || "svg";
    const made = await vegaEmbed(holder, dressed(spec, box.clientWidth), { actions: false, ast: true, renderer, defaultStyle: false, logLevel: 1 });
    known.view = made.view;
    known.shape = shape;
    known.names = new Set(made.vgSpec.data.map((each) => each.name));
    if ("zoom" in figure.dataset) { watchBrush(figure, made.view); watchPointer(figure, made.view); }
    if ("pick" in figure.dataset) made.view.addEventListener("click", (_event, item) => pick(figure, item?.datum));
  }
  $(".marks", box)?.setAttribute("aria-hidden", "true");
  if ("pick" in figure.dataset) listPicks(figure, spec.datasets.candidates);
  figure.dataset.drawn = String(Number(figure.dataset.drawn || 0) + 1);
  if ("zoom" in figure.dataset) showValues(figure, null);
}

// Saving a chart: it is drawn again on a white background, since the file has no page behind it

async function save(button) {
  const figure = button.closest("figure"), kind = button.dataset.save, spec = drawn.get(figure)?.spec;
  if (!spec || spec.usermeta?.empty) return;
  await vegaRead;
  const { view } = await vegaEmbed(element("div"), { ...spec, background: "white", padding: 12 }, { actions: false, ast: true });
  const link = element("a", "", { href: await view.toImageURL(kind, 2), download: `${$("h3", figure).textContent}.${kind}` });
  view.finalize();
  link.click();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-save]");
  if (button) save(button);
});

// Choosing a point of the frontier, with the pointer or from the list, fills the what-if form

function pick(figure, row) {
  if (row?.asks) figure.dispatchEvent(new CustomEvent("pick", { bubbles: true, detail: row.asks }));
}

function listPicks(figure, rows) {
  const list = $(".pick select", figure), at = list.selectedIndex, named = rows.filter((row) => row.crossed).sort((a, b) => a.y - b.y);
  list.replaceChildren(new Option("choose a point on the frontier…"), ...named.map((row) => new Option([row.name, row.configuration, row.time.split(" (")[0], row.cost.split(" (")[0]].filter(Boolean).join(", "))));
  list.disabled = !named.length;
  list.selectedIndex = Math.max(0, at);
  list.onchange = () => pick(figure, named[list.selectedIndex - 1]);
}

async function load(figure) {
  const box = $(".canvas", figure), known = drawn.get(figure) || {};
  drawn.set(figure, known);
  const address = new URL(figure.dataset.chart, location.href);
  if ("zoom" in figure.dataset) {
    for (const [name, value] of Object.entries(wanted)) address.searchParams.set(name, value);
    // Request only as many points as can be seen. Peaks and dips are kept, and a phone loads less.
    address.searchParams.set("max_points", String(Math.min(1200, Math.max(300, 2 * Math.round(box.clientWidth)))));
  }
  known.turn = (known.turn || 0) + 1;
  const turn = known.turn;
  box.setAttribute("aria-busy", "true");
  try {
    const spec = await ask(address);
    if (turn !== known.turn) return;
    known.spec = spec;
    await draw(figure);
  } catch (error) {
    if (turn !== known.turn) return;
    const again = element("button", "Try again", { type: "button", class: "quiet" });
    again.addEventListener("click", () => load(figure));
    const failed = element("div", error.message, { class: "failed", role: "alert" });
    failed.append(again);
    box.removeAttribute("role");
    box.replaceChildren(failed);
  } finally {
    box.removeAttribute("aria-busy");
  }
}

// Steps, rank, smoothing and scale apply to all charts of a run, and are kept in the page's address

const VIEW = ["first_step", "last_step", "rank", "trend", "logarithmic"];
let wanted = {};

function show(asked) {
  const before = JSON.stringify(wanted);
  wanted = Object.fromEntries(Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const form = $("#zoom"), address = new URL(location.href);
  for (const name of VIEW) {
    form.elements[name].value = wanted[name] ?? "";
    if (name in wanted) address.searchParams.set(name, wanted[name]);
    else address.searchParams.delete(name);
  }
  history.replaceState(null, "", address);
  $("[type=reset]", form).hidden = !("first_step" in wanted || "last_step" in wanted);
  for (const [figure, known] of drawn) {
    if (JSON.stringify(wanted) !== before) known.shape = null;  // forces a new drawing, which removes the brush
    load(figure);
  }
}

function startZoom() {
  const form = $("#zoom");
  if (!form) return;
  const asked = new URLSearchParams(location.search);
  show(Object.fromEntries(VIEW.map((name) => [name, asked.get(name)])));
  form.addEventListener("submit", (event) => { event.preventDefault(); show(Object.fromEntries(new FormData(form))); });
  form.addEventListener("change", (event) => { if (event.target.matches("select")) form.requestSubmit(); });
  form.addEventListener("reset", (event) => { event.preventDefault(); show({ ...wanted, first_step: "", last_step: "" }); });
}

// Each chart of the run shows its values at the step under the pointer, or else its last values

function showValues(figure, step) {
  const known = drawn.get(figure), readout = $(".readout", figure);
  if (!known?.spec?.usermeta?.readout || !known.view) { readout.textContent = ""; return; }
  const found = known.spec.usermeta.readout.map(({ column, name, unit }) => {
    const rows = known.spec.datasets[column];
    let low = 0, high = rows.length - 1;
    while (step !== null && low < high) { const middle = (low + high) >> 1; if (rows[middle].step < step) low = middle + 1; else high = middle; }
    if (step === null) low = high;
    if (low > 0 && step !== null && step - rows[low - 1].step < rows[low].step - step) low -= 1;
    return { at: rows[low].step, text: `${name} ${number(rows[low].value, 4)}${unit && ` ${unit}`}` };
  });
  // Columns may end at different steps, so each value that is older than the last one is shown with its step.
  const at = step === null ? Math.max(...found.map((each) => each.at)) : found.at(-1).at;
  const values = found.map((each) => each.text + (step === null && each.at < at ? ` (step ${each.at.toLocaleString("en")})` : ""));
  readout.textContent = `${step === null ? "Last" : "At"} step ${at.toLocaleString("en")}: ${values.join(", ")}`;
}

function watchPointer(figure, view) {
  const box = $(".canvas", figure);
  const everywhere = (step) => { for (const [each, known] of drawn) if (known.view && "zoom" in each.dataset) showValues(each, step); };
  view.addEventListener("pointermove", (event, item) => {
    let x = event.clientX - $("svg", box).getBoundingClientRect().left - view.origin()[0];
    for (let at = item; at; at = at.mark?.group) if (at.items) x -= at.x || 0;
    let scale = null;
    try { scale = view.scale("x"); } catch { scale = view.scale("concat_0_x"); }
    everywhere(Math.max(0, Math.round(scale.invert(x))));
  });
  box.onpointerleave = () => everywhere(null);
}

function watchBrush(figure, view) {
  let chosen = null;
  const read = (_name, value) => { chosen = value?.step || null; };
  try { view.addSignalListener("brush", read); } catch { return; }
  // Vega sends the last movement only after the button was released.
  $(".canvas", figure).onpointerup = () => setTimeout(() => {
    if (!chosen || !(chosen[1] - chosen[0] >= 1)) return;
    show({ ...wanted, first_step: Math.max(0, Math.floor(chosen[0])), last_step: Math.ceil(chosen[1]) });
    chosen = null;
  }, 80);
}

// Charts are requested one after another, since the service computes one at a time; otherwise all would arrive late.
let loading = Promise.resolve();

const seen = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    seen.unobserve(target);
    loading = loading.then(() => load(target));
  }
}, { rootMargin: "300px" });

function startCharts() {
  const [first, ...others] = $$("[data-chart]");
  if (first) loading = load(first);  // does not wait until it is visible, which the browser can tell only after loading Vega
  for (const figure of others) seen.observe(figure);
  let width = innerWidth;
  addEventListener("resize", debounced(() => { if (innerWidth !== width) { width = innerWidth; redrawAll(); } }, 200));
  systemDark.addEventListener("change", redrawAll);
}

function redrawAll() { for (const figure of drawn.keys()) draw(figure); }

// Live updates: when the event stream reports a change, the page is requested again and its changed parts are replaced

const served = new Map();

let rounds = 0, newestRound = 0;

const refreshParts = debounced(async () => {
  const mine = ++rounds;
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } }).catch(() => null);
  if (!answer?.ok || answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  if (mine < newestRound) return;  // responses may arrive out of order
  newestRound = mine;
  for (const part of $$("[data-live]")) {
    const name = part.dataset.live, replacement = $(`[data-live="${name}"]`, fresh);
    if (!replacement || replacement.innerHTML === served.get(name)) continue;
    served.set(name, replacement.innerHTML);
    // Opened details, checked boxes and the keyboard focus are preserved.
    const open = $$("details[open]", part).map((each) => each.dataset.kept), at = document.activeElement;
    const nameOf = (node) => node.getAttribute("href") || node.value;
    const held = part.contains(at) ? nameOf(at) : null, chosen = $$("input:checked", part).map((each) => each.value);
    part.replaceChildren(...replacement.childNodes);
    for (const each of $$("details", part)) each.open = open.includes(each.dataset.kept);
    for (const each of $$("input", part)) each.checked = chosen.includes(each.value);
    if (held) $$("a, input", part).find((each) => nameOf(each) === held)?.focus({ preventScroll: true });
  }
  // Add the charts of metrics that were first logged after the page was opened.
  const known = new Set($$("[data-chart]").map((figure) => figure.dataset.chart));
  for (const figure of $$("[data-zoom]", fresh)) if (!known.has(figure.dataset.chart)) { $(".charts").append(figure); seen.observe(figure); }
  localTimes();
}, 400);

const refreshCharts = (() => {
  let last = 0, timer = 0;
  return () => {
    // Refresh at most once every two seconds, and always after the last event.
    clearTimeout(timer);
    timer = setTimeout(() => { last = Date.now(); for (const figure of drawn.keys()) load(figure); }, Math.max(300, 2000 - (Date.now() - last)));
  };
})();

function listen() {
  const { events, run, refresh } = document.body.dataset;
  if (!events && !refresh) return;
  for (const part of $$("[data-live]")) served.set(part.dataset.live, part.innerHTML);
  // A list is polled, since a stream for each row would need a connection for each.
  if (refresh) setInterval(() => { if (!document.hidden) refreshParts(); }, Number(refresh) * 1000);
  const live = $("#live");
  const say = (text, lost) => { live.hidden = false; live.textContent = text; live.classList.toggle("lost", lost); };
  // The browser reconnects and sends Last-Event-ID. If it gives up because of an HTTP error, a new stream is opened.
  let source = null, newest = "", wait_ms = 2000, timer = 0;
  const close = () => { clearTimeout(timer); source?.close(); source = null; };
  const open = () => {
    close();
    source = new EventSource(newest ? `${events}?after=${newest}` : events);
    source.onopen = () => { wait_ms = 2000; if (live.classList.contains("lost")) { refreshParts(); refreshCharts(); } say("live", false); };
    source.onerror = () => {
      say("reconnecting…", true);
      if (source.readyState === EventSource.CLOSED) { timer = setTimeout(open, wait_ms); wait_ms = Math.min(30000, wait_ms * 2); }
    };
    for (const kind of ["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]) {
      source.addEventListener(kind, (event) => {
        newest = event.lastEventId || newest;
        const data = JSON.parse(event.data);
        if (run && data.run_id && data.run_id !== run) return;
        refreshParts();
        if (run || kind === "recommendation" || kind === "run") refreshCharts();
      });
    }
  };
  // Only a visible page keeps a stream open, since a browser opens at most six connections to a host, and background
  // tabs would use all of them. A page that becomes visible again resumes after its last event.
  const attend = () => {
    if (document.hidden) { if (events) close(); return; }
    refreshParts();
    refreshCharts();
    if (events) open();
  };
  document.addEventListener("visibilitychange", attend);
  addEventListener("pageshow", (event) => { if (event.persisted) attend(); });
  addEventListener("pagehide", close);
  if (events && !document.hidden) open();
}

function localTimes() {
  for (const time of $$("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.textContent = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  }
}

$("#theme").addEventListener("click", nextScheme);
nameScheme();
startZoom();
listen();
localTimes();
startCharts();
