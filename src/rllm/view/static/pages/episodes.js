// A table of episodes: filtered, sorted, searched, a page at a time.
import { address, h, link, replace, table } from "../dom.js";
import { ask } from "../api.js";
import { number, plural, seconds, words } from "../format.js";

const LIMIT = 100;
const OUTCOMES = ["scored", "truncated", "policy_failure", "infrastructure_failure", "cancelled", "unjudged"];
const ORDERS = [["", "as saved"], ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["duration", "duration"]];

export async function episodesPage(parameters) {
  const run = parameters.get("run");
  const wanted = Object.fromEntries(["phase", "step", "task", "outcome", "correct", "q", "order", "descending", "offset"].map((name) => [name, parameters.get(name) ?? ""]));
  const page = await ask("episodes", { run, ...wanted, limit: LIMIT });
  const go = (changes) => { location.hash = address("episodes", { run, ...wanted, offset: "", ...changes }); };
  const select = (label, name, choices) => h("label", {}, label, " ", h("select", { onchange: (event) => go({ [name]: event.target.value }) },
    choices.map(([value, text]) => h("option", { value, selected: value === wanted[name] }, text))));
  const field = h("input", { type: "search", placeholder: "search in all text", "aria-label": "Search in all text of the episodes", value: wanted.q,
    onkeydown: (event) => { if (event.key === "Enter") go({ q: field.value }); } });
  const step = h("input", { type: "number", min: 0, value: wanted.step, "aria-label": "Step", placeholder: "step", onchange: () => go({ step: step.value }) });
  const offset = Number(wanted.offset || 0), more = offset + page.episodes.length < page.total;
  const turnPage = (by) => { if (by < 0 ? offset > 0 : more) go({ offset: String(Math.max(0, offset + by * LIMIT) || "") }); };
  const rows = h("div", {}, page.episodes.length ? episodeTable(run, page) : h("p", {}, "No episode fits."));
  const isIndexing = page.progress && page.progress.steps < page.progress.of;
  return {
    title: `Episodes of ${run}`,
    content: [
      h("h1", {}, "Episodes of ", link("run", { run }, run)),
      h("p", { class: "tools" }, field,
        select("phase", "phase", [["", "all"], ...page.phases.map((phase) => [phase.name, `${words(phase.name)} (${phase.episodes.toLocaleString("en")})`])]), step,
        select("outcome", "outcome", [["", "all"], ...OUTCOMES.map((name) => [name, words(name)])]),
        select("success", "correct", [["", "all"], ["1", "success"], ["0", "no success"]]),
        select("sort by", "order", ORDERS), select("order", "descending", [["", "ascending"], ["1", "descending"]])),
      isIndexing ? h("p", { class: "hint" }, `The search index has ${page.progress.steps} of ${page.progress.of} steps; hits of the others follow.`) : null,
      rows,
      h("p", { class: "tools" }, h("button", { type: "button", disabled: offset === 0, onclick: () => turnPage(-1) }, "← earlier"),
        h("span", {}, page.total ? `${offset + 1} to ${offset + page.episodes.length} of ${plural(page.total, "episode")}` : "none"),
        h("button", { type: "button", disabled: !more, onclick: () => turnPage(1) }, "later →")),
    ],
    keys: { ArrowLeft: ["the page before", () => turnPage(-1)], ArrowRight: ["the page after", () => turnPage(1)], ...rowKeys(rows) },
    refresh: isIndexing ? async () => {
      const next = await ask("episodes", { run, ...wanted, limit: LIMIT });
      if (next.episodes.length) replace(rows, episodeTable(run, next));
      return next.progress.steps < next.progress.of;
    } : null,
  };
}

function episodeTable(run, page) {
  const hasHits = page.episodes.some((each) => each.hit);
  const number_ = { class: "n" };
  return table("Episodes", [["id", number_], ["task", {}], ["attempt", number_], ["phase", {}], ["step", number_], ["reward", number_], ["outcome", {}], ["ended", {}],
    ["turns", number_], ["tokens", number_], ["took", number_], ...(hasHits ? [["found", {}]] : [])],
  page.episodes.map((each) => h("tr", {},
    h("td", number_, link("episode", { run, id: each.id }, each.id)),
    h("td", {}, link("attempts", { run, phase: each.phase, step: each.step, task: each.task_id }, each.task_id)),
    h("td", number_, each.attempt), h("td", {}, words(each.phase)), h("td", number_, each.step),
    h("td", { class: `n ${each.is_correct ? "right" : "wrong"}` }, each.reward === null ? "not paid" : number(each.reward)),
    h("td", {}, words(each.outcome ?? "unjudged")), h("td", {}, words(each.termination_reason)),
    h("td", number_, each.num_steps), h("td", number_, each.num_sampled_tokens.toLocaleString("en")), h("td", number_, seconds(each.duration_s)),
    hasHits ? h("td", {}, snippet(each.hit)) : null)));
}

/** A place in a text; what was searched for stands between two control characters. */
export function snippet(text) {
  return (text ?? "").split("\u0002").map((part, index) => {
    if (index === 0) return part;
    const [hit, ...rest] = part.split("\u0003");
    return [h("mark", {}, hit), rest.join("")];
  });
}

/** Up and down through the links of a table's rows. */
export function rowKeys(holder) {
  const move = (by) => {
    const links = [...holder.querySelectorAll("tbody tr")].filter((row) => !row.hidden).map((row) => row.querySelector("a")).filter(Boolean);
    const place = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, place + by))]?.focus();
  };
  return { ArrowDown: ["the next row", () => move(1)], ArrowUp: ["the row before", () => move(-1)] };
}
