"use strict";
// What-if, and the forms that change something; uses what app.js defines.

// What if: answers as one types

function startWhatIf() {
  const form = $("#whatif"), answer = $("#whatif-answer");
  if (!form) return;
  let turn = 0;
  const predict = later(async () => {
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
    form.elements.nodes.value = detail.nodes;
    form.elements.global_batch.value = detail.batch;
    form.scrollIntoView({ block: "center" });
    predict();
  });
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
