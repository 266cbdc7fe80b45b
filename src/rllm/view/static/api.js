// What the pages know: answers of the server.

/** The answer to `name` with `parameters`. Throws an Error with the server's sentence. */
export async function ask(name, parameters = {}) {
  const response = await fetch(`/api/${requestOf(name, parameters)}`);
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
