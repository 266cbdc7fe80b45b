// One run, live: alarms, curves, distributions by step, where the time goes, settings.
import { announce, details, facts, h, link, prose, replace, table } from "../dom.js";
import { ask, kept, send } from "../api.js";
import { columns, curves } from "../charts.js";
import { interval, number, percent, plural, seconds, words } from "../format.js";

const FIGURES = [
  ["Success", ["success", "heldout_success"], { low: 0, high: 1, format: (value) => percent(value, 0) }],
  ["Reward, mean", ["reward_mean", "heldout_reward"]],
  ["Zero-signal groups, share", [["groups_tied", "groups"]], { low: 0, high: 1, format: (value) => percent(value, 0) }],
  ["Failed episodes, share", [["failed", "episodes"]], { low: 0, format: (value) => percent(value, 0) }],
  ["Turns, mean", ["turns_mean"]],
  ["Entropy, nats", ["entropy"]],
  ["KL of a step, nats per token", ["kl", "divergence"]],
  ["Importance ratio, mean", ["ratio_mean"]],
  ["Clipped tokens, share", ["clipped_frac"], { low: 0, format: (value) => percent(value, 1) }],
  ["Gradient norm", ["grad_norm"]],
  ["Loss", ["loss", "heldout_loss"]],
  ["Learning rate", ["learning_rate"]],
  ["Staleness, updates", ["staleness_mean", "staleness_max", "policy_lag"]],
  ["Sampler and trainer, gap in nats", ["logprob_gap_max", "logprob_gap_first", "canary_gap"]],
  ["Trainer from sampler, KL in nats per token", ["sampler_kl"]],
  ["Tokens per second", ["tokens_per_s"]],
  ["Tokens of a step", ["tokens.sampled", "tokens.trained"]],
];
const OWN = new Set(["step", "time_s", "run_s", "total_steps", "rollout_s", "step_s", "grading_s", "episodes", "groups", "failed", "groups_tied"]);
const SHADES = ["r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"];
const OUTCOMES = ["scored", "truncated", "policy_failure", "infrastructure_failure", "cancelled", "unjudged"];

export async function runPage(parameters) {
  const run = parameters.get("run");
  let page = await ask("run", { run });
  const series = page.series;
  const head = h("div", {}), alarms = h("div", {}), figures = h("div", {}), spreads = h("div", { "aria-live": "off" });

  function drawHead() {
    const { facts: about } = page;
    replace(head,
      h("h1", {}, about.name, " ", h("span", { class: `state ${about.state}` }, about.state)),
      h("p", { class: "tools" }, link("episodes", { run }, "Episodes"), link("step", { run, phase: lastPhase(page) }, "Steps and groups"),
        (page.phases ?? []).some((phase) => phase.name !== "train" && phase.name !== "warm_start") ? link("evaluation", { run }, "Evaluation by task") : null),
      facts([
        ["task", about.environment || about.kind], ["seed", about.seed],
        ["steps", about.total_steps ? `${about.steps} of ${about.total_steps}` : null],
        ["now", about.state === "finished" ? null : `${words(about.phase)} step ${about.phase_steps}`],
        ["process", about.pid], ["work", about.work_s === null ? null : seconds(about.work_s)],
        ...["untrained", "before", "after"].filter((name) => about.reports[name]).map((name) => [name, report(about.reports[name])]),
      ]),
      page.lost_pid && about.state !== "finished" ? h("p", { class: "problem" },
        `Its process ${page.lost_pid} ended without finishing. The same command with the same --output goes on where it stopped.`) : null);
    replace(alarms, page.alarms.length ? [h("h2", {}, "Alarms"), h("ul", { class: "alarms" }, page.alarms.map((alarm) =>
      h("li", { class: alarm.level }, h("strong", {}, alarm.sentence), " ", h("span", {}, prose(alarm.mend)))))] : null);
  }
  function drawFigures() {
    const phases = Object.keys(series).filter((phase) => series[phase].step.length > 1);
    const main = series.train ?? series[phases[0]] ?? { step: [] };
    const shown = new Set(OWN);
    const known = FIGURES.map(([title, names, options]) => {
      const lines = names.map((name) => Array.isArray(name) ? share(main, name) : line(main, name)).filter(Boolean);
      names.flat().forEach((name) => shown.add(name));
      return lines.length ? curves(title, lines, options) : null;
    });
    const others = Object.keys(main).filter((name) => !shown.has(name) && varies(main[name]));
    const warm = series.warm_start && series.train ? curves("Warm start: loss", [line(series.warm_start, "loss")].filter(Boolean)) : null;
    replace(figures, h("h2", {}, "Curves"), h("div", { class: "charts" }, known, timeShares(main), warm),
      others.length ? details(`${plural(others.length, "more curve")}`, false, h("div", { class: "charts" }, others.map((name) => curves(words(name), [line(main, name)])))) : null);
  }
  async function drawSpreads() {
    if (!page.phases?.length) return;
    const phase = page.phases.some((each) => each.name === "train") ? "train" : page.phases.at(-1).name;
    const spread = await ask("distribution", { run, phase });
    if (!spread.steps.length) return;
    const names = spread.bins.slice(1).map((edge, index) => `${number(spread.bins[index])} to ${number(edge)}`);
    const outcomes = OUTCOMES.filter((name) => spread.steps.some((each) => each.outcomes[name]));
    const endings = [...new Set(spread.steps.flatMap((each) => Object.keys(each.endings)))].sort();
    const rows = (parts) => spread.steps.map((each) => ({ label: `step ${each.step}`, parts: parts(each) }));
    const quartile = (name, title, format) => curves(title, ["least", "lower quartile", "median", "upper quartile", "greatest"].map((label, index) => ({
      label, x: spread.steps.map((each) => each.step), y: spread.steps.map((each) => each[name][index]), dashed: index === 0 || index === 4 })), { format });
    replace(spreads, h("h2", {}, `Episodes by step, phase ${words(phase)}`), h("div", { class: "charts" },
      columns("Rewards", rows((each) => each.rewards), names, SHADES),
      columns("Outcomes", rows((each) => outcomes.map((name) => each.outcomes[name] ?? 0)), outcomes.map(words), outcomes.map((name) => `o-${name}`)),
      columns("How they ended", rows((each) => endings.map((name) => each.endings[name] ?? 0)), endings.map(words), endings.map((_, index) => `c${index % 8}`)),
      quartile("turns", "Turns"), quartile("tokens", "Sampled tokens"),
      spread.steps.some((each) => each.seconds[2] !== null) ? quartile("seconds", "Seconds of an episode", seconds) : null),
    table("Steps", [["step", {}], ["episodes", { class: "n" }], ["success", { class: "n" }], ["", {}]], spread.steps.slice().reverse().map((each) =>
      h("tr", {}, h("td", {}, each.step), h("td", { class: "n" }, each.episodes), h("td", { class: "n" }, percent(each.correct / each.episodes)),
        h("td", {}, link("step", { run, phase, step: each.step }, "groups"))))));
  }
  async function refresh() {
    const next = await ask("run", { run, after: page.offset });
    const hasNews = next.offset !== page.offset || next.facts.state !== page.facts.state;
    if (next.after === 0 && page.offset > 0) Object.keys(series).forEach((phase) => delete series[phase]);
    merge(series, next.series);
    page = { ...page, ...next, series, phases: next.phases ?? page.phases };
    if (hasNews) {
      drawHead();
      drawFigures();
      if (spreads.querySelector("h2") === null) page.phases = (await ask("run", { run })).phases;
      await drawSpreads();
    }
    return page.facts.state === "running";
  }
  drawHead();
  drawFigures();
  drawSpreads().catch((error) => replace(spreads, h("p", { class: "problem" }, error.message)));
  return {
    title: page.facts.name,
    content: [head, noteView(run, page), alarms, figures, spreads, details("Settings", false, h("pre", {}, JSON.stringify(page.config, null, 2)))],
    refresh: page.facts.state === "running" ? refresh : null,
    keys: { e: ["episodes", () => { location.hash = `#/episodes?run=${encodeURIComponent(run)}`; }],
      s: ["steps and groups", () => { location.hash = `#/step?run=${encodeURIComponent(run)}`; }] },
  };
}

/** Tags and a note of the reader: they are kept in RLLM_HOME, not in the run. */
function noteView(run, page) {
  if (kept) return page.note || page.tags.length ? h("p", {}, page.tags.map((tag) => [h("span", { class: "tag" }, tag), " "]), page.note) : null;
  const save = async () => {
    try {
      const value = await send("notes", { run, tags: tags.value.split(","), note: note.value });
      tags.value = value.tags.join(", ");
      announce("Tags and note are kept.");
    } catch (error) { announce(error.message); }
  };
  const tags = h("input", { value: page.tags.join(", "), placeholder: "tags, with commas", "aria-label": "Tags of this run", onchange: save });
  const note = h("textarea", { rows: 1, placeholder: "a note on this run", "aria-label": "Note on this run", value: page.note, onchange: save });
  return h("p", { class: "tools" }, tags, note);
}

function lastPhase(page) {
  const names = (page.phases ?? []).map((phase) => phase.name);
  return names.includes("train") ? "train" : names.at(-1) ?? "train";
}

function report(each) {
  const parts = [["sampled", "success"], ["greedy", "greedy"]].filter(([, name]) => each[name] !== undefined)
    .map(([label, name]) => `${label} ${percent(each[name])} ${interval(each[`${name}_interval`])}`);
  if (each.reverse_kl !== undefined) parts.push(`reverse KL ${number(each.reverse_kl)}`);
  if (each.loss !== undefined) parts.push(`loss ${number(each.loss)}`);
  return parts.join(", ");
}

/** A metric as a curve; null where it was never logged. */
function line(phase, name) {
  const y = phase[name];
  return y?.some((value) => typeof value === "number") ? { label: words(name), x: phase.step, y } : null;
}

function share(phase, [part, whole]) {
  const parts = phase[part], wholes = phase[whole];
  return parts && wholes ? { label: "share", x: phase.step, y: parts.map((value, index) => value === null || !wholes[index] ? null : value / wholes[index]) } : null;
}

function varies(values) {
  const numbers = values.filter((value) => typeof value === "number");
  return numbers.some((value) => value !== numbers[0]);
}

/** Where the time of a step goes. */
function timeShares(phase) {
  if (!phase.step_s || !phase.rollout_s) return null;
  const parts = phase.step.map((_, index) => {
    const sampling = phase.rollout_s[index] ?? 0, grading = phase.grading_s?.[index] ?? 0;
    return [sampling - grading, grading, Math.max(0, (phase.step_s[index] ?? 0) - sampling)];
  });
  const rows = phase.step.map((step, index) => ({ label: `step ${step}`, parts: parts[index].map((value) => Math.max(0, Number(value.toFixed(3)))) }));
  const stride = Math.ceil(rows.length / 80);
  return columns("Share of time, seconds", rows.filter((_, index) => index % stride === 0), ["sampling and environment", "grading", "learning"], ["c0", "c2", "c1"]);
}

/** Add the columns of new lines to those that are there. */
function merge(series, news) {
  for (const [phase, added] of Object.entries(news)) {
    const mine = series[phase] ??= { step: [] };
    const before = mine.step.length, count = added.step.length;
    for (const name of new Set([...Object.keys(mine), ...Object.keys(added)])) {
      mine[name] = [...(mine[name] ?? Array(before).fill(null)), ...(added[name] ?? Array(count).fill(null))];
    }
  }
}
