// One episode: conversation, tokens with their numbers, timing, and copies of it for elsewhere.
import { address, append, copyButton, details, facts, h, link, moveFocus, replace, svg } from "../dom.js";
import { ask } from "../api.js";
import { number, plural, seconds, words } from "../format.js";
import { attemptMark } from "./step.js";
import { asCurl, asMessages, asPytest } from "./copies.js";
import { COLORINGS, tokenRow, tokenScale } from "./tokens.js";

const WINDOW = 50;
const LONG = 1500;

export async function episodePage(parameters) {
  const run = parameters.get("run"), id = Number(parameters.get("id"));
  const coloring = parameters.get("color") ?? "logprob";
  const from = Math.floor(Number(parameters.get("turn") ?? 0) / WINDOW) * WINDOW;
  const page = await ask("episode", { run, id, from: from || "" });
  const here = { run, id, color: coloring === "logprob" ? "" : coloring };
  const go = (changes) => { location.hash = address("episode", { ...here, ...changes }); };
  const toTurn = (by) => {
    const turn = moveFocus(".turn", by);
    if (turn) history.replaceState(null, "", address("episode", { ...here, agent: turn.dataset.agent, turn: turn.dataset.turn }));
  };
  const place = page.attempts.findIndex((each) => each.id === id);
  const toAttempt = (by) => { const other = page.attempts[place + by]; if (other) go({ id: other.id }); };
  const hasTokens = page.trajectories.some((trajectory) => trajectory.turns.some((turn) => turn.tokens.id.length));
  const kinds = Object.entries(COLORINGS).filter(([name]) => page.trajectories.some((each) => each.turns.some((turn) => turn.tokens[COLORINGS[name].column]?.length)));
  const content = [
    h("h1", {}, page.task_id, h("small", {}, `, attempt ${page.attempt}`)),
    h("p", { class: "tools" }, link("run", { run }, run), link("step", { run, phase: page.phase, step: page.step }, `${words(page.phase)} step ${page.step}`),
      link("attempts", { run, phase: page.phase, step: page.step, task: page.task_id }, "attempts side by side"),
      h("span", { class: "attempts" }, page.attempts.map((each) => {
        const mark = attemptMark(run, each);
        if (each.id === id) mark.setAttribute("aria-current", "page");
        return mark;
      })),
      page.previous === null ? null : link("episode", { run, id: page.previous, color: parameters.get("color") }, "← before"), page.next === null ? null : link("episode", { run, id: page.next, color: parameters.get("color") }, "next →")),
    facts([["reward", page.reward === null ? "not paid" : number(page.reward)], ["success", page.is_correct ? h("span", { class: "right" }, "yes") : h("span", { class: "wrong" }, "no")],
      ["outcome", words(page.outcome ?? "unjudged")], ["ended", words(page.termination_reason)], ["turns", page.num_steps], ["tokens", page.num_sampled_tokens],
      ["took", page.duration_s === null ? null : seconds(page.duration_s)], ["id", id]]),
    page.remark ? h("p", { class: "hint" }, page.remark) : null,
    details("Task", page.task.length < LONG, h("pre", {}, page.task)),
    page.info ? details("Info of the episode", false, h("pre", {}, page.info)) : null,
    page.artifacts ? details("Artifacts", false, h("pre", {}, page.artifacts)) : null,
    hasTokens && kinds.length ? h("p", { class: "tools legend" }, h("label", {}, "Colour tokens by ", h("select", { id: "coloring", onchange: (event) => go({ color: event.target.value }) },
      kinds.map(([name, kind]) => h("option", { value: name, selected: name === coloring }, kind.label)))), tokenScale(coloring)) : null,
    page.trajectories.map((trajectory) => trajectoryView(run, page, trajectory, coloring)),
  ];
  return {
    title: `${page.task_id}, attempt ${page.attempt}`, content,
    shown: () => {
      if (parameters.get("turn") === null && parameters.get("agent") === null) return;
      const turn = document.getElementById(`turn-${parameters.get("agent") || 0}-${parameters.get("turn") || 0}`);
      turn?.focus({ preventScroll: true });
      turn?.scrollIntoView({ block: "start" });
    },
    keys: {
      ArrowDown: ["the next turn", () => toTurn(1)], ArrowUp: ["the turn before", () => toTurn(-1)],
      ArrowLeft: ["the attempt before", () => toAttempt(-1)], ArrowRight: ["the next attempt", () => toAttempt(1)],
      n: ["the next episode", () => { if (page.next !== null) go({ id: page.next }); }], p: ["the episode before", () => { if (page.previous !== null) go({ id: page.previous }); }],
    },
  };
}

function trajectoryView(run, page, trajectory, coloring) {
  const list = h("div", { class: "conversation" }, trajectory.turns.map((turn) => turnView(run, page, trajectory, turn, coloring)));
  let shown = trajectory.from + trajectory.turns.length;
  const more = h("button", { type: "button", onclick: async () => {
    const next = await ask("episode", { run, id: page.id, trajectory: trajectory.index, from: shown });
    const turns = next.trajectories[0].turns;
    append(list, turns.map((turn) => turnView(run, page, trajectory, turn, coloring)));
    shown += turns.length;
    label();
  } });
  const label = () => {
    more.textContent = `Show ${Math.min(WINDOW, trajectory.num_turns - shown)} of ${plural(trajectory.num_turns - shown, "further turn")}`;
    more.hidden = shown >= trajectory.num_turns;
  };
  label();
  return h("section", { "aria-label": `Agent ${trajectory.name}` },
    h("h2", {}, trajectory.name, h("small", {}, ` ${plural(trajectory.num_turns, "turn")}, ${trajectory.reward === null ? "not paid" : `reward ${number(trajectory.reward)}`}`)),
    trajectory.error ? h("p", { class: "problem" }, trajectory.error) : null,
    trajectory.segments.length > 1 ? details(`${trajectory.segments.length} segments: rows of tokens that only grew`, false,
      h("ul", {}, trajectory.segments.map((each) => h("li", {}, `turn ${each.turn + 1}: ${each.reason}`)))) : null,
    waterfall(run, page, trajectory),
    trajectory.from > 0 ? h("p", {}, link("episode", { run, id: page.id }, `Turns from the first on (these begin at ${trajectory.from + 1})`)) : null,
    list, h("p", {}, more),
    trajectory.info ? details("Info of the agent", false, h("pre", {}, trajectory.info)) : null);
}

/** Seconds of every turn one after the other: queue, model, environment, grader. */
function waterfall(run, page, trajectory) {
  const { reward, tokens, ...times } = trajectory.overview, names = Object.keys(times);
  const total = names.reduce((sum, name) => sum + times[name].reduce((part, value) => part + (value ?? 0), 0), 0);
  if (!names.length || total === 0) return null;
  const count = trajectory.num_turns, width = 1000, row = count > 60 ? 3 : 12, picture = svg("svg", {
    viewBox: `0 0 ${width} ${count * row}`, class: "waterfall", role: "img", preserveAspectRatio: "none",
    "aria-label": `Time by turn: ${names.map((name) => `${timeName(name)} ${seconds(times[name].reduce((sum, value) => sum + (value ?? 0), 0))}`).join(", ")}` });
  picture.style.height = `${Math.min(360, count * row)}px`;
  let start = 0;
  for (let turn = 0; turn < count; turn += 1) {
    names.forEach((name, index) => {
      const size = times[name][turn] ?? 0;
      if (size > 0) picture.append(svg("rect", { x: (width * start / total).toFixed(2), y: turn * row, width: Math.max(1, width * size / total).toFixed(2), height: row - (row > 4 ? 2 : 0), class: `c${index}` },
        svg("title", {}, `turn ${turn + 1}: ${timeName(name)} ${seconds(size)}`)));
      start += size;
    });
  }
  return details(`Timing: ${seconds(total)}`, count <= 60, picture,
    h("p", { class: "keys" }, names.map((name, index) => h("span", {}, h("i", { class: `key c${index}` }), timeName(name)))));
}

function timeName(name) {
  return words(name.replace(/_s$/, "")).replace(/^env$/, "environment");
}

function turnView(run, page, trajectory, turn, coloring) {
  const name = `turn-${trajectory.index}-${turn.turn}`;
  const prompt = h("div", {});
  const full = () => ask("prompt", { run, id: page.id, trajectory: trajectory.index || "", turn: turn.turn || "" });
  return h("article", { class: "turn", id: name, "data-agent": trajectory.index || "", "data-turn": turn.turn, tabindex: "-1", "aria-label": `Turn ${turn.turn + 1}` },
    turn.segment && turn.turn > 0 ? h("p", { class: "segment" }, `A new segment: ${turn.segment}`) : null,
    h("h3", {}, `Turn ${turn.turn + 1}`, " ", h("small", {}, [
      turn.reward ? `reward ${number(turn.reward)}` : "", turn.finish_reason && turn.finish_reason !== "stop" ? words(turn.finish_reason) : "",
      ...Object.entries(turn.timings).map(([key, value]) => `${timeName(key)} ${seconds(value)}`), `${turn.num_prompt_ids.toLocaleString("en")} + ${turn.tokens.id.length} tokens`,
    ].filter(Boolean).join(" · "))),
    turn.messages.map(messageView), turn.messages.length === 0 && turn.observation ? messageView(turn.observation) : null,
    turn.pictures.length ? messageView({ role: "observation", name: "state", images: turn.pictures }) : null,
    messageView({ ...turn.answer, role: "assistant" }),
    turn.tokens.id.length ? tokenRow(turn.tokens, coloring) : null,
    turn.action ? h("div", { class: "action" }, h("span", { class: "role" }, "action"), h("pre", {}, turn.action)) : null,
    turn.info ? details("Info", false, h("pre", {}, turn.info)) : null,
    h("p", { class: "tools small" },
      h("button", { type: "button", onclick: async () => { replace(prompt, promptView(await full())); } }, "Exact prompt and ids"),
      copyButton("Copy messages", async () => asMessages(await full())), copyButton("Copy curl", async () => asCurl(await full())),
      copyButton("Copy pytest", async () => asPytest(await full(), page, trajectory, turn)),
      copyButton("Copy link", async () => `${location.origin}${location.pathname}${address("episode", { run, id: page.id, agent: trajectory.index || "", turn: turn.turn })}`)), prompt);
}

function promptView(full) {
  return details("Exact prompt", true, full.remark ? h("p", { class: "hint" }, full.remark) : null,
    h("pre", { class: "prompt" }, full.texts.join("")),
    details(`${plural(full.ids.length, "prompt id")}, ${plural(full.response_ids.length, "answer id")}`, false, h("pre", {}, JSON.stringify(full.ids)), h("pre", {}, JSON.stringify(full.response_ids))));
}

const FOLDED = new Set(["system"]);

/** A message: its role, then its text as text; thoughts and what is long are folded. */
export function messageView(message) {
  const body = [
    message.reasoning ? details("Reasoning", false, h("pre", {}, message.reasoning)) : null,
    message.text ? h("pre", {}, message.text) : null,
    (message.calls ?? []).map((call) => h("div", { class: "call" }, h("strong", {}, call.name || "(no name)"), call.id ? h("small", {}, ` ${call.id}`) : null, h("pre", {}, call.arguments))),
    (message.images ?? []).map((source) => source.startsWith("data:image/") ? h("img", { src: source, alt: "Picture in the conversation", loading: "lazy" }) : h("p", {}, h("small", {}, `picture ${source}`))),
  ];
  const label = [message.role || "message", message.name ? ` ${message.name}` : ""].join("");
  const isLong = (message.text ?? "").length > LONG && message.role !== "assistant";
  return h("div", { class: `message ${["system", "user", "assistant", "tool", "observation"].includes(message.role) ? message.role : "other"}` },
    FOLDED.has(message.role) || isLong ? details(`${label}${isLong ? `, ${plural(message.text.length, "character")}` : ""}`, !isLong, body) : [h("span", { class: "role" }, label), body]);
}
