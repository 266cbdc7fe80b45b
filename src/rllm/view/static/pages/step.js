// The groups of a step: every task with its attempts, the most surprising first where that is asked for.
import { address, h, link, replace } from "../dom.js";
import { ask } from "../api.js";
import { number, percent, plural, words } from "../format.js";
import { rowKeys } from "./episodes.js";

export async function stepPage(parameters) {
  const run = parameters.get("run"), phase = parameters.get("phase") ?? "train", order = parameters.get("order") ?? "", filter = () => field.value;
  const page = await ask("groups", { run, phase, step: parameters.get("step"), order });
  const place = page.steps.indexOf(page.step);
  const to = (index) => { if (page.steps[index] !== undefined) location.hash = address("step", { run, phase, step: page.steps[index], order, filter: filter() }); };
  const tied = page.groups.filter((group) => group.tied).length, several = page.groups.filter((group) => group.attempts.length > 1).length;
  const body = h("div", { class: "groups" });
  const field = h("input", { type: "search", placeholder: "filter tasks", "aria-label": "Filter tasks", value: parameters.get("filter") ?? "",
    oninput: () => { history.replaceState(null, "", address("step", { run, phase, step: page.step, order, filter: filter() })); draw(); } });
  function draw() {
    const text = field.value.toLowerCase();
    replace(body, h("table", {},
      h("caption", {}, `Tasks of ${words(phase)} step ${page.step}`),
      h("thead", {}, h("tr", {}, ["task", "mean reward", "success", "attempts, by reward"].map((name, index) =>
        h("th", { scope: "col", class: index === 1 || index === 2 ? "n" : null }, name)))),
      h("tbody", {}, page.groups.filter((group) => group.task_id.toLowerCase().includes(text)).map((group) => h("tr", {},
        h("td", {}, link("attempts", { run, phase, step: page.step, task: group.task_id }, group.task_id)),
        h("td", { class: "n" }, number(group.mean), group.tied ? h("small", {}, " tie") : h("small", {}, ` ± ${number(group.deviation)}`)),
        h("td", { class: "n" }, percent(group.success, 0)),
        h("td", { class: "attempts" }, group.attempts.map((each) => attemptMark(run, each))))))));
  }
  draw();
  return {
    title: `${words(phase)} step ${page.step} of ${run}`,
    content: [
      h("h1", {}, link("run", { run }, run), `, ${words(phase)} step ${page.step}`),
      h("p", { class: "tools" },
        h("button", { type: "button", disabled: place <= 0, onclick: () => to(place - 1) }, "← step before"),
        h("label", {}, "step ", h("select", { onchange: (event) => to(Number(event.target.value)) },
          page.steps.map((step, index) => h("option", { value: index, selected: index === place }, step)))),
        h("button", { type: "button", disabled: place >= page.steps.length - 1, onclick: () => to(place + 1) }, "step after →"),
        h("label", {}, "sort by ", h("select", { onchange: (event) => { location.hash = address("step", { run, phase, step: page.step, order: event.target.value, filter: filter() }); } },
          [["", "task"], ["surprise", "surprise"]].map(([value, text]) => h("option", { value, selected: value === order }, text)))),
        field),
      h("p", {}, `${plural(page.groups.length, "task")}`, several ? `; ${tied} of ${several} groups tie and give no signal` : "",
        ". Surprise is how far a reward is from its group's mean, in standard deviations."),
      body,
    ],
    keys: { ArrowLeft: ["the step before", () => to(place - 1)], ArrowRight: ["the step after", () => to(place + 1)], ...rowKeys(body) },
  };
}

/** One attempt as a small link that shows reward and outcome. */
export function attemptMark(run, each) {
  const look = each.is_correct ? "right" : each.outcome === "scored" || each.outcome === "truncated" ? "wrong" : "failed";
  const reward = each.reward === null || each.reward === undefined ? "–" : number(each.reward);
  return h("a", { class: `mark ${look}`, href: address("episode", { run, id: each.id }),
    "aria-label": `Attempt ${each.attempt}: reward ${reward}, ${words(each.outcome ?? "unjudged")}`,
    title: `attempt ${each.attempt}, ${words(each.outcome ?? "unjudged")}, ${words(each.termination_reason ?? "")}` }, reward);
}
