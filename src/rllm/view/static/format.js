// Numbers as people read them.

export function percent(value, digits = 1) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(digits)} %`;
}

export function interval(bounds) {
  return bounds ? `[${(100 * bounds[0]).toFixed(1)}, ${(100 * bounds[1]).toFixed(1)}]` : "";
}

/** Of a mean that is no share. */
export function bounds(pair) {
  return pair ? `[${number(pair[0], 2)}, ${number(pair[1], 2)}]` : "";
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits + 1)));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

export function date(timestamp) {
  if (!timestamp) return "–";
  const day = new Date(1000 * timestamp);
  const two = (part) => String(part).padStart(2, "0");
  return `${day.getFullYear()}-${two(day.getMonth() + 1)}-${two(day.getDate())} ${two(day.getHours())}:${two(day.getMinutes())}`;
}

export function words(name) {
  return String(name ?? "").replaceAll("_", " ");
}

export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

/** Names with numbers in them in the order of the numbers. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;
