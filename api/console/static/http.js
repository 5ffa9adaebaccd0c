// Calls the server's API with the browser's cookie. Addresses are relative to the page, so a proxy may add a prefix.
// Knows nothing of pages: `onSignedOut` and `onReach` are set by app.js.

export class ApiError extends Error {
  constructor(status, fields, headers) {
    super(fields.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = fields.code ?? "";
    this.param = fields.param ?? null;
    this.details = fields;
    this.retryAfter = Number(headers?.get("retry-after-ms") ?? 0) / 1000;
    this.requestId = headers?.get("x-request-id") ?? null;
  }

  /** Whether the server, or its engine, does not answer now. */
  get isAway() {
    return this.status === 0 || this.status >= 502 && this.status <= 504;
  }
}

export const client = {
  csrf: "",
  /** Called at a 401. Resolves when the user has signed in again; rejects if the page is about to be replaced. */
  onSignedOut: async () => { throw new ApiError(401, {}); },
  /** Called when the token belongs to another sign-in, in another tab. Returns whether to try again. */
  onForged: async () => false,
  /** Called after each answer with null, or with the error if the server is away. */
  onReach: () => {},
};

export async function fetchApi(method, path, { body, signal, headers = {} } = {}) {
  for (let attempt = 0; ; attempt += 1) {
    const answer = await send(method, path, body, signal, headers);
    if (answer.ok || answer.status === 304) {
      client.onReach(null);
      return answer;
    }
    const error = await errorOf(answer);
    if (error.status === 401) {
      await client.onSignedOut(error);
      continue;
    }
    if (error.code === "csrf_token" && attempt === 0 && await client.onForged()) continue;
    client.onReach(error.isAway ? error : null);
    throw error;
  }
}

async function send(method, path, body, signal, headers) {
  const sent = { accept: "application/json", ...headers };
  if (method !== "GET") sent["x-graftwork-csrf"] = client.csrf;
  if (body !== undefined) sent["content-type"] = "application/json";
  try {
    return await fetch(path, {
      method, signal, headers: sent, cache: "no-store", credentials: "same-origin", redirect: "error",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const away = new ApiError(0, { message: "The server does not answer. Is your connection up?", code: "unreachable" });
    client.onReach(away);
    throw away;
  }
}

async function errorOf(answer) {
  let fields = {};
  try {
    fields = (await answer.json()).error ?? {};
  } catch { /* a proxy's page has no JSON */ }
  return new ApiError(answer.status, fields, answer.headers);
}

async function json(method, path, options) {
  const answer = await fetchApi(method, path, options);
  return answer.status === 204 ? null : answer.json();
}

export const api = {
  get: (path, options) => json("GET", path, options),
  post: (path, body = {}, options) => json("POST", path, { ...options, body }),
  put: (path, body, options) => json("PUT", path, { ...options, body }),
  patch: (path, body, options) => json("PATCH", path, { ...options, body }),
  delete: (path, options) => json("DELETE", path, options),
};

/** A path with its parts escaped: at`v1/sessions/${id}`. */
export function at(texts, ...parts) {
  return texts.reduce((path, text, index) => path + encodeURIComponent(parts[index - 1]) + text);
}

/** Adds query parameters that are not null. */
export function query(path, fields) {
  const given = Object.entries(fields).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `${path}?${new URLSearchParams(given)}` : path;
}

/** Yields {event, data, id} of each server-sent event of an answer. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let block = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line !== "") {
        block.push(line);
        continue;
      }
      const event = parse(block);
      block = [];
      if (event) yield event;
    }
  }
}

function parse(lines) {
  const event = { event: "message", data: "", id: null };
  for (const line of lines) {
    const colon = line.indexOf(":");
    const name = line.slice(0, colon);
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (name === "data") event.data += value;
    else if (name === "event") event.event = value;
    else if (name === "id") event.id = Number(value);
  }
  return event.data ? event : null;
}

/** Uploads a form and reports its progress from 0 to 1. fetch cannot tell how much it has sent. */
export function upload(path, form, { signal, onProgress }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", path);
    request.responseType = "text";
    request.setRequestHeader("x-graftwork-csrf", client.csrf);
    request.upload.addEventListener("progress", (event) => event.lengthComputable && onProgress(event.loaded / event.total));
    request.addEventListener("error", () => reject(new ApiError(0, { message: "The connection broke while the files were sent. Try again." })));
    request.addEventListener("abort", () => reject(new DOMException("", "AbortError")));
    request.addEventListener("load", () => {
      let body = {};
      try {
        body = JSON.parse(request.responseText);
      } catch { /* a proxy's page */ }
      if (request.status < 300) resolve(body);
      else reject(new ApiError(request.status, body.error ?? {}, { get: (name) => request.getResponseHeader(name) }));
    });
    signal?.addEventListener("abort", () => request.abort());
    request.send(form);
  });
}
