"use strict";
// What-if, and the forms that change something; uses what app.js defines.

// What if: answers as one types

function duration(seconds) {
  // Two units, as the service writes them.
  for (const [great, name, small, smaller] of [[86400, "d", 3600, "h"], [3600, "h", 60, "min"], [60, "min", 1, "s"]]) {
    if (seconds < great) continue;
    const parts = Math.round(seconds / small), each = great / small;
    return `${number(Math.floor(parts / each), 9)} ${name}${parts % each ? ` ${parts % each} ${smaller}` : ""}`;
  }
  return seconds >= 1 ? `${number(seconds)} s` : `${number(seconds * 1000)} ms`;
}

function beside(value, other) {
  const ratio = value / Number(other);
  if (!other || !Number.isFinite(ratio)) return "–";
  if (Math.abs(ratio - 1) < 0.0005) return "same";
  return ratio >= 2 ? `${number(ratio)} ×` : `${ratio > 1 ? "+" : "−"}${(Math.abs(ratio - 1) * 100).toFixed(1)} %`;
}

function answerTable(predictions, best) {
  const table = element("table"), head = element("tr"), body = element("tbody");
  for (const name of ["Configuration", "Time", "90 % interval", "Cost", "Time against the recommendation", "Cost against it", "Step", "Notes"]) head.append(element("th", name, { scope: "col" }));
  const shown = [...predictions.candidates].sort((a, b) => Boolean(a.excluded_by) - Boolean(b.excluded_by) || a.total_time_s.value - b.total_time_s.value).slice(0, 12);
  for (const each of shown) {
    const row = element("tr", "", each.excluded_by ? { class: "excluded" } : {}), time = each.total_time_s;
    const notes = [each.profiled && "profiled", each.extrapolated && "extrapolated", each.excluded_by && `excluded: ${each.excluded_by}`];
    const { num_nodes: nodes, local_batch_size: local, instance_type: kind } = each.configuration;
    const name = `${nodes}${kind === "default" ? (nodes === 1 ? " node" : " nodes") : ` × ${kind}`}, batch ${each.global_batch_size} (${local} a rank)${each.spot ? ", spot" : ""}`;
    for (const cell of [name, duration(time.value), `${duration(time.low)} to ${duration(time.high)}`, each.cost_usd ? `$${each.cost_usd.value.toFixed(2)}` : "–",
      beside(time.value, best.time), each.cost_usd ? beside(each.cost_usd.value, best.cost) : "–", duration(each.step_time_s.value), notes.filter(Boolean).join(", ")]) row.append(element("td", String(cell)));
    body.append(row);
  }
  const top = element("thead");
  top.append(head);
  table.append(top, body);
  if (shown.length) return table;
  return element("p", "No such configuration can be made of whole ranks: try another batch or number of nodes.", { class: "muted" });
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
      if (mine === turn) answer.replaceChildren(answerTable(predictions, form.dataset));
    } catch (error) {
      if (mine === turn) answer.replaceChildren(element("p", error.message, { class: "warning" }));
    }
  }, 150);
  form.addEventListener("input", predict);
  form.addEventListener("submit", (event) => { event.preventDefault(); predict(); });
  predict();
}

// Access: tokens and projects

function startAccess() {
  const problem = $("#problem");
  if (!problem) return;
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
  // By delegation: live updates replace the buttons.
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-patch]");
    if (button) tried(async () => {
      await ask(button.dataset.patch, { method: "PATCH", headers: { "Content-Type": "application/json", Accept: "application/json" }, body: button.dataset.body });
      refreshParts();
    });
  });
  for (const button of $$("[data-delete]")) button.addEventListener("click", () => tried(async () => {
    if (!confirm(button.dataset.what)) return;
    await ask(button.dataset.delete, { method: "DELETE" });
    location.reload();
  }));
}

startWhatIf();
startAccess();
