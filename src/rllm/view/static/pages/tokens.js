// Sampled tokens coloured by one of their numbers, which are all shown when a token is pointed at or focused.
import { h } from "../dom.js";
import { number } from "../format.js";

/** name -> its column, its label, and value -> a shade from 0 to 1 of a scale: `one` way, or `two` ways from 0. */
export const COLORINGS = {
  logprob: { column: "logprob", label: "log-probability", scale: "one", shade: (value) => Math.min(1, -value / 3), ends: ["0: certain", "−3 nats or less"] },
  entropy: { column: "entropy", label: "entropy", scale: "one", shade: (value) => Math.min(1, value / 3), ends: ["0", "3 nats or more"] },
  advantage: { column: "advantage", label: "advantage", scale: "two", shade: (value) => Math.max(-1, Math.min(1, value / 2)), ends: ["−2 or less", "2 or more"] },
  ratio: { column: "ratio", label: "importance ratio", scale: "two", shade: (value) => Math.max(-1, Math.min(1, Math.log2(Math.max(value, 1e-9)) * 2)), ends: ["less likely now", "more likely now"] },
  version: { column: "version", label: "policy version", scale: "kinds", shade: (value) => value, ends: ["a colour for each version", ""] },
  mask: { column: "version", label: "mask (trained or not)", scale: "mask", shade: (value) => (value < 0 ? 1 : 0), ends: ["trained", "not sampled by a policy"] },
};
const STEPS = 8;
const NAMES = { id: "id", logprob: "log-probability", entropy: "entropy", advantage: "advantage", ratio: "ratio", version: "policy version" };

export function tokenRow(tokens, coloring) {
  const kind = COLORINGS[coloring] ?? COLORINGS.logprob, values = tokens[kind.column] ?? [];
  const columns = Object.keys(tokens).filter((name) => name !== "text" && tokens[name].length);
  const reading = h("output", { class: "reading" });
  const say = (event) => {
    const place = event.target.dataset?.token;
    if (place === undefined) return;
    reading.textContent = `${JSON.stringify(tokens.text[place])}  ${columns.map((name) => `${NAMES[name] ?? name} ${name === "logprob" ? tokens[name][place].toFixed(3) : number(tokens[name][place])}`).join("  ")}`;
  };
  return h("div", { class: "tokens", onmouseover: say, onfocusin: say, role: "group", "aria-label": `${tokens.id.length} tokens, coloured by ${kind.label}` },
    h("div", { class: "row", onkeydown: walk }, tokens.text.map((text, index) => h("span", {
      class: `token ${shadeClass(kind, values[index])}`, "data-token": index, tabindex: index === 0 ? "0" : "-1",
      title: columns.map((name) => `${NAMES[name] ?? name} ${number(tokens[name][index])}`).join("\n") }, visible(text)))), reading);
}

/** Left and right go from token to token. */
function walk(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  event.preventDefault();
  event.stopPropagation();
  const next = by > 0 ? event.target.nextElementSibling : event.target.previousElementSibling;
  if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
}

function shadeClass(kind, value) {
  if (value === null || value === undefined) return "";
  const shade = kind.shade(value);
  if (kind.scale === "kinds") return value < 0 ? "t-none" : `k${((shade % 8) + 8) % 8}`;
  if (kind.scale === "mask") return shade ? "t-none" : "k2";
  if (kind.scale === "two") return shade < 0 ? `n${Math.round(-shade * STEPS)}` : `p${Math.round(shade * STEPS)}`;
  return `s${Math.round(shade * STEPS)}`;
}

/** The colours of a scale with what they mean. */
export function tokenScale(coloring) {
  const kind = COLORINGS[coloring] ?? COLORINGS.logprob;
  const classes = { one: [0, 2, 4, 6, 8].map((step) => `s${step}`), two: ["n8", "n4", "p0", "p4", "p8"], kinds: ["k0", "k1", "k2"], mask: ["k2", "t-none"] }[kind.scale];
  return h("span", { class: "scale" }, h("small", {}, kind.ends[0]), classes.map((name) => h("i", { class: `token ${name}`, "aria-hidden": "true" }, "\u00a0\u00a0")), h("small", {}, kind.ends[1]));
}

/** A token with its spaces and line ends made visible. */
export function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}
