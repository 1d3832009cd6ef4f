// The server's HTTP interface, as the pages use it: requests with the key, errors, streamed answers.

import { h } from "./dom.js";

const KEY = "bitnet-ops-key";
const ROOT = new URL("../", import.meta.url); // of the server, which may stand below a path of its host

/** What the server, or the way to it, answered instead. status: 0 without an HTTP answer. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code; // of the server's error, such as "context_length_exceeded"
    this.retryAfter = retryAfter; // seconds
  }
}

/** The response to a GET of `path`, or to a POST of `body`; asks for the key where one is wanted. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { Authorization: `Bearer ${key}` } : {};
    const options = { headers, signal, cache: "no-store" };
    if (body) {
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
      headers["Content-Type"] = "application/json";
    }
    let response;
    try {
      response = await fetch(new URL(path, ROOT), options);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Is it running?");
    }
    if (response.ok) return response;
    if (response.status === 401 && (await askForKey(key))) continue;
    throw await errorOf(response);
  }
}

async function errorOf(response) {
  let message = "";
  let code = "";
  try {
    ({ message, code } = (await response.json()).error);
  } catch {
    // Something between here and the server may answer in its own form.
  }
  const seconds = parseFloat(response.headers.get("Retry-After"));
  return new ApiError(String(message || `The server answered with status ${response.status}.`), {
    status: response.status,
    code,
    retryAfter: Number.isFinite(seconds) ? Math.min(Math.max(seconds, 0), 60) : null,
  });
}

let asking = null; // one dialog for all requests that wait for the key

/** Whether there is another key now than `refused`. */
function askForKey(refused) {
  if (sessionStorage.getItem(KEY) !== refused) return true;
  asking ??= new Promise((resolve) => {
    const input = h("input", {
      id: "key",
      type: "password",
      autocomplete: "current-password",
      required: true,
      "aria-describedby": "key-why",
    });
    const why = refused ? "The server refused this key." : "This server asks for an API key.";
    const dialog = h(
      "dialog",
      { class: "small", "aria-labelledby": "key-title" },
      h(
        "form",
        { method: "dialog" },
        h("h2", { id: "key-title" }, "API key"),
        h("p", { id: "key-why" }, `${why} It is kept until this tab is closed.`),
        h("label", { for: "key" }, "Key"),
        input,
        h(
          "div",
          { class: "row end" },
          h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
          h("button", { class: "primary", value: "ok" }, "Use this key"),
        ),
      ),
    );
    dialog.addEventListener("close", () => {
      const key = dialog.returnValue === "ok" ? input.value.trim() : "";
      if (key) sessionStorage.setItem(KEY, key);
      dialog.remove();
      asking = null;
      resolve(Boolean(key));
    });
    document.body.append(dialog);
    dialog.showModal();
  });
  return asking;
}

/** The models to talk with: {id, context_length, thinks, vision, longest, sampling, about}. */
export async function models() {
  return (await (await request("page/models")).json()).models;
}

/**
 * The answer to a chat request as it comes: {text}, {thoughts}, {finish}, {usage, timings}. Throws
 * an ApiError, also for a stream that ends before its end.
 */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", { body, signal });
  for await (const data of serverSentEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(String(chunk.error.message ?? "The server gave up."));
    const choice = chunk.choices?.[0];
    if (choice?.delta?.reasoning_content) yield { thoughts: choice.delta.reasoning_content };
    if (choice?.delta?.content) yield { text: choice.delta.content };
    if (choice?.finish_reason) yield { finish: choice.finish_reason };
    if (chunk.usage) yield { usage: chunk.usage, timings: chunk.timings };
  }
  throw new ApiError("The connection broke off.");
}

/** The data of each event; an event is one line here, and what is no data is a sign of life. */
async function* serverSentEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke off.");
    }
    if (part.done) return;
    const lines = (rest + part.value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  }
}
