// Several runs beside each other: curves overlaid, settings that differ, paired difference by task.
import { facts, h, link, table } from "../dom.js";
import { ask } from "../api.js";
import { curves } from "../charts.js";
import { interval, number, percent, plural, words } from "../format.js";

const METRICS = [["Success", "success"], ["Reward, mean", "reward_mean"], ["Held-out success", "heldout_success"], ["Loss", "loss"], ["Entropy, nats", "entropy"],
  ["KL of a step", "kl"], ["Gradient norm", "grad_norm"], ["Turns, mean", "turns_mean"], ["Tokens per second", "tokens_per_s"]];

export async function comparisonPage(parameters) {
  const runs = parameters.getAll("run");
  const page = await ask("compare", { run: runs });
  const figures = METRICS.map(([title, name]) => {
    const series = page.runs.map((run, color) => ({ label: run.key, color, dashed: color >= 8, x: run.series.step ?? [], y: run.series[name] ?? [] })).filter((each) => each.y.some((value) => typeof value === "number"));
    return series.length ? curves(title, series, name.includes("success") ? { low: 0, high: 1, format: (value) => percent(value, 0) } : {}) : null;
  });
  return {
    title: `${plural(runs.length, "run")} compared`,
    content: [
      h("h1", {}, plural(runs.length, "run"), " compared"),
      table("Results", [["run", {}], ["state", {}], ["before", { class: "n" }], ["after", { class: "n" }], ["steps", { class: "n" }]], page.runs.map((run) => h("tr", {},
        h("td", {}, link("run", { run: run.key }, run.key)), h("td", {}, run.facts.state), ...["before", "after"].map((name) => {
          const each = run.facts.reports[name] ?? {}, kind = each.success === undefined ? "greedy" : "success";
          return h("td", { class: "n" }, percent(each[kind]), h("small", {}, ` ${interval(each[`${kind}_interval`])}`));
        }), h("td", { class: "n" }, run.facts.steps)))),
      h("h2", {}, "Curves"), h("div", { class: "charts" }, figures),
      h("h2", {}, "Difference by task"),
      page.pairs.map(pairView),
      h("h2", {}, "Settings that differ"),
      Object.keys(page.differences).length ? table("Settings", [["key", {}], ...page.runs.map((run) => [run.key, {}])], Object.entries(page.differences).map(([key, values]) =>
        h("tr", {}, h("th", { scope: "row" }, key), page.runs.map((run) => h("td", {}, values[run.key] === null || values[run.key] === undefined ? "–" : typeof values[run.key] === "object" ? JSON.stringify(values[run.key]) : String(values[run.key]))))))
        : h("p", {}, "None."),
    ],
  };
}

function pairView(pair) {
  if (pair.error) return h("p", { class: "hint" }, `${pair.first} and ${pair.second}: ${pair.error}`);
  const each = pair.comparison;
  return h("section", {},
    facts([["from", pair.first], ["to", pair.second], ["attempts", words(pair.phase)], ["tasks of both", number(each.tasks)], ["success", `${percent(each.first)} to ${percent(each.second)}`],
      ["difference, 95 %", `${each.difference >= 0 ? "+" : ""}${(100 * each.difference).toFixed(1)} points ${interval(each.difference_interval)}`], ["p", number(each.p_value)], ["tests", `${words(each.interval_method)}, ${words(each.test)}`]]),
    table(`Tasks that changed: ${each.better.length} better, ${each.worse.length} worse`, [["task", {}], ["before", { class: "n" }], ["after", { class: "n" }]],
      [...each.worse, ...each.better].slice(0, 200).map((change) => h("tr", {}, h("td", {}, change.task_id), h("td", { class: "n" }, percent(change.before, 0)),
        h("td", { class: `n ${change.after > change.before ? "right" : "wrong"}` }, percent(change.after, 0))))));
}
