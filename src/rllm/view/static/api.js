// What the pages know: answers of the server, or, in an exported file, those that were saved into it.

const saved = document.getElementById("answers");
const answers = saved ? JSON.parse(saved.textContent) : null;

/** Whether this is an exported file, behind which there is no server. */
export const isExport = answers !== null;
export const exportedPage = answers?.page ?? "";

/** The answer to `name` with `parameters`. Throws an Error with the server's sentence. */
export async function ask(name, parameters = {}) {
  const request = requestOf(name, parameters);
  if (isExport) {
    if (!(request in answers.answers)) throw new Error("This was not saved into the file; open the run with `rllm view`.");
    return answers.answers[request];
  }
  const response = await fetch(`/api/${request}`);
  const value = await response.json().catch(() => ({ error: `The server answered ${response.status}.` }));
  if (!response.ok) throw new Error(value.error ?? `The server answered ${response.status}.`);
  return value;
}

/** The request as exports name it: parameters in the order of their names, without empty ones. */
export function requestOf(name, parameters) {
  const query = new URLSearchParams();
  for (const key of Object.keys(parameters).sort()) {
    for (const value of [parameters[key]].flat()) {
      if (value !== null && value !== undefined && value !== "") query.append(key, value);
    }
  }
  const text = query.toString();
  return text ? `${name}?${text}` : name;
}
