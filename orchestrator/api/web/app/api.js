// Requests to the job API, with the token of this tab's session. Every failure is a Problem: one line a person can read.
import { signal } from "app/html.js";

const KEY = "rlhf-token";
export const tokenWanted = signal(null); // what the server said when it refused; null: it has not
export const reachable = signal(true);

export class Problem extends Error {
  constructor(status, detail, errors = []) {
    super([detail, ...errors].join("\n"));
    this.status = status;
  }
}

const given = /^#token=(.+)$/.exec(location.hash)?.[1]; // in the address that `serve` prints; taken out of it at once
if (given) {
  sessionStorage.setItem(KEY, decodeURIComponent(given));
  history.replaceState(null, "", location.pathname + location.search);
}
export const token = () => sessionStorage.getItem(KEY) ?? "";
export function setToken(text) {
  if (text) sessionStorage.setItem(KEY, text);
  else sessionStorage.removeItem(KEY);
  tokenWanted.value = null;
}

export function headers(more = {}) {
  return token() ? { Authorization: `Bearer ${token()}`, ...more } : more;
}

export async function problemOf(response) {
  let detail = `the server answered ${response.status}`;
  let errors = [];
  try {
    const body = await response.json();
    detail = body.detail ?? detail;
    errors = body.errors ?? [];
  } catch {
    // no problem document: a proxy's page
  }
  if (response.status === 401) tokenWanted.value = token() ? detail : "";
  return new Problem(response.status, detail, errors);
}

// Raises Problem; status 0 where no server answers.
export async function ask(path, query = {}, options = {}) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") search.append(name, one);
    }
  }
  const text = search.toString();
  let response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    reachable.value = false;
    throw new Problem(0, "The server does not answer. Jobs go on without it; this page tries again by itself.");
  }
  reachable.value = true;
  if (!response.ok) throw await problemOf(response);
  return response.status === 204 ? null : response.json();
}

// Saves what a path answers, which wants the token, as a file.
export async function download(path, name) {
  const response = await fetch(path, { headers: headers() });
  if (!response.ok) throw await problemOf(response);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
