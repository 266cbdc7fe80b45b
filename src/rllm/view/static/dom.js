// Elements out of plain values. Text is only ever set as text: nothing here can make markup of a string.

/** An element: attributes by name (functions as listeners under onNAME), then children. */
export function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for pictures. */
export function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name === "value" || name === "checked" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

/** Adds children: elements as they are, everything else as text; lists are opened, nothing for nothing. */
export function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export function replace(element, ...children) {
  element.replaceChildren();
  return append(element, children);
}

/** A link within the page. */
export function link(path, parameters, ...children) {
  return h("a", { href: address(path, parameters) }, ...children);
}

export function address(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters ?? {})) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== null && each !== undefined && each !== "") query.append(name, each);
    }
  }
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

/** Focus the next (`by` 1) or the previous (-1) of what fits `selector`, and give it back. */
export function moveFocus(selector, by) {
  const all = [...document.querySelectorAll(selector)], place = all.indexOf(document.activeElement?.closest(selector));
  const next = all[Math.max(0, Math.min(all.length - 1, place + by))];
  next?.focus({ preventScroll: true });
  next?.scrollIntoView({ block: "start" });
  return next;
}

/** A table with a head; `columns` are [label, attributes]. */
export function table(caption, columns, rows) {
  return h(
    "div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, columns.map(([label, attributes]) => h("th", { scope: "col", ...attributes }, label)))),
      h("tbody", {}, rows)));
}

export function details(label, open, ...children) {
  return h("details", { open }, h("summary", {}, label), ...children);
}

/** Names and values, one pair a line. */
export function facts(pairs) {
  return h("dl", {}, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A share as a bar, with the bounds of its interval on it. */
export function rateBar(value, bounds) {
  const low = bounds?.[0] ?? value, high = bounds?.[1] ?? value;
  return svg("svg", { class: "bar", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { width: (100 * value).toFixed(2), height: 8 }), svg("rect", { class: "bounds", x: (100 * low).toFixed(2), width: Math.max(0.4, 100 * (high - low)).toFixed(2), y: 3, height: 2 }));
}

/** A sentence with `code` in it. */
export function prose(text) {
  return text.split("`").map((part, index) => index % 2 ? h("code", {}, part) : part);
}

export function announce(text) {
  const status = document.getElementById("status");
  status.textContent = text;
  setTimeout(() => { if (status.textContent === text) status.textContent = ""; }, 4000);
}

/** A button that copies what `text()` gives. */
export function copyButton(label, text) {
  return h("button", { type: "button", onclick: async () => {
    try {
      await navigator.clipboard.writeText(await text());
      announce(`${label}: copied`);
    } catch (error) {
      announce(`${label} could not be copied: ${error.message}`);
    }
  } }, label);
}
