// What WebEnv asks of a page. It runs in an isolated world of each document: the page shares the DOM with it, but can
// neither see nor replace what is defined here. Every walk has a limit, because pages are written by others.
globalThis.rllm ??= (() => {
  let ids = new WeakMap();
  const elements = new Map();
  let nextId = 1;
  let isLeaving = false;
  addEventListener("beforeunload", () => { isLeaving = true; });

  const ROLES = {
    A: "link", AREA: "link", ARTICLE: "article", BUTTON: "button", CANVAS: "canvas", DETAILS: "group", DIALOG: "dialog",
    FORM: "form", H1: "heading", H2: "heading", H3: "heading", H4: "heading", H5: "heading", H6: "heading",
    IFRAME: "iframe", IMG: "image", LI: "listitem", MAIN: "main", METER: "meter", NAV: "navigation", OL: "list",
    OPTION: "option", PROGRESS: "progressbar", SELECT: "combobox", SUMMARY: "button", SVG: "graphic", TABLE: "table",
    TD: "cell", TEXTAREA: "textbox", TH: "columnheader", TR: "row", UL: "list", VIDEO: "video",
  };
  const INPUTS = {
    button: "button", checkbox: "checkbox", color: "colorpicker", date: "datepicker", file: "fileinput", image: "button",
    number: "spinbutton", radio: "radio", range: "slider", reset: "button", search: "searchbox", submit: "button",
  };
  const SHAPES = new Set(["CIRCLE", "ELLIPSE", "LINE", "PATH", "POLYGON", "POLYLINE", "RECT", "TEXT"]);
  const LEAVES = new Set(["BUTTON", "OPTION", "TEXTAREA", "SELECT", "A", "SUMMARY", "CANVAS", "VIDEO", "IMG"]);
  const PLAIN = new Set(["table", "row", "list", "listitem", "cell", "form", "group", "graphic", "main", "article"]);
  const SILENT = new Set(["SCRIPT", "STYLE", "NOSCRIPT", "TEMPLATE", "HEAD", "META", "LINK", "TITLE"]);
  // Elements whose text is a part of the line that holds them.
  const INLINE = new Set(["B", "BIG", "BR", "CODE", "EM", "FONT", "I", "LABEL", "SMALL", "STRONG", "SUB", "SUP", "U", "WBR"]);

  const tag = (element) => element.tagName.toUpperCase();
  const clean = (text, limit) => {
    const line = text.slice(0, 4 * limit).replace(/[\s\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]+/g, " ").trim();
    return line.length > limit ? line.slice(0, limit - 1) + "…" : line;
  };

  function idOf(element) {
    let id = ids.get(element);
    if (id === undefined) {
      id = nextId++;
      ids.set(element, id);
      elements.set(id, new WeakRef(element));
    }
    return id;
  }

  function elementOf(id) {
    const element = elements.get(id)?.deref();
    return element?.isConnected ? element : null;
  }

  function roleOf(element) {
    const role = element.getAttribute("role");
    if (role && role !== "presentation" && role !== "none") return clean(role, 20);
    const name = tag(element);
    if (name === "INPUT") return INPUTS[(element.type || "text").toLowerCase()] ?? "textbox";
    if (name === "A" && !element.hasAttribute("href") && !element.onclick) return "";
    if (name === "SELECT" && (element.multiple || element.size > 1)) return "listbox";
    if (SHAPES.has(name) && element.ownerSVGElement) return name === "TEXT" ? "svgtext" : name.toLowerCase();
    if (element.isContentEditable && !element.parentElement?.isContentEditable) return "textbox";
    return ROLES[name] ?? "";
  }

  // The steps of the W3C's accessible name computation that pages use.
  function nameOf(element, role, limit) {
    const labelledBy = element.getAttribute("aria-labelledby");
    if (labelledBy) {
      const parts = labelledBy.split(/\s+/, 8).map((id) => element.ownerDocument.getElementById(id)?.textContent ?? "");
      if (parts.join("").trim()) return clean(parts.join(" "), limit);
    }
    for (const attribute of ["aria-label", "alt"]) {
      const value = element.getAttribute(attribute);
      if (value?.trim()) return clean(value, limit);
    }
    const name = tag(element);
    if (name === "INPUT" && ["button", "submit", "reset"].includes(element.type)) return clean(element.value || element.type, limit);
    if (element.labels?.length) {
      const text = Array.from(element.labels, (label) => textOf(label, limit)).join(" ");
      if (text.trim()) return clean(text, limit);
    }
    if (["BUTTON", "A", "SUMMARY", "OPTION"].includes(name) || ["button", "link", "tab", "menuitem", "option", "heading"].includes(role)) {
      const text = textOf(element, limit);
      if (text.trim()) return clean(text, limit);
      const image = element.querySelector("img[alt], svg title");
      if (image) return clean(image.getAttribute("alt") ?? image.textContent, limit);
    }
    for (const attribute of ["title", "placeholder"]) {
      const value = element.getAttribute(attribute);
      if (value?.trim()) return clean(value, limit);
    }
    return "";
  }

  function textOf(element, limit) {
    let text = "";
    const walker = element.ownerDocument.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    for (let n = 0; n < 200 && text.length < 4 * limit && walker.nextNode(); n++) {
      const parent = walker.currentNode.parentElement;
      if (!SILENT.has(tag(parent)) && tag(parent) !== "OPTION" && tag(parent) !== "TEXTAREA") text += walker.currentNode.data.slice(0, 4 * limit) + " ";
      else if (tag(element) === "OPTION") text += walker.currentNode.data.slice(0, 4 * limit);
    }
    return text;
  }

  function statesOf(element, role, style) {
    const states = {};
    const name = tag(element);
    if (role === "checkbox" || role === "radio" || role === "switch") {
      states.checked = element.checked ?? element.getAttribute("aria-checked") === "true";
    }
    for (const state of ["expanded", "pressed", "selected"]) {
      const value = element.getAttribute(`aria-${state}`);
      if (value === "true" || value === "false") states[state] = value === "true";
    }
    if (name === "OPTION") states.selected = element.selected;
    if (name === "DETAILS") states.expanded = element.open;
    if (element.disabled || element.getAttribute("aria-disabled") === "true") states.disabled = true;
    if (element.required) states.required = true;
    if (element.readOnly && ["INPUT", "TEXTAREA"].includes(name)) states.readonly = true;
    if (name === "INPUT" && !["checkbox", "radio", "button", "submit", "reset", "image", "file", "password"].includes(element.type)) {
      states.value = clean(element.value, 200);
    }
    if (name === "INPUT" && element.type === "password") states.value = "*".repeat(Math.min(element.value.length, 20));
    if (name === "TEXTAREA") states.value = clean(element.value, 200);
    if (name === "SELECT") states.value = clean(Array.from(element.selectedOptions, (each) => each.label).join(", "), 200);
    if (role === "textbox" && element.isContentEditable) states.value = clean(element.innerText ?? "", 200);
    if (element.ownerSVGElement && SHAPES.has(name)) {
      if (style.fill && style.fill !== "none") states.fill = clean(style.fill, 30);
      if (name === "TEXT") states.text = clean(element.textContent, 80);
    }
    return states;
  }

  // The world's document, whatever frame of the same origin an element is in.
  function placeOf(element) {
    let box = element.getBoundingClientRect();
    let [x, y] = [box.x, box.y];
    for (let view = element.ownerDocument.defaultView; view && view !== window; view = view.parent) {
      const frame = view.frameElement;
      if (!frame) return null;
      const outer = frame.getBoundingClientRect();
      x += outer.x + frame.clientLeft;
      y += outer.y + frame.clientTop;
    }
    return { x, y, width: box.width, height: box.height };
  }

  function isShown(element, style, box) {
    if (style.visibility === "hidden" || style.visibility === "collapse" || Number(style.opacity) === 0) return false;
    return box.width > 0 && box.height > 0;
  }

  // One line of the tree per element that says or does something, in document order.
  function tree({ excluded, maxNodes, maxWalked, nameLimit, viewportOnly }) {
    const rows = [];
    const covered = new WeakSet();
    let walked = 0;
    let isCut = false;
    const hidden = excluded ? new Set(document.querySelectorAll(excluded)) : new Set();

    function push(depth, element, role, name, states, box) {
      rows.push([depth, idOf(element), role, name, states, Math.round(box.x), Math.round(box.y), Math.round(box.width), Math.round(box.height)]);
    }

    function ownText(element) {
      let text = "";
      for (const node of element.childNodes) {
        if (node.nodeType === Node.TEXT_NODE) text += node.data.slice(0, 4 * nameLimit) + " ";
        else if (node.nodeType === Node.ELEMENT_NODE && INLINE.has(tag(node)) && !node.querySelector("*")) text += textOf(node, nameLimit) + " ";
        if (text.length > 4 * nameLimit) break;
      }
      return clean(text, nameLimit);
    }

    function walk(element, depth) {
      if (rows.length >= maxNodes || walked >= maxWalked) {
        isCut = true;
        return;
      }
      walked += 1;
      const name = tag(element);
      if (SILENT.has(name) || hidden.has(element) || element.getAttribute("aria-hidden") === "true") return;
      const style = element.ownerDocument.defaultView.getComputedStyle(element);
      if (style.display === "none") return;
      const box = placeOf(element);
      if (box === null) return;
      const visible = isShown(element, style, box);
      const inView = box.x < innerWidth && box.y < innerHeight && box.x + box.width > 0 && box.y + box.height > 0;
      let inner = depth;
      const role = name === "OPTION" ? "option" : roleOf(element);
      const isLeaf = LEAVES.has(name) || (name === "INPUT") || ["button", "link", "tab", "menuitem", "checkbox", "radio", "option"].includes(role);
      if ((visible && (inView || !viewportOnly)) || name === "OPTION") {
        const isPlain = !role || PLAIN.has(role);
        const label = isPlain ? "" : nameOf(element, role, nameLimit);
        const states = statesOf(element, role, style);
        if (!isPlain) {
          push(depth, element, role, label, states, box);
          inner = depth + 1;
        } else if (!(INLINE.has(name) && covered.has(element))) {
          const text = name === "SVG" || (name === "LABEL" && element.control) ? "" : ownText(element);
          if (text) {
            push(depth, element, role && role !== "graphic" ? role : "text", text, states, box);
            for (const child of element.children) if (INLINE.has(tag(child)) && !child.querySelector("*")) covered.add(child);
            inner = depth + 1;
          } else if (!element.firstElementChild && !element.ownerSVGElement && name !== "BR" && looksLikeSomething(style, box)) {
            push(depth, element, "box", nameOf(element, "", nameLimit), colours(style), box);
          } else if (role && role !== "graphic" && element.children.length > 1) {
            push(depth, element, role, "", states, box);
            inner = depth + 1;
          }
        }
      }
      if (name === "IFRAME") {
        let document_ = null;
        try { document_ = element.contentDocument; } catch { /* of another origin: its content stays unknown */ }
        if (document_?.body) walk(document_.body, inner);
        return;
      }
      if (isLeaf && name !== "SELECT" && !element.querySelector("input, button, select, textarea, a[href]")) return;
      if (name === "SELECT" || name === "DATALIST") {
        for (const option of element.options ?? []) {
          if (rows.length >= maxNodes) { isCut = true; break; }
          push(inner, option, "option", clean(option.label || option.text, nameLimit), { selected: option.selected }, box);
        }
        return;
      }
      if (style.overflow === "hidden" && !visible) return;
      for (const child of element.shadowRoot?.children ?? []) walk(child, inner);
      for (const child of element.children) walk(child, inner);
    }

    function looksLikeSomething(style, box) {
      if (box.width < 4 || box.height < 4 || box.width * box.height > 0.8 * innerWidth * innerHeight) return false;
      const isPainted = style.backgroundImage !== "none" || !/^(rgba\(.*, 0\)|transparent)$/.test(style.backgroundColor);
      return isPainted || style.cursor === "pointer" || parseFloat(style.borderTopWidth) > 0;
    }

    function colours(style) {
      return /^(rgba\(.*, 0\)|transparent)$/.test(style.backgroundColor) ? {} : { fill: style.backgroundColor };
    }

    if (document.body) walk(document.body, 0);
    return { rows, isCut };
  }

  // Resolves when nothing has changed for `quietMs`, or after `limitMs`.
  function quiet(quietMs, limitMs) {
    return new Promise((resolve) => {
      let timer;
      const observer = new MutationObserver(() => arm());
      const end = (isQuiet) => {
        observer.disconnect();
        clearTimeout(timer);
        clearTimeout(limit);
        isLeaving = false;
        resolve(isQuiet);
      };
      const limit = setTimeout(() => end(false), limitMs);
      const arm = () => {
        clearTimeout(timer);
        timer = setTimeout(() => (isLeaving || document.readyState === "loading" ? arm() : end(true)), quietMs);
      };
      observer.observe(document, { subtree: true, childList: true, attributes: true, characterData: true });
      arm();
    });
  }

  // Where an element can be reached by the mouse, or why it cannot.
  function target(id, aim = true) {
    const element = elementOf(id);
    if (!element) return { error: elements.has(id) || id < nextId ? "it is no longer on the page" : "there is no such element" };
    element.scrollIntoView({ block: "nearest", inline: "nearest", behavior: "instant" });
    if (tag(element) === "OPTION") return { option: element.label };
    const box = placeOf(element);
    if (!box || box.width === 0 || box.height === 0) return { error: "it is not visible" };
    if (aim && (element.disabled || element.getAttribute("aria-disabled") === "true")) return { error: "it is disabled" };
    const inner = element.getClientRects()[0] ?? element.getBoundingClientRect();
    const own = element.getBoundingClientRect();
    const x = box.x + (inner.x - own.x) + inner.width / 2;
    const y = box.y + (inner.y - own.y) + inner.height / 2;
    if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) return { error: "it is outside of what can be scrolled to" };
    if (aim) {
      let hit = document.elementFromPoint(x, y);
      for (let depth = 0; hit?.shadowRoot && depth < 20; depth++) hit = hit.shadowRoot.elementFromPoint(x, y) ?? hit;
      if (hit?.tagName === "IFRAME" && hit.contentDocument && element.ownerDocument === hit.contentDocument) hit = element;
      const reaches = hit && (hit === element || element.contains(hit) || hit.contains(element) || hit.closest?.("label")?.control === element || (element.tagName === "LABEL" && element.control === hit));
      if (!reaches) return { error: `it is covered by a ${hit ? roleOf(hit) || hit.tagName.toLowerCase() : "border"}` };
    }
    return { x, y, tag: tag(element), role: roleOf(element), type: element.type ?? "", editable: isEditable(element) };
  }

  function isEditable(element) {
    if (element.isContentEditable) return true;
    if (tag(element) === "TEXTAREA") return !element.readOnly && !element.disabled;
    return tag(element) === "INPUT" && !element.readOnly && !element.disabled && !["checkbox", "radio", "button", "submit", "reset", "image", "file", "hidden"].includes(element.type);
  }

  // Puts `value` in a field as typing would: focus, all selected, input and change events. Returns why not, or "".
  function fill(id, value) {
    const element = elementOf(id);
    if (!element) return "it is no longer on the page";
    if (!isEditable(element)) return "nothing can be written in it";
    element.focus();
    if (element.isContentEditable) {
      element.ownerDocument.getSelection().selectAllChildren(element);
      element.ownerDocument.execCommand(value ? "insertText" : "delete", false, value);
      return "";
    }
    const prototype = tag(element) === "TEXTAREA" ? element.ownerDocument.defaultView.HTMLTextAreaElement.prototype : element.ownerDocument.defaultView.HTMLInputElement.prototype;
    Object.getOwnPropertyDescriptor(prototype, "value").set.call(element, value);
    if (element.value !== value && !["number", "range", "color"].includes(element.type) && element.maxLength < 0) return `it does not take ${JSON.stringify(clean(value, 60))}`;
    element.dispatchEvent(new Event("input", { bubbles: true, composed: true }));
    element.dispatchEvent(new Event("change", { bubbles: true }));
    return "";
  }

  function select(id, wanted) {
    const element = elementOf(id);
    if (!element) return "it is no longer on the page";
    const list = tag(element) === "OPTION" ? element.closest("select") : element;
    if (!list || tag(list) !== "SELECT") return "it is no list of options";
    if (list.disabled) return "it is disabled";
    if (wanted.length > 1 && !list.multiple) return "it takes one option";
    const options = Array.from(list.options);
    const chosen = [];
    for (const each of wanted) {
      const option = options.find((one) => one.label.trim() === each.trim()) ?? options.find((one) => one.value === each);
      if (!option) return `it has no option ${JSON.stringify(clean(each, 60))}; it has ${clean(options.map((one) => one.label).join(", "), 300)}`;
      if (option.disabled) return `the option ${JSON.stringify(clean(each, 60))} is disabled`;
      chosen.push(option);
    }
    list.focus();
    for (const option of options) option.selected = chosen.includes(option);
    list.dispatchEvent(new Event("input", { bubbles: true, composed: true }));
    list.dispatchEvent(new Event("change", { bubbles: true }));
    return "";
  }

  function focus(id) {
    const element = elementOf(id);
    if (!element) return "it is no longer on the page";
    element.focus();
    return element.ownerDocument.activeElement === element ? "" : "it takes no focus";
  }

  // Scrolls what is in the middle of the view and can be scrolled, else the page.
  function scroll(right, down) {
    let element = document.elementFromPoint(innerWidth / 2, innerHeight / 2);
    for (; element && element !== document.documentElement && element !== document.body; element = element.parentElement) {
      const before = [element.scrollLeft, element.scrollTop];
      element.scrollBy({ left: right, top: down, behavior: "instant" });
      if (element.scrollLeft !== before[0] || element.scrollTop !== before[1]) return;
    }
    window.scrollBy({ left: right, top: down, behavior: "instant" });
  }

  async function observe(options) {
    if (options.firstId === 0) {
      // A new episode in a document that had one before.
      ids = new WeakMap();
      elements.clear();
      nextId = 1;
    }
    nextId = Math.max(nextId, options.firstId);
    const isQuiet = options.limitMs > 0 ? await quiet(options.quietMs, options.limitMs) : true;
    const active = document.activeElement;
    const focused = active && active !== document.body && ids.has(active) ? ids.get(active) : null;
    return {
      ...tree(options), isQuiet, focused, nextId,
      title: clean(document.title, 100), url: location.href.slice(0, 500), readyState: document.readyState,
    };
  }

  return { observe, quiet, target, fill, select, focus, scroll, elementOf };
})();
