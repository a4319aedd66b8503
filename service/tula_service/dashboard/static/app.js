"use strict";
// Charts, live updates, what-if and access forms. Everything shown without it is in the page already.

const $ = (selector, within = document) => within.querySelector(selector);
const $$ = (selector, within = document) => [...within.querySelectorAll(selector)];

function later(work, wait_ms) {
  let timer = 0;
  return (...given) => { clearTimeout(timer); timer = setTimeout(() => work(...given), wait_ms); };
}

function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

async function ask(path, options = {}) {
  const answer = await fetch(path, { headers: { Accept: "application/json" }, ...options });
  if (answer.status === 401) {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    throw new Error("Signed out.");
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Error(problem.detail || `The service answered ${answer.status}: try again.`);
  }
  return answer.status === 204 ? null : answer.json();
}

// Colour scheme: automatic, dark, light

const systemDark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.scheme || (systemDark.matches ? "dark" : "light")) === "dark";

function nextScheme() {
  const order = [undefined, "dark", "light"];
  const next = order[(order.indexOf(document.documentElement.dataset.scheme) + 1) % 3];
  if (next) document.documentElement.dataset.scheme = next;
  else delete document.documentElement.dataset.scheme;
  try { next ? localStorage.setItem("tula-scheme", next) : localStorage.removeItem("tula-scheme"); } catch { /* not kept */ }
  nameScheme();
  redrawAll();
}

function nameScheme() {
  $("#theme").setAttribute("aria-label", `Colour scheme: ${document.documentElement.dataset.scheme || "automatic"}`);
}

// Charts: one specification from the service, dressed for the page

function narrowLegends(part) {
  if (!part || typeof part !== "object") return;
  if (part.legend && part.legend.columns) part.legend.columns = Math.min(2, part.legend.columns);
  for (const [key, inner] of Object.entries(part)) if (key !== "datasets") narrowLegends(inner);
}

function dressed(spec, width) {
  const style = getComputedStyle(document.documentElement);
  const ink = style.getPropertyValue("--ink").trim(), muted = style.getPropertyValue("--muted").trim();
  const line = style.getPropertyValue("--line").trim();
  const page = structuredClone(spec);
  delete page.title;
  page.background = "transparent";
  page.config = {
    ...page.config,
    font: "system-ui, sans-serif",
    axis: { ...page.config.axis, labelColor: muted, titleColor: muted, gridColor: line, domainColor: line, tickColor: line, labelLimit: width < 480 ? 130 : 260, titleFontWeight: 500 },
    legend: { labelColor: ink, titleColor: muted },
    text: { color: ink },
    rule: { color: muted },
  };
  if (width < 480) narrowLegends(page);
  if (page.vconcat) for (const part of page.vconcat) part.width = Math.max(160, width - 70);
  else { page.width = width; page.autosize = { type: "fit-x", contains: "padding" }; }
  return page;
}

const drawn = new Map();

async function draw(figure) {
  const box = $(".canvas", figure), known = drawn.get(figure);
  if (!known || !known.spec) return;
  const { spec } = known;
  $(".subtitle", figure).textContent = spec.title?.subtitle || "";
  known.view?.finalize();
  known.view = null;
  const steps = $(".zoom", figure);
  if (steps) steps.hidden = Boolean(spec.usermeta?.empty) && !known.zoom;
  if (spec.usermeta?.empty) {
    box.replaceChildren(element("p", spec.usermeta.message, { class: "waiting" }));
    return;
  }
  const holder = element("div");
  box.replaceChildren(holder);
  // ast: expressions are interpreted, so that the page's security policy may forbid eval.
  const made = await vegaEmbed(holder, dressed(spec, box.clientWidth), { actions: false, ast: true, renderer: "svg", defaultStyle: false, logLevel: 1 });
  if ($("svg", holder)) $("svg", holder).setAttribute("aria-hidden", "true");
  known.view = made.view;
  figure.dataset.drawn = String(Number(figure.dataset.drawn || 0) + 1);
  if ("zoom" in figure.dataset) watchBrush(figure, made.view);
}

async function load(figure) {
  const box = $(".canvas", figure), known = drawn.get(figure) || {};
  drawn.set(figure, known);
  const address = new URL(figure.dataset.chart, location.href);
  for (const [name, step] of Object.entries(known.zoom || {})) address.searchParams.set(name, step);
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
    box.replaceChildren(failed);
  } finally {
    box.removeAttribute("aria-busy");
  }
}

function zoomTo(figure, zoom) {
  drawn.get(figure).zoom = zoom;
  const form = $(".zoom", figure);
  for (const name of ["first_step", "last_step"]) form.elements[name].value = zoom?.[name] ?? "";
  $("[type=reset]", form).hidden = !zoom;
  load(figure);
}

function watchBrush(figure, view) {
  let chosen = null;
  const read = (_name, value) => { chosen = value?.step || null; };
  try { view.addSignalListener("brush", read); } catch { return; }
  // Vega tells of the last movement only after the button is up.
  $(".canvas", figure).onpointerup = () => setTimeout(() => {
    if (!chosen || !(chosen[1] - chosen[0] >= 1)) return;
    zoomTo(figure, { first_step: Math.max(0, Math.floor(chosen[0])), last_step: Math.ceil(chosen[1]) });
    chosen = null;
  }, 80);
}

function startCharts() {
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      load(entry.target);
    }
  }, { rootMargin: "300px" });
  for (const figure of $$("[data-chart]")) {
    seen.observe(figure);
    const form = $(".zoom", figure);
    form?.addEventListener("submit", (event) => {
      event.preventDefault();
      const wanted = Object.fromEntries([...new FormData(form)].filter(([, step]) => step !== ""));
      zoomTo(figure, Object.keys(wanted).length ? wanted : null);
    });
    form?.addEventListener("reset", () => zoomTo(figure, null));
  }
  let width = innerWidth;
  addEventListener("resize", later(() => { if (innerWidth !== width) { width = innerWidth; redrawAll(); } }, 200));
  systemDark.addEventListener("change", redrawAll);
}

function redrawAll() { for (const figure of drawn.keys()) draw(figure); }

// Live: the event stream says that something changed; the server renders it again

const refreshParts = later(async () => {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of $$("[data-live]")) {
    const replacement = $(`[data-live="${part.dataset.live}"]`, fresh);
    if (replacement && replacement.innerHTML !== part.innerHTML) part.replaceChildren(...replacement.childNodes);
  }
  localTimes();
}, 400);

const refreshCharts = (() => {
  let last = 0, timer = 0;
  return () => {
    // At most one round in two seconds, and always one after the last event.
    clearTimeout(timer);
    timer = setTimeout(() => { last = Date.now(); for (const figure of drawn.keys()) load(figure); }, Math.max(300, 2000 - (Date.now() - last)));
  };
})();

function listen() {
  const { events, run } = document.body.dataset;
  if (!events) return;
  const live = $("#live");
  const say = (text, lost) => { live.hidden = false; live.textContent = text; live.classList.toggle("lost", lost); };
  // The browser reconnects by itself and sends Last-Event-ID; when it gives up (an HTTP error), a new stream is opened.
  let source = null, newest = "", wait_ms = 2000;
  const open = () => {
    source = new EventSource(newest ? `${events}?after=${newest}` : events);
    source.onopen = () => { wait_ms = 2000; if (live.classList.contains("lost")) { refreshParts(); refreshCharts(); } say("live", false); };
    source.onerror = () => {
      say("reconnecting…", true);
      if (source.readyState === EventSource.CLOSED) { setTimeout(open, wait_ms); wait_ms = Math.min(30000, wait_ms * 2); }
    };
    for (const kind of ["job", "run", "samples", "recommendation", "scaling", "drift", "advice"]) {
      source.addEventListener(kind, (event) => {
        newest = event.lastEventId || newest;
        const told = JSON.parse(event.data);
        if (run && told.run_id && told.run_id !== run) return;
        refreshParts();
        if (run || kind === "recommendation" || kind === "run") refreshCharts();
      });
    }
  };
  open();
  addEventListener("pagehide", () => source.close());
}

// What if: answers as one types

const number = (value, digits = 3) => value.toLocaleString("en", { maximumSignificantDigits: digits });

function duration(seconds) {
  for (const [size, name] of [[86400, "days"], [3600, "h"], [60, "min"], [1, "s"]]) if (seconds >= size) return `${number(seconds / size)} ${name}`;
  return `${number(seconds * 1000)} ms`;
}

function answerTable(predictions) {
  const table = element("table"), head = element("tr"), body = element("tbody");
  for (const name of ["Nodes", "Global batch", "Time", "90 % interval", "Cost", "Step", "Notes"]) head.append(element("th", name, { scope: "col" }));
  const shown = [...predictions.candidates].sort((a, b) => Boolean(a.excluded_by) - Boolean(b.excluded_by) || a.total_time_s.value - b.total_time_s.value).slice(0, 12);
  for (const each of shown) {
    const row = element("tr", "", each.excluded_by ? { class: "excluded" } : {}), time = each.total_time_s;
    const notes = [each.profiled && "profiled", each.extrapolated && "extrapolated", each.excluded_by && `excluded: ${each.excluded_by}`];
    for (const cell of [each.configuration.num_nodes, each.global_batch_size, duration(time.value), `${duration(time.low)} to ${duration(time.high)}`,
      each.cost_usd ? `$${number(each.cost_usd.value)}` : "–", duration(each.step_time_s.value), notes.filter(Boolean).join(", ")]) row.append(element("td", String(cell)));
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  return table;
}

function startWhatIf() {
  const form = $("#whatif"), answer = $("#whatif-answer");
  if (!form) return;
  let turn = 0;
  const predict = later(async () => {
    const asked = new URLSearchParams(), mine = ++turn;
    for (const name of ["num_nodes", "global_batch_size"]) for (const value of form.elements[name].value.split(/[\s,;]+/)) if (value) asked.append(name, value);
    const price = form.elements.usd_per_node_hour.value.trim(), deadline = form.elements.deadline_h.value.trim();
    if (price) asked.set("usd_per_node_hour", price);
    if (deadline) asked.set("deadline_s", Number.isFinite(Number(deadline)) ? String(Number(deadline) * 3600) : deadline);
    try {
      const predictions = await ask(`${form.dataset.source}?${asked}`);
      if (mine === turn) answer.replaceChildren(answerTable(predictions));
    } catch (error) {
      if (mine === turn) answer.replaceChildren(element("p", error.message, { class: "warning" }));
    }
  }, 150);
  form.addEventListener("input", predict);
  form.addEventListener("submit", (event) => { event.preventDefault(); predict(); });
}

// Access: tokens and projects

function startAccess() {
  const problem = $("#problem");
  const tried = async (work) => {
    problem.hidden = true;
    try { await work(); } catch (error) { problem.textContent = error.message; problem.hidden = false; }
  };
  for (const form of $$("[data-post]")) form.addEventListener("submit", (event) => {
    event.preventDefault();
    tried(async () => {
      const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
      if ("expires_in_days" in given) { given.expires_in_s = Number(given.expires_in_days) * 86400; delete given.expires_in_days; }
      if (given.scope && given.scope !== "user") delete given.project;
      const made = await ask(form.dataset.post, { method: "POST", headers: { "Content-Type": "application/json", Accept: "application/json" }, body: JSON.stringify(given) });
      if (!made.secret) { location.reload(); return; }
      $("#secret code").textContent = made.secret;
      $("#secret").hidden = false;
      form.reset();
    });
  });
  for (const button of $$("[data-delete]")) button.addEventListener("click", () => tried(async () => {
    if (!confirm(button.dataset.what)) return;
    await ask(button.dataset.delete, { method: "DELETE" });
    location.reload();
  }));
}

function localTimes() {
  for (const time of $$("time[datetime]")) {
    const at = new Date(time.dateTime);
    if (!Number.isNaN(at.getTime())) time.textContent = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  }
}

$("#theme").addEventListener("click", nextScheme);
nameScheme();
localTimes();
startCharts();
listen();
startWhatIf();
startAccess();
