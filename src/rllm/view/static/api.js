// What the pages know: answers of the server, or in a file of its own those that were saved in it.

const element = document.getElementById("kept");
/** In a file of its own: {address, answers by request}; else null. */
export const kept = element ? JSON.parse(element.textContent) : null;
const answers = new Map(Object.entries(kept?.answers ?? {}).map(([request, value]) => [canonical(request), value]));
/** The requests of the page that is shown. */
export const asked = new Set();

/** The answer to `name` with `parameters`. Throws an Error with the server's sentence. */
export async function ask(name, parameters = {}) {
  const request = requestOf(name, parameters);
  asked.add(request);
  if (kept) {
    if (!answers.has(canonical(request))) throw new Error("This file does not hold it; `rllm view` on the run shows it.");
    return structuredClone(answers.get(canonical(request)));
  }
  return answerOf(await fetch(`/api/${request}`));
}

/** Send `value` to `name`: the only thing that a page changes are the tags and notes of its reader. */
export async function send(name, value) {
  return answerOf(await fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(value) }));
}

async function answerOf(response) {
  const value = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(value.error ?? `The server answered ${response.status}.`);
  return value;
}

/** The request: parameters in the order of their names, without empty ones. */
function requestOf(name, parameters) {
  const query = new URLSearchParams();
  for (const key of Object.keys(parameters).sort()) {
    for (const value of [parameters[key]].flat()) {
      if (value !== null && value !== undefined && value !== "") query.append(key, value);
    }
  }
  const text = query.toString();
  return text ? `${name}?${text}` : name;
}

/** The same text for requests that differ only in how characters are encoded. */
function canonical(request) {
  const [name, query = ""] = request.split(/\?(.*)/s);
  return `${name}?${new URLSearchParams(query)}`;
}
