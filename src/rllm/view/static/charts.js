// Curves by uPlot, bars and sparklines as SVG.
import { h, svg } from "./dom.js";
import { number } from "./format.js";

const COLORS = 8;
const HEIGHT = 190;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** The colour of the n-th curve. */
export function curveColor(index) {
  return color(`--curve-${index % COLORS}`);
}

/** A figure of curves over steps: `curves` are [{label, x, y}], each with steps of its own. */
export function curves(title, series, { x = "step", format = number, low, high } = {}) {
  const holder = h("div", { class: "plot" });
  const last = series.map((each) => `${each.label} ${format(lastOf(each.y))}`).join(", ");
  const figure = h("figure", { class: "chart", "aria-label": `${title}: ${last}` },
    h("figcaption", {}, title, h("small", {}, ` ${series.length === 1 ? format(lastOf(series[0].y)) : ""}`)), holder);
  const steps = [...new Set(series.flatMap((each) => each.x))].sort((a, b) => a - b);
  const columns = series.map((each) => {
    const at = new Map(each.x.map((step, index) => [step, each.y[index]]));
    return steps.map((step) => at.get(step) ?? null);
  });
  whenShown(holder, () => draw(holder, [steps, ...columns], series, { x, format, low, high }));
  return figure;
}

function draw(holder, data, series, { x, format, low, high }) {
  const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const options = {
    width: Math.max(200, holder.clientWidth), height: HEIGHT,
    scales: { x: { time: false }, y: { range: (_, least, greatest) => range(least, greatest, low, high) } },
    axes: [{ ...axis, size: 28 }, { ...axis, size: 52, values: (_, values) => values.map((value) => format(value)) }],
    legend: { show: false },
    cursor: { y: false, points: { size: 6 } },
    series: [{ label: x }, ...series.map((each, index) => ({
      label: each.label, stroke: curveColor(each.color ?? index), width: 1.5, spanGaps: true,
      dash: each.dashed ? [4, 4] : undefined, points: { show: data[0].length < 30, size: 4 }, value: (_, value) => format(value),
    }))],
    hooks: { setCursor: [(plot) => note(holder, plot, series, format)] },
  };
  const plot = new uPlot(options, data, holder);
  holder.append(h("output", { class: "reading", "aria-hidden": "true" }), series.length > 1 ? h("p", { class: "keys" }, series.map((each, index) =>
    h("span", {}, h("i", { class: `key c${(each.color ?? index) % COLORS}` }), each.label))) : "");
  new ResizeObserver(() => {
    const width = Math.max(200, holder.clientWidth);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
  }).observe(holder);
}

/** The values under the pointer, in words. */
function note(holder, plot, series, format) {
  const reading = holder.querySelector(".reading");
  if (!reading) return;
  const index = plot.cursor.idx;
  reading.textContent = index === null || index === undefined ? "" :
    `${plot.data[0][index]}: ${series.map((each, place) => `${series.length > 1 ? `${each.label} ` : ""}${format(plot.data[place + 1][index])}`).join(", ")}`;
}

function range(least, greatest, low, high) {
  const bottom = low ?? least ?? 0, top = high ?? greatest ?? 1;
  if (bottom === top) return [bottom - (Math.abs(bottom) || 1) * 0.1, top + (Math.abs(top) || 1) * 0.1];
  const space = 0.05 * (top - bottom);
  return [low ?? bottom - space, high ?? top + space];
}

function lastOf(values) {
  for (let index = values.length - 1; index >= 0; index -= 1) if (values[index] !== null && values[index] !== undefined) return values[index];
  return null;
}

/** Draw when the element has come into view: a run has dozens of curves. */
function whenShown(element, work) {
  const observer = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    observer.disconnect();
    work();
  });
  observer.observe(element);
}

/** A small curve for a table. */
export function sparkline(values, label) {
  const width = 120, height = 24, kept = values.filter((value) => value !== null);
  if (kept.length < 2) return h("span", { class: "dim" }, "–");
  const least = Math.min(...kept), greatest = Math.max(...kept), size = greatest - least || 1;
  const points = values.map((value, index) => value === null ? "" :
    `${(2 + (width - 4) * index / (values.length - 1)).toFixed(1)},${(height - 3 - (height - 6) * (value - least) / size).toFixed(1)}`);
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", class: "spark",
    "aria-label": `${label}: from ${number(values[0])} to ${number(values.at(-1))}` },
  svg("polyline", { points: points.filter(Boolean).join(" "), fill: "none", "stroke-width": 1.5 }));
}

/** Stacked columns: `rows` are [{label, parts: [counts]}], `names` those of the parts, `classes` their look. */
export function columns(title, rows, names, classes) {
  const width = 640, height = 150, bar = width / Math.max(1, rows.length);
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height + 16}`, role: "img", class: "columns", "aria-label":
    `${title}: ${rows.length ? `step ${rows.at(-1).label}: ${names.map((name, part) => `${name} ${rows.at(-1).parts[part]}`).join(", ")}` : "nothing yet"}` });
  rows.forEach((row, index) => {
    const total = row.parts.reduce((sum, part) => sum + part, 0) || 1;
    let top = height;
    row.parts.forEach((part, place) => {
      const size = height * part / total;
      if (!part) return;
      top -= size;
      picture.append(svg("rect", { x: (index * bar).toFixed(2), y: top.toFixed(2), width: Math.max(0.5, bar - (bar > 4 ? 1 : 0)).toFixed(2),
        height: size.toFixed(2), class: classes[place] }, svg("title", {}, `${row.label}: ${names[place]} ${part} of ${total}`)));
    });
  });
  if (rows.length) picture.append(
    svg("text", { x: 0, y: height + 12, class: "tick" }, rows[0].label),
    svg("text", { x: width, y: height + 12, class: "tick", "text-anchor": "end" }, rows.at(-1).label));
  return h("figure", { class: "chart wide" }, h("figcaption", {}, title), picture,
    h("p", { class: "keys" }, names.map((name, place) => h("span", {}, h("i", { class: `key ${classes[place]}` }), name))));
}
