// The page: an address behind # names what is shown; each page gives {title, content, keys, refresh}.
import { announce, append, h, link, prose, replace } from "./dom.js";
import { runsPage } from "./pages/runs.js";
import { runPage } from "./pages/run.js";
import { comparisonPage } from "./pages/comparison.js";
import { episodesPage } from "./pages/episodes.js";
import { stepPage } from "./pages/step.js";
import { attemptsPage } from "./pages/attempts.js";
import { episodePage } from "./pages/episode.js";
import { evaluationPage } from "./pages/evaluation.js";
import { datasetPage, datasetsPage, modelsPage, sessionPage, sessionsPage, workerRunPage, workersPage } from "./pages/library.js";
import { asked, kept } from "./api.js";

const PAGES = {
  runs: runsPage, run: runPage, compare: comparisonPage, episodes: episodesPage, step: stepPage, attempts: attemptsPage,
  episode: episodePage, evaluation: evaluationPage,
  datasets: datasetsPage, dataset: datasetPage, models: modelsPage, workers: workersPage, worker_run: workerRunPage, sessions: sessionsPage, session: sessionPage,
};
const REFRESH_MS = 2000;
const THEMES = ["", "light", "dark"];

let shown = null;
let timer = 0;

/** {name, parameters} of the address. */
function place() {
  const text = location.hash.replace(/^#\/?/, "") || kept?.address || "runs";
  const [name, query = ""] = text.split("?", 2);
  return { name, parameters: new URLSearchParams(query) };
}

async function show() {
  clearTimeout(timer);
  asked.clear();
  const { name, parameters } = place(), content = document.getElementById("content"), here = location.hash;
  const page = PAGES[name];
  content.setAttribute("aria-busy", "true");
  try {
    if (!page) throw new Error(`There is no page “${name}”.`);
    const made = await page(parameters);
    if (location.hash !== here) return;  // somebody went on meanwhile
    shown = made;
    document.title = `${made.title} · rLLM`;
    replace(content, made.content);
    content.dataset.page = name;
    made.shown?.();
    if (made.refresh && !kept) timer = setTimeout(refresh, REFRESH_MS);
  } catch (error) {
    if (location.hash !== here) return;
    shown = null;
    replace(content, h("div", { class: "problem", role: "alert" }, h("strong", {}, "This cannot be shown. "), prose(error.message)));
  }
  content.removeAttribute("aria-busy");
}

async function refresh() {
  const page = shown;
  try {
    if (!document.hidden && await page.refresh() === false) return;
  } catch (error) {
    announce(`The server does not answer: ${error.message}`);
  }
  if (page === shown) timer = setTimeout(refresh, REFRESH_MS);
}

function top() {
  const theme = h("button", { type: "button", id: "theme", "aria-label": "Colours: as the system, light or dark", onclick: nextTheme }, "◐");
  append(document.getElementById("top"), [
    link("runs", {}, h("strong", {}, "rLLM")),
    h("nav", { "aria-label": "Pages" }, link("runs", {}, "Runs"), kept ? null : [["datasets", "Data sets"], ["models", "Models"], ["workers", "Workers"], ["sessions", "Sessions"]].map(([name, label]) => link(name, {}, label))),
    h("span", { class: "space" }),
    kept ? h("small", {}, "saved by rllm view --export") : h("button", { type: "button", onclick: savePage, "aria-label": "Save this page as one file", title: "Save this page as one file" }, "⤓"),
    h("button", { type: "button", onclick: showKeys, "aria-label": "Keys" }, "?"), theme,
  ]);
}

/** What is on screen as one file. */
function savePage() {
  const query = new URLSearchParams([["address", location.hash.replace(/^#\/?/, "") || "runs"], ...[...asked].map((request) => ["request", request])]);
  h("a", { href: `/export?${query}`, download: "" }).click();
}

function nextTheme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  setTheme(next);
  try { localStorage.setItem("theme", next); } catch { /* a file of its own may keep nothing */ }
  show();
  announce(`Colours: ${next || "as the system"}`);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

function showKeys() {
  const general = { "/": "search or filter; Enter leaves the field, Escape empties it", "?": "these keys", "g": "all runs" };
  const rows = Object.entries({ ...general, ...Object.fromEntries(Object.entries(shown?.keys ?? {}).map(([key, [label]]) => [key, label])) });
  const dialog = h("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() }, h("h2", {}, "Keys"),
    h("dl", {}, rows.map(([key, label]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, label)))),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}

function onKey(event) {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.ctrlKey || event.metaKey || event.altKey || typing) {
    const leaves = event.key === "Escape" || (event.key === "Enter" && typing?.matches("[type=search]"));
    if (leaves && typing && !typing.closest("dialog")) typing.blur();
    return;
  }
  if (event.key === "/") {
    const field = document.querySelector("[type=search]");
    if (!field) return;
    event.preventDefault();
    field.focus();
    field.select();
  } else if (event.key === "?") showKeys();
  else if (event.key === "g") location.hash = "#/runs";
  else if (shown?.keys?.[event.key]) {
    event.preventDefault();
    shown.keys[event.key][1]();
  }
}

let theme = "";
try { theme = localStorage.getItem("theme") ?? ""; } catch { /* a file of its own may keep nothing */ }
setTheme(THEMES.includes(theme) ? theme : "");
top();
addEventListener("hashchange", () => { scrollTo(0, 0); show(); });
addEventListener("keydown", onKey);
show();
