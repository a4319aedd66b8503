"use strict";
// The what-if form, and the forms that change something. This script uses functions that app.js defines.

// What-if: predictions are updated while the user types

function startWhatIf() {
  const form = $("#whatif"), answer = $("#whatif-answer");
  if (!form) return;
  let turn = 0;
  const predict = debounced(async () => {
    const mine = ++turn;
    const asked = new URLSearchParams([...new FormData(form)].filter(([, value]) => value.trim()));
    try {
      const table = await ask(`${form.getAttribute("action")}?${asked}`);
      if (mine === turn) answer.replaceChildren(...new DOMParser().parseFromString(table, "text/html").body.childNodes);
    } catch (error) {
      if (mine === turn) answer.replaceChildren(element("p", error.message, { class: "warning" }));
    }
  }, 150);
  form.addEventListener("input", predict);
  form.addEventListener("submit", (event) => { event.preventDefault(); predict(); });
  document.addEventListener("pick", ({ detail }) => {
    // The form has no field for instance type, micro-steps or spot if the job allows only one value.
    for (const [place, name] of ["nodes", "global_batch", "instance_type", "micro_steps", "spot"].entries()) {
      if (form.elements[name]) form.elements[name].value = String(detail[place]);
    }
    for (const choice of form.querySelectorAll("select[name=option] option")) {
      if (detail[5].includes(choice.value)) choice.selected = true;
    }
    form.scrollIntoView({ block: "center" });
    predict();
  });
  // Like a chart, the table is requested once it comes into view, after the charts that were requested before it.
  new IntersectionObserver(([{ isIntersecting }], watch) => {
    if (!isIntersecting) return;
    watch.disconnect();
    loading.then(predict);
  }, { rootMargin: "300px" }).observe(form);
}

// Forms that change something: `#problem` lists the invalid fields, one per line, and the form keeps its content

const send = (method, path, body) => ask(path, { method, headers: { "Content-Type": "application/json", Accept: "application/json" }, body: JSON.stringify(body) });

async function tried(work) {
  const problem = $("#problem");
  problem.hidden = true;
  try { await work(); } catch (error) {
    const lines = error.fields?.length ? error.fields.map(({ field, message }) => `${field}: ${message}`) : [error.message];
    problem.replaceChildren(...lines.map((line) => element("p", line)));
    problem.hidden = false;
    problem.scrollIntoView({ block: "nearest" });
  }
}

function onSubmit(selector, work) {
  for (const form of $$(selector)) {
    form.addEventListener("submit", (event) => { event.preventDefault(); tried(() => work(form)); });
    $("[type=submit]", form).disabled = false;  // the button is disabled until now, since a form sent without this script would lose its content
  }
}

function startAccess() {
  onSubmit("[data-post]", async (form) => {
    const given = Object.fromEntries([...new FormData(form)].filter(([, value]) => value !== ""));
    if ("expires_in_days" in given) { given.expires_in_s = Number(given.expires_in_days) * 86400; delete given.expires_in_days; }
    if (given.scope && given.scope !== "user") delete given.project;
    const made = await send("POST", form.dataset.post, given);
    if (!made.secret) { location.reload(); return; }
    $("#secret code").textContent = made.secret;
    $("#secret").hidden = false;
    form.reset();
  });
  for (const button of $$("[data-delete]")) button.addEventListener("click", () => tried(async () => {
    if (!confirm(button.dataset.what)) return;
    await ask(button.dataset.delete, { method: "DELETE" });
    location.reload();
  }));
}

// The names of fields are paths in JSON, because the name of an instance type may contain any character.
function patchOf(form) {
  const patch = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    const path = JSON.parse(field.name), last = path.pop(), text = field.value.trim();
    const at = path.reduce((inner, name) => (inner[name] ??= {}), patch);
    const amount = Number(text) * Number(field.dataset.times || 1);
    if (text) at[last] = Number.isNaN(amount) ? text : amount;  // the service reports what is wrong with other text
    else if (!path.length) at[last] = null;
  }
  for (const price of Object.values(patch.prices)) if (!("usd_per_node_hour" in price.spot)) delete price.spot;
  return patch;
}

function startJobs() {
  onSubmit("[data-register]", async (form) => {
    const made = await ask("/jobs/new", { method: "POST", headers: { "Content-Type": "application/toml", Accept: "application/json" }, body: form.elements.spec.value });
    location.assign(`/jobs/${made.id}`);
  });
  onSubmit("[data-edit]", async (form) => {
    await send("PATCH", form.dataset.edit, patchOf(form));
    location.reload();
  });
  // The listener is on the document, because live updates replace the buttons.
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-patch]");
    if (button) tried(async () => { await send("PATCH", button.dataset.patch, JSON.parse(button.dataset.body)); refreshParts(); });
  });
}

// Jobs selected from the list, to be archived together

function startChoosing() {
  const form = $("[data-archive]");
  if (!form) return;
  const boxes = () => $$(".jobs input[type=checkbox]"), button = $("button", form);
  const count = () => {
    const chosen = boxes().filter((each) => each.checked).length;
    button.disabled = !chosen;
    button.textContent = chosen ? `Archive ${chosen} selected` : "Archive selected";
  };
  document.addEventListener("change", (event) => {
    if (event.target === form.elements.all) for (const each of boxes()) each.checked = event.target.checked;
    count();
  });
  onSubmit("[data-archive]", async () => {
    for (const each of boxes()) if (each.checked) await send("PATCH", `/v1/jobs/${each.value}`, { archived: true });
    location.reload();
  });
  count();
}

startWhatIf();
startAccess();
startJobs();
startChoosing();
