// The table of runs: sort, filter, choose several to compare.
import { address, h, link, replace, table } from "../dom.js";
import { ask } from "../api.js";
import { date, interval, natural, number, percent, plural, seconds, words } from "../format.js";
import { sparkline } from "../charts.js";

const success = (run, name) => run.reports[name]?.success ?? run.reports[name]?.greedy ?? null;
const COLUMNS = [
  ["run", (run) => run.key], ["state", (run) => run.state], ["task", (run) => run.environment],
  ["curve", (run) => run.spark.at(-1) ?? -1], ["before", (run) => success(run, "before") ?? -1],
  ["after", (run) => success(run, "after") ?? -1], ["steps", (run) => run.steps], ["work", (run) => run.work_s ?? 0],
  ["seed", (run) => run.seed], ["started", (run) => run.started_at ?? 0],
];

export async function runsPage(parameters) {
  let page = await ask("runs");
  let order = parameters.get("order") ?? "started", descending = (parameters.get("descending") ?? "1") === "1";
  const chosen = new Set(parameters.getAll("run"));
  const field = h("input", { type: "search", placeholder: "filter: name, task, state, seed:3, tag:best", "aria-label": "Filter runs",
    value: parameters.get("filter") ?? "", oninput: () => { keep(); draw(); } });
  const body = h("div", {}), compare = h("span", {});

  function keep() {
    history.replaceState(null, "", address("runs", { filter: field.value, order, descending: descending ? "1" : "0", run: [...chosen] }));
  }
  function visible() {
    const terms = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    const value = COLUMNS.find(([name]) => name === order)?.[1] ?? COLUMNS[0][1];
    return page.runs
      .filter((run) => terms.every((term) => `${run.key} ${run.kind} ${run.environment} ${run.state} seed:${run.seed} ${run.tags.map((tag) => `tag:${tag}`).join(" ")} ${run.note}`.toLowerCase().includes(term)))
      .sort((a, b) => (descending ? -1 : 1) * compareValues(value(a), value(b)));
  }
  function heading([name]) {
    const active = name === order;
    return [h("button", { type: "button", class: "sort", onclick: () => { descending = active ? !descending : true; order = name; keep(); draw(); } },
      name, active ? (descending ? " ↓" : " ↑") : ""), { "aria-sort": active ? (descending ? "descending" : "ascending") : null }];
  }
  function row(run) {
    return h("tr", {},
      h("td", {}, h("input", { type: "checkbox", checked: chosen.has(run.key), "aria-label": `Compare ${run.key}`,
        onchange: (event) => { if (event.target.checked) chosen.add(run.key); else chosen.delete(run.key); keep(); drawCompare(); } })),
      h("td", {}, link(run.kind === "eval" ? "evaluation" : "run", { run: run.key }, run.key), run.tags.map((tag) => [" ", h("span", { class: "tag" }, tag)]),
        run.note ? h("small", { class: "note", title: run.note }, run.note) : null),
      h("td", {}, h("span", { class: `state ${run.state}` }, run.state), run.lost_pid ? h("small", {}, " its process is gone") : null),
      h("td", {}, run.environment || `rllm ${run.kind}`),
      h("td", {}, sparkline(run.spark, run.spark_of)),
      rate(run, "before"), rate(run, "after"),
      h("td", { class: "n" }, run.total_steps ? `${run.steps}/${run.total_steps}` : "–"),
      h("td", { class: "n" }, seconds(run.work_s)), h("td", { class: "n" }, run.seed), h("td", { class: "when" }, date(run.started_at)));
  }
  function drawCompare() {
    replace(compare, chosen.size > 1 ? link("compare", { run: [...chosen] }, `Compare ${plural(chosen.size, "run")}`)
      : h("small", {}, "choose two runs or more to compare them"));
  }
  function draw() {
    const runs = visible();
    replace(body, runs.length ? table(`${plural(runs.length, "run")} in ${page.roots.join(", ")}`,
      [[h("span", { class: "hidden" }, "compare"), {}], ...COLUMNS.map(heading)], runs.map(row))
      : h("p", {}, page.runs.length ? "No run fits the filter." : `There are no runs in ${page.roots.join(", ")}. Make one: rllm train frozenlake`),
    page.unreadable.map((each) => h("p", { class: "problem" }, each.error)));
    drawCompare();
  }
  draw();
  return {
    title: "Runs", content: [h("h1", {}, "Runs"), h("p", { class: "tools" }, field, compare), body],
    refresh: async () => { const next = await ask("runs"); if (JSON.stringify(next) !== JSON.stringify(page)) { page = next; draw(); } },
  };
}

function rate(run, name) {
  const report = run.reports[name] ?? {};
  if (report.success === undefined && report.greedy === undefined) {
    return h("td", { class: "n" }, report.loss === undefined ? "–" : number(report.loss));
  }
  const kind = report.success === undefined ? "greedy" : "success";
  return h("td", { class: "n", title: words(kind) }, percent(report[kind]), h("small", {}, ` ${interval(report[`${kind}_interval`])}`));
}

function compareValues(a, b) {
  return typeof a === "string" ? natural(a, String(b)) : a - b;
}
