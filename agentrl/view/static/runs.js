// The list of runs in a folder; each opens by one click.
"use strict";
(() => {
  const h = AR.h;
  const main = document.getElementById("main");
  const number = (value) => (typeof value === "number" ? value.toFixed(3) : "");
  const named = (values) => Object.entries(values).map(([name, value]) => `${name.replace(/^reward\//, "").replace(/^eval\//, "").replace(/\/reward$/, "")} ${number(value)}`).join(", ");
  const COLUMNS = [
    ["run", (r) => h("a", { href: `run/${encodeURIComponent(r.name)}/` }, AR.visible(r.name))],
    ["environment", (r) => AR.visible(r.env || "-")],
    ["model", (r) => AR.visible(r.model.split("/").pop() || "-")],
    ["rollouts", (r) => `${r.rollouts}${r.planned ? ` of ${r.planned}` : ""}`],
    ["reward, first → last", (r) => (r.reward === null ? "-" : `${number(r.first)} → ${number(r.reward)}`)],
    ["components", (r) => AR.visible(named(r.rewards) || "-")],
    ["last evaluation", (r) => AR.visible(named(r.evaluation) || "-")],
    ["turns", (r) => number(r.turns)],
    ["failures", (r) => String(r.failures)],
    ["state", (r) => AR.visible(r.problem || (r.finished ? "finished" : "not finished"))],
    ["written", (r) => new Date(r.changed * 1000).toLocaleString()],
  ];

  async function show() {
    try {
      const response = await fetch("api/runs");
      const value = await response.json();
      if (value.error) throw new Error(value.error);
      main.replaceChildren(
        h("h1", {}, AR.visible(value.name)),
        h("p", { class: "soft" }, `${value.runs.length} runs`),
        h("div", { class: "wide" }, h("table", { id: "runs" },
          h("thead", {}, h("tr", {}, COLUMNS.map(([name]) => h("th", {}, name)))),
          h("tbody", {}, value.runs.map((r) => h("tr", {}, COLUMNS.map(([, cell]) => h("td", {}, cell(r)))))))),
      );
    } catch (e) {
      main.replaceChildren(h("p", { class: "error" }, AR.visible(e.message)));
    }
    main.dataset.ready = "runs";
  }
  show();
})();
