// An evaluation: its scores with their intervals, then its tasks or its attempts with what the grader said.
import { address, details, facts, h, link, rateBar, replace, table } from "../dom.js";
import { ask } from "../api.js";
import { bounds, interval, number, percent, plural, seconds, words } from "../format.js";
import { rowKeys, snippet } from "./episodes.js";

const LIMIT = 50;
const NAMES = ["phase", "by", "verdict", "outcome", "q", "task", "order", "descending", "offset", "beside"];
const OUTCOMES = ["scored", "truncated", "policy_failure", "infrastructure_failure", "cancelled", "unjudged"];
const TASK_ORDERS = [["", "as attempted"], ["success", "success"], ["reward", "reward"], ["failed", "failures"], ["attempts", "attempts"]];
const ORDERS = [["", "as saved"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["duration", "duration"]];
const SHARES = { pass_at_k: "pass@k", majority_at_k: "majority@k", best_of_k: "mean of the best reward of k" };

export async function evaluationPage(parameters) {
  const run = parameters.get("run");
  const wanted = Object.fromEntries(NAMES.map((name) => [name, parameters.get(name) ?? ""]));
  const request = { run, ...wanted, limit: LIMIT };
  let page = await ask("evaluation", request);
  const go = (changes) => { location.hash = address("evaluation", { run, ...wanted, offset: "", ...changes }); };
  const select = (label, name, choices, changes = {}) => h("label", {}, label, " ", h("select", { onchange: (event) => go({ ...changes, [name]: event.target.value }) },
    choices.map(([value, text]) => h("option", { value, selected: value === wanted[name] }, text))));
  const field = h("input", { type: "search", placeholder: "search in all text", "aria-label": "Search in all text of the attempts", value: wanted.q,
    onkeydown: (event) => { if (event.key === "Enter") go({ q: field.value }); } });
  const byTask = wanted.by !== "attempt", offset = Number(wanted.offset || 0);
  const head = h("div", {}), rows = h("div", {}), pager = h("p", { class: "tools" });
  const more = () => offset + page.rows.length < page.total;
  const turnPage = (by) => { if (by < 0 ? offset > 0 : more()) go({ offset: String(Math.max(0, offset + by * LIMIT) || "") }); };
  function draw() {
    replace(head, scores(run, page));
    if (!page.rows) return;
    replace(rows, page.rows.length ? (byTask ? taskTable(run, page, wanted.beside) : attemptTable(run, page)) : h("p", {}, "Nothing fits."));
    replace(pager, h("button", { type: "button", disabled: offset === 0, onclick: () => turnPage(-1) }, "← earlier"),
      h("span", {}, page.rows.length ? `${offset + 1} to ${offset + page.rows.length} of ${plural(page.total, byTask ? "task" : "attempt")}` : "none"),
      h("button", { type: "button", disabled: !more(), onclick: () => turnPage(1) }, "later →"));
  }
  draw();
  return {
    title: `Evaluation ${run}`,
    content: [
      h("h1", {}, title(page, run), " ", h("span", { class: `state ${page.facts.state}` }, page.facts.state)),
      h("p", { class: "tools" }, link("run", { run }, "Run"), link("episodes", { run, phase: page.phase }, "Episodes"),
        page.elsewhere.length ? h("label", {}, "compare with ", h("select", { onchange: (event) => { if (event.target.value) location.hash = address("compare", { run: [event.target.value, run] }); } },
          [["", "choose"], ...page.elsewhere.map((name) => [name, name])].map(([value, text]) => h("option", { value }, text)))) : null),
      head, page.report ? breakdown(page) : null,
      page.rows ? [h("h2", {}, byTask ? "Tasks" : "Attempts"),
        h("p", { class: "tools" }, field,
          select("by", "by", [["", "task"], ["attempt", "attempt"]], { order: "" }),
          page.phases.length > 1 ? select("way", "phase", page.phases.map((name) => [name === page.phases[0] && !wanted.phase ? "" : name, words(name)])) : null,
          select("went", "verdict", [["", "all"], ["right", "right"], ["wrong", "wrong"], ["failed", "failed"]]),
          select("outcome", "outcome", [["", "all"], ...OUTCOMES.map((name) => [name, words(name)])]),
          select("sort by", "order", byTask ? TASK_ORDERS : ORDERS), select("order", "descending", [["", "ascending"], ["1", "descending"]]),
          byTask && page.elsewhere.length ? select("beside", "beside", [["", "nothing"], ...page.elsewhere.map((name) => [name, name])]) : null),
        wanted.task ? h("p", {}, "Only task ", h("code", {}, wanted.task), " · ", link("evaluation", { run, phase: wanted.phase, by: wanted.by }, "all tasks")) : null,
        page.progress && page.progress.steps < page.progress.of ? h("p", { class: "hint" }, `The search index has ${page.progress.steps} of ${page.progress.of} steps; hits of the others follow.`) : null,
        rows, pager] : h("p", {}, "Nothing was attempted yet."),
    ],
    keys: { ArrowLeft: ["the page before", () => turnPage(-1)], ArrowRight: ["the page after", () => turnPage(1)], ...rowKeys(rows) },
    refresh: page.facts.state === "running" ? async () => { page = await ask("evaluation", request); if (!rows.contains(document.activeElement)) draw(); return page.facts.state === "running"; } : null,
  };
}

function title(page, run) {
  return page.stamp.name ? `${page.stamp.name}: ${page.stamp.model?.path ?? ""}` : run;
}

function rate(value, bounds) {
  return [percent(value), " ", h("small", {}, interval(bounds)), rateBar(value, bounds)];
}

function scores(run, page) {
  const each = page.report;
  if (!each) return null;
  return [
    h("div", { class: "score" }, h("strong", {}, percent(each.success)), h("span", {}, `success, ${words(page.phase)}, 95 % ${interval(each.success_interval)}`), rateBar(each.success, each.success_interval)),
    facts([["attempted", number(each.attempted)], ["scored", number(each.scored)], ["truncated", number(each.truncated)], ["failed", number(each.failed)],
      ["without failures", each.failed ? `${percent(each.success_without_failed)} ${interval(each.success_without_failed_interval)}` : null], ["score, chance 0, optimum 100", each.score === undefined ? null : `${number(each.score)} ${bounds(each.score_interval)}`],
      ["ended", Object.entries(each.endings ?? {}).map(([name, count]) => `${words(name)} ${number(count)}`).join(", ") || null],
      ["turns, mean", `${number(each.mean_turns)} ${bounds(each.mean_turns_interval)}`], ["ran into max_tokens", each.cut_off ? number(each.cut_off) : null],
      ["tokens read", each.tokens ? number(each.tokens.prompt) : null], ["tokens written", each.tokens ? number(each.tokens.completion) : null], ["cost", each.cost ? number(each.cost) : null]]),
    h("p", {}, h("small", {}, `${page.instances} ${page.baselines} A failure counts as no success. Interval: ${page.interval}.`,
      each.of_first ? ` Of the first ${number(each.of_first)} attempts.` : "")),
  ];
}

/** What a report has beside its score. */
function breakdown(page) {
  const each = page.report, ks = Object.keys(each.pass_at_k ?? {}), shares = Object.keys(SHARES).filter((name) => each[name]);
  return [h("div", { class: "beside" },
    each.readings && Object.keys(each.readings).length ? table("The same answers under each reading", [["reading", {}], ["success, 95 %", {}]],
      Object.entries(each.readings).map(([name, reading]) => h("tr", {}, h("td", {}, `${name} reading`), h("td", {}, rate(reading.success, reading.success_interval))))) : null,
    each.categories ? table("By category", [["category", {}], ["success, 95 %", {}], ["attempted", { class: "n" }]], Object.entries(each.categories).map(([name, category]) =>
      h("tr", {}, h("td", {}, name), h("td", {}, rate(category.success, category.success_interval)), h("td", { class: "n" }, number(category.attempted))))) : null,
    ks.length ? table("Several attempts", [["k", {}], ...shares.map((name) => [SHARES[name], {}])], ks.map((k) => h("tr", {}, h("td", {}, `k = ${k}`),
      shares.map((name) => h("td", {}, each[name][k] ? [number(each[name][k].value), " ", h("small", {}, bounds(each[name][k].interval))] : "–"))))) : null,
    Object.keys(each.failures ?? {}).length ? table("Failures", [["cause", {}], ["attempts", { class: "n" }]], Object.entries(each.failures).map(([name, count]) =>
      h("tr", {}, h("td", {}, name), h("td", { class: "n" }, count)))) : null),
    Object.keys(page.stamp).length ? details("To repeat it", false, h("pre", {}, JSON.stringify(page.stamp, null, 2))) : null,
  ];
}

function taskTable(run, page, beside) {
  return table("Tasks", [["task", {}], ["success, 95 %", {}], ["attempts", { class: "n" }], ["failed", { class: "n" }], ["reward, mean", { class: "n" }], ...(beside ? [[`in ${beside}`, {}]] : [])],
    page.rows.map((each) => h("tr", {},
      h("td", {}, link("evaluation", { run, phase: page.phase, by: "attempt", task: each.task_id }, each.task_id)),
      h("td", {}, rate(each.success, each.success_interval)), h("td", { class: "n" }, each.attempts), h("td", { class: `n ${each.failed ? "failed" : ""}` }, each.failed),
      h("td", { class: "n" }, each.mean_reward === null ? "not paid" : [number(each.mean_reward), h("small", {}, ` ${bounds(each.reward_interval)}`)]),
      beside ? h("td", { class: each.beside && each.beside.success !== each.success ? "changed" : "" }, each.beside ? [link("evaluation", { run: beside, phase: each.beside.phase, by: "attempt", task: each.task_id }, percent(each.beside.success, 0)),
        h("small", {}, ` ${interval(each.beside.success_interval)}`)] : "not attempted") : null)));
}

function attemptTable(run, page) {
  const number_ = { class: "n" };
  return table("Attempts", [["went", {}], ["task", {}], ["attempt", number_], ["reward", number_], ["the grader said", {}], ["turns", number_], ["tokens", number_], ["took", number_]],
    page.rows.map((each) => h("tr", {},
      h("td", {}, link("episode", { run, id: each.id }, h("span", { class: each.verdict }, each.verdict))),
      h("td", {}, link("attempts", { run, phase: page.phase, step: each.step, task: each.task_id }, each.task_id)), h("td", number_, each.attempt),
      h("td", number_, each.reward === null ? "not paid" : number(each.reward)),
      h("td", {}, each.hit ? h("p", {}, snippet(each.hit)) : null, answerView(run, each)),
      h("td", number_, each.num_steps), h("td", number_, number(each.num_sampled_tokens)), h("td", number_, seconds(each.duration_s)))));
}

/** The grader's words; opened, what was asked and answered. */
function answerView(run, each) {
  const body = h("div", {});
  const label = [each.reason || (each.verdict === "failed" ? words(each.outcome ?? "unjudged") : "nothing"), each.extracted === null ? null : h("small", {}, " took ", h("code", {}, each.extracted), " for the answer"),
    each.cut_off ? h("small", { class: "failed" }, " ran into max_tokens") : null];
  const element = h("details", { ontoggle: async () => {
    if (!element.open || body.hasChildNodes()) return;
    try {
      const full = await ask("answer", { run, id: each.id });
      replace(body, h("small", {}, "asked"), h("pre", {}, full.prompt), h("small", {}, "answered"), h("pre", {}, full.answer || h("span", { class: "dim" }, "(nothing)")));
    } catch (error) { replace(body, h("p", { class: "problem" }, error.message)); }
  } }, h("summary", {}, label), body);
  return element;
}

/** Where else a task was attempted. */
export function elsewhereView(mine, rows) {
  return rows.length < 2 ? null : details(`This task in ${plural(rows.length, "place")}`, rows.length < 8, table("The same task", [["run", {}], ["phase", {}], ["success, 95 %", {}], ["attempts", { class: "n" }]],
    rows.map((each) => h("tr", {}, h("td", {}, link("attempts", { run: each.run, phase: each.phase, step: each.step, task: each.task_id }, each.run)),
      h("td", {}, words(each.phase)), h("td", {}, rate(each.success, each.success_interval)), h("td", { class: "n" }, each.attempts)))));
}
