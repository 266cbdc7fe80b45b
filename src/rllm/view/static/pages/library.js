// Data sets, models, runs of workers, sessions of gateways.
import { address, details, facts, h, link, moveFocus, table } from "../dom.js";
import { ask } from "../api.js";
import { date, interval, number, percent, plural, seconds, words } from "../format.js";
import { messageView } from "./episode.js";
import { rowKeys } from "./episodes.js";

const n = { class: "n" };

/** Tables with a filter over their rows, which is kept in the address. */
function listing(name, parameters, title, what, body) {
  const holder = h("div", {}, body), rows = [...holder.querySelectorAll("tbody tr")];
  const others = Object.fromEntries([...parameters].filter(([key]) => key !== "filter"));
  const draw = () => {
    const terms = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach((row) => { row.hidden = !terms.every((term) => row.textContent.toLowerCase().includes(term)); });
  };
  const field = h("input", { type: "search", placeholder: "filter", "aria-label": `Filter ${title.toLowerCase()}`, value: parameters.get("filter") ?? "",
    oninput: () => { history.replaceState(null, "", address(name, { ...others, filter: field.value })); draw(); } });
  draw();
  return { title, content: [h("h1", {}, title), h("p", { class: "dim" }, what), rows.length ? h("p", { class: "tools" }, field) : null, holder], keys: rowKeys(holder) };
}

export async function datasetsPage(parameters) {
  const { datasets } = await ask("datasets");
  return listing("datasets", parameters, "Data sets", "Registered on this machine: rllm dataset register NAME FILE, or rllm dataset pull NAME.",
    datasets.length ? table(plural(datasets.length, "data set"), [["name", {}], ["split", {}], ["rows", n], ["columns", {}], ["about", {}], ["registered", {}]],
      datasets.flatMap((each) => Object.entries(each.splits).map(([split, facts_]) => h("tr", {},
        h("td", {}, link("dataset", { name: each.name, split }, each.name)), h("td", {}, split), h("td", n, number(facts_.rows)), h("td", {}, facts_.columns.join(", ")),
        h("td", {}, each.description || each.source), h("td", { class: "when" }, String(facts_.registered_at ?? "").replace("T", " ").slice(0, 16)))))) : h("p", {}, "None yet."));
}

const LIMIT = 50;

export async function datasetPage(parameters) {
  const name = parameters.get("name"), split = parameters.get("split"), q = parameters.get("q") ?? "", offset = Number(parameters.get("offset") ?? 0);
  const page = await ask("dataset", { name, split, q, offset: offset || "", limit: LIMIT });
  const go = (changes) => { location.hash = address("dataset", { name, split: page.split, q, ...changes }); };
  const field = h("input", { type: "search", placeholder: "search in the rows", "aria-label": "Search in the rows", value: q, onkeydown: (event) => { if (event.key === "Enter") go({ q: field.value }); } });
  const columns = page.info.splits[page.split].columns, more = offset + page.rows.length < page.total;
  const turnPage = (by) => { if (by < 0 ? offset > 0 : more) go({ offset: String(Math.max(0, offset + by * LIMIT) || "") }); };
  return {
    title: `Data set ${name}`,
    content: [h("h1", {}, name), h("p", {}, page.info.description),
      h("p", { class: "tools" }, field, h("label", {}, "split ", h("select", { onchange: (event) => go({ split: event.target.value }) }, Object.keys(page.info.splits).map((each) => h("option", { value: each, selected: each === page.split }, each))))),
      facts([["rows", number(page.info.splits[page.split].rows)], ["source", page.info.source], ["sha256", page.info.splits[page.split].sha256.slice(0, 16)]]),
      table(`Rows of ${page.split}`, [["row", n], ...columns.map((column) => [column, {}])], page.rows.map((row) => h("tr", {}, h("td", n, row.number), columns.map((column) => h("td", {}, cell(row.fields[column])))))),
      h("p", { class: "tools" }, h("button", { type: "button", disabled: offset === 0, onclick: () => turnPage(-1) }, "← earlier"),
        h("span", {}, page.rows.length ? `${offset + 1} to ${offset + page.rows.length} of ${plural(page.total, "row")}` : "No row fits."), h("button", { type: "button", disabled: !more, onclick: () => turnPage(1) }, "later →"))],
    keys: { ArrowLeft: ["the page before", () => turnPage(-1)], ArrowRight: ["the page after", () => turnPage(1)] },
  };
}

function cell(text) {
  return text === undefined ? "" : text.length > 300 ? details(`${text.slice(0, 120)} …`, false, h("pre", {}, text)) : text;
}

export async function modelsPage(parameters) {
  const page = await ask("models");
  return listing("models", parameters, "Models", "Those that runs here have made, and those on servers that have a name: rllm model setup.", [
    page.trained.length ? table(`${plural(page.trained.length, "model")} of runs`, [["run", {}], ["files", {}], ["architecture", {}], ["layers", n], ["width", n], ["size", n], ["success of the run", n], ["made", {}]],
      page.trained.map((each) => h("tr", {}, h("td", {}, link("run", { run: each.run }, each.run)), h("td", {}, each.name), h("td", {}, each.shape.architectures?.[0] ?? each.shape.peft_type ?? each.shape.model_type ?? ""),
        h("td", n, number(each.shape.num_hidden_layers)), h("td", n, number(each.shape.hidden_size ?? each.shape.r)), h("td", n, `${number(each.bytes / 1e6)} MB`), h("td", n, success(each.reports.after)), h("td", { class: "when" }, date(each.made_at))))) : h("p", {}, "No run here has made one yet."),
    page.named.length ? table(plural(page.named.length, "model on a server", "models on servers"), [["name", {}], ["provider", {}], ["model", {}], ["address", {}]],
      page.named.map((each) => h("tr", {}, h("td", {}, each.name, each.is_default ? h("small", {}, " default") : null), h("td", {}, each.provider), h("td", {}, each.model), h("td", {}, each.base_url)))) : null]);
}

function success(report) {
  const kind = report?.success === undefined ? "greedy" : "success";
  return report?.[kind] === undefined ? "–" : [percent(report[kind]), h("small", {}, ` ${interval(report[`${kind}_interval`])}`)];
}

export async function workersPage(parameters) {
  const { stores } = await ask("workers");
  return listing("workers", parameters, "Workers", "Runs of rllm worker, the newest first.", stores.length ? stores.map((store) => table(`${plural(store.runs.length, "run")} in ${store.key}`,
    [["run", {}], ["worker", {}], ["status", {}], ["attempts", n], ["asked", {}], ["answered", {}], ["score", n], ["begun", {}], ["took", n]],
    store.runs.map((run) => h("tr", {}, h("td", {}, link("worker_run", { store: store.key, id: run.run_id }, run.key)), h("td", {}, run.worker_id), h("td", {}, words(run.status ?? "not final")), h("td", n, run.attempts),
      h("td", {}, run.inputs), h("td", {}, run.response), h("td", n, number(run.feedback.score)), h("td", { class: "when" }, date(run.created_at)), h("td", n, run.ended_at ? seconds(run.ended_at - run.created_at) : "–"))))) : h("p", {}, "There is no runs.sqlite of workers in these directories; name its directory: rllm view DIR."));
}

export async function workerRunPage(parameters) {
  const page = await ask("worker_run", { store: parameters.get("store"), id: parameters.get("id") });
  return {
    title: `${page.worker_id} ${page.key}`,
    content: [h("h1", {}, page.worker_id, h("small", {}, ` ${page.key}`)), h("p", {}, link("workers", {}, "all runs of workers")),
      facts([["status", words(page.status ?? "not final")], ["attempts", page.attempts], ["begun", date(page.created_at)], ["took", page.ended_at ? seconds(page.ended_at - page.created_at) : null], ["score", page.feedback.score], ["label", page.feedback.label]]),
      h("h2", {}, "Asked"), h("pre", {}, page.inputs), h("h2", {}, "Answered"), h("pre", {}, page.response || "nothing yet"),
      page.feedback.outputs ? [h("h2", {}, "Corrected"), h("pre", {}, JSON.stringify(page.feedback.outputs, null, 2))] : null,
      h("h2", {}, "Attempts"), page.attempts_made.map((each) => details(`Attempt ${each.number}: ${words(each.status ?? "cut off")}${each.ended_at ? `, ${seconds(each.ended_at - each.started_at)}` : ""}`, false,
        facts([["session", each.session], ["begun", date(each.started_at)]]), each.error ? h("pre", { class: "problem" }, each.error) : null, each.result ? h("pre", {}, each.result) : null))],
    keys: { ArrowDown: ["the next attempt", () => moveFocus("#content summary", 1)], ArrowUp: ["the attempt before", () => moveFocus("#content summary", -1)] },
  };
}

export async function sessionsPage(parameters) {
  const ledger = parameters.get("ledger") ?? "", { ledgers } = await ask("sessions", { ledger, after: parameters.get("after") });
  return listing("sessions", parameters, "Gateway sessions", "Calls that programs made through a gateway, by session.", ledgers.length ? ledgers.map((each) => [
    facts([["ledger", each.key], ["calls", number(each.counts.recorded)], ["sessions", number(each.counts.sessions)], ["MB", number(each.counts.bytes / 1e6)]]),
    table(`Sessions in ${each.key}`, [["session", {}], ["calls", n], ["begun", {}], ["made with", {}]], each.sessions.map((session) => h("tr", {},
      h("td", {}, link("session", { ledger: each.key, id: session.id }, session.id)), h("td", n, number(session.choices)), h("td", { class: "when" }, date(session.created_at)), h("td", {}, session.data === "{}" ? "" : session.data)))),
    each.sessions.length === 100 ? h("p", {}, link("sessions", { ledger: each.key, after: each.sessions.at(-1).id }, "later →")) : null]) : h("p", {}, "There is no ledger in these directories; name it: rllm view DIR."));
}

export async function sessionPage(parameters) {
  const ledger = parameters.get("ledger"), id = parameters.get("id"), offset = Number(parameters.get("offset") ?? 0);
  const page = await ask("session", { ledger, id, offset: offset || "" });
  const next = offset + page.calls.length;
  return {
    title: `Session ${id}`,
    content: [h("h1", {}, id), h("p", { class: "tools" }, link("sessions", { ledger }, "all sessions"), plural(page.total, "call")), page.data === "{}" ? null : details("Made with", false, h("pre", {}, page.data)),
      page.calls.map((call) => h("article", { class: "turn", "aria-label": `Call ${call.number + 1}`, tabindex: "-1" },
        h("h3", {}, `Call ${call.number + 1}`, " ", h("small", {}, [call.model, call.dialect, call.status, words(call.finish_reason), `conversation ${call.conversation}, segment ${call.segment}`, `${number(call.num_prompt_ids)} + ${number(call.num_completion_ids)} tokens`].filter(Boolean).join(" · "))),
        call.no_ids_because ? h("p", { class: "hint" }, `No ids: ${call.no_ids_because}`) : null, call.error ? h("p", { class: "problem" }, call.error) : null,
        call.prompt ? messageView({ role: "prompt", text: call.prompt }) : null, call.messages.map(messageView), call.response ? messageView(call.response) : null)),
      h("p", { class: "tools" }, offset ? link("session", { ledger, id }, "← first calls") : null, next < page.total ? link("session", { ledger, id, offset: next }, "later →") : null)],
    keys: { ArrowDown: ["the next call", () => moveFocus(".turn", 1)], ArrowUp: ["the call before", () => moveFocus(".turn", -1)],
      ArrowLeft: ["the first calls", () => { if (offset) location.hash = address("session", { ledger, id }); }], ArrowRight: ["later calls", () => { if (next < page.total) location.hash = address("session", { ledger, id, offset: next }); }] },
  };
}
