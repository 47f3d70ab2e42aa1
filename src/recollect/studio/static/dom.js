// Small tools of the page: elements, messages, requests.

export const $ = (id) => document.getElementById(id);

/** An element: el("p", { className: "quiet" }, "words"). Words are always text, never markup. */
export function el(name, properties = {}, ...children) {
  const { dataset, aria, ...plain } = properties;
  const element = Object.assign(document.createElement(name), plain);
  Object.assign(element.dataset, dataset ?? {});
  for (const [key, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${key}`, value);
  element.append(...children);
  return element;
}

/** Show a message of an error in a place of the page, or take it away. */
export function problem(place, error) {
  place.replaceChildren(...(error ? [el("p", { className: "problem", role: "alert" }, String(error.message ?? error))] : []));
}

/** Ask the studio; whatever goes wrong becomes an Error with one clear line. */
export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("the studio does not answer: is it still running?");
  }
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => ({}));
  throw new Error(found.error ?? `the studio answered ${answer.status}`);
}

export const askJson = async (path, options) => (await ask(path, options)).json();

export const askFloats = async (path) => {
  const answer = await ask(path);
  return { values: new Float32Array(await answer.arrayBuffer()), shape: (answer.headers.get("X-Shape") ?? "").split(",").map(Number) };
};

export const count = (number, one, many = `${one}s`) => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;
