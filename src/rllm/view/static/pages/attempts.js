// All attempts at one task side by side, and where the best and the worst of them part.
import { address, h, link, replace } from "../dom.js";
import { ask } from "../api.js";
import { elsewhereView } from "./evaluation.js";
import { number, plural, seconds, words } from "../format.js";

export async function attemptsPage(parameters) {
  const run = parameters.get("run"), phase = parameters.get("phase") ?? "train", step = parameters.get("step"), task = parameters.get("task");
  const order = parameters.get("order") ?? "attempt";
  const page = await ask("attempts", { run, phase, step, task });
  const sorted = [...page.attempts].sort({
    attempt: (a, b) => a.attempt - b.attempt, reward: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity), surprise: (a, b) => b.surprise - a.surprise,
  }[order] ?? ((a, b) => a.attempt - b.attempt));
  const part = page.parting, elsewhere = h("div", {});
  ask("elsewhere", { run, task }).then((other) => replace(elsewhere, elsewhereView(run, other.rows)), () => {});
  const focus = (by) => {
    const cards = [...document.querySelectorAll(".attempt h2 a")], place = cards.indexOf(document.activeElement);
    cards[Math.max(0, Math.min(cards.length - 1, place + by))]?.focus();
  };
  return {
    title: `${task}, ${plural(page.attempts.length, "attempt")}`,
    content: [
      h("h1", {}, task),
      h("p", { class: "tools" }, link("run", { run }, run), link("step", { run, phase, step }, `${words(phase)} step ${step ?? ""}`),
        h("label", {}, "sort by ", h("select", { onchange: (event) => { location.hash = address("attempts", { run, phase, step, task, order: event.target.value }); } },
          ["attempt", "reward", "surprise"].map((name) => h("option", { value: name, selected: name === order }, name))))),
      h("p", {}, page.tied ? "All attempts were paid alike: this group gives no signal." : `Mean reward ${number(page.mean)}, standard deviation ${number(page.deviation)}.`,
        page.total > page.attempts.length ? ` ${page.attempts.length} of ${page.total} attempts are shown.` : ""),
      part ? h("p", { class: "hint" }, "Between the best (", link("episode", { run, id: part.best }, part.best), ") and the worst (", link("episode", { run, id: part.worst }, part.worst),
        part.turn === null ? ") no written word differs." : `) the first difference is in turn ${part.turn + 1}; it is marked below.`) : null,
      h("div", { class: "side" }, sorted.map((each) => card(run, each, part))),
      elsewhere,
    ],
    keys: { ArrowLeft: ["the attempt to the left", () => focus(-1)], ArrowRight: ["the attempt to the right", () => focus(1)] },
  };
}

function card(run, each, part) {
  const look = each.is_correct ? "right" : "wrong";
  const role = part && (each.id === part.best ? "best" : each.id === part.worst ? "worst" : "");
  return h("section", { class: `attempt ${role ?? ""}`, "aria-label": `Attempt ${each.attempt}` },
    h("h2", {}, link("episode", { run, id: each.id }, `attempt ${each.attempt}`), role ? h("small", {}, ` ${role}`) : null),
    h("p", {}, h("span", { class: look }, each.reward === null ? "not paid" : `reward ${number(each.reward)}`),
      each.above_mean === null ? null : h("span", { title: "reward minus the group's mean" }, `, ${each.above_mean >= 0 ? "+" : ""}${number(each.above_mean)} to the mean`),
      each.advantage === undefined || each.advantage === null ? null : h("span", { title: "mean over its trained tokens" }, `, advantage ${number(each.advantage)}`),
      h("br"), h("small", {}, `${words(each.outcome ?? "unjudged")}, ${words(each.termination_reason)}, ${plural(each.num_steps, "turn")}, ${plural(each.num_sampled_tokens, "token")}, ${seconds(each.duration_s)}`)),
    each.trajectories.map((trajectory, role_) => [
      each.trajectories.length > 1 ? h("h3", {}, trajectory.name) : null,
      h("ol", { class: "turns" }, trajectory.turns.map((turn, index) => h("li", {
        class: part && part.turn === index && part.trajectory === role_ && role ? "parting" : null },
      h("pre", {}, turn.answer.text || h("span", { class: "dim" }, "(nothing)")), turn.reward ? h("small", {}, `reward ${number(turn.reward)}`) : null))),
      trajectory.num_turns > trajectory.turns.length ? h("p", {}, h("small", {}, `${trajectory.num_turns - trajectory.turns.length} further turns`)) : null,
    ]));
}
