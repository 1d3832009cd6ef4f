// One answer: the request, the stream, what is measured of it. Several may run, one a conversation.

import { chat } from "./api.js";
import { above, add, contentOf, conversations, effective, events, lengthOf, save, writing } from "./store.js";

export const running = new Map(); // id of a conversation -> {message, note, live, stop()}

const ATTEMPTS = 5; // while the server says that it is busy and when to come back

events.addEventListener("change", ({ detail }) => {
  if (!conversations.has(detail.id)) running.get(detail.id)?.stop(); // it was deleted
});

/**
 * Answers the question `parent`, or goes on with `begun`, an answer to it. `show(message, run)` is
 * called as the answer grows, at most 30 times a second, and when it is there. model: its row of
 * `models`.
 */
export async function answer(conversation, parent, begun, model, show) {
  const fields = { role: "assistant", parent: parent.id, text: "", model: model.id };
  if (begun) {
    const { text, thoughts, thinking_ms } = begun;
    Object.assign(fields, { text, thoughts, thinking_ms, begun: text.length, continues: begun.id });
  }
  const message = add(conversation, fields);
  const aborter = new AbortController();
  const run = { message, note: "", live: "", stop: () => aborter.abort() };
  running.set(conversation.id, run);
  writing.add(message.id);
  const refresh = paced(33, () => show(message, run));
  const keep = paced(1000, () => save(conversation));
  const changed = () => (refresh(), keep());
  save(conversation);
  show(message, run);
  try {
    const body = requestBody(conversation, message, model);
    const sent = [...above(conversation, message), message];
    const given = sent.reduce((sum, one) => sum + lengthOf(one), effective(conversation).system.length);
    for (let attempt = 1; ; attempt += 1) {
      try {
        await receive(body, given, message, run, aborter.signal, changed);
        break;
      } catch (error) {
        const busy = [429, 503].includes(error.status) && error.retryAfter !== null;
        if (!busy || attempt === ATTEMPTS) throw error;
        for (let left = Math.max(1, Math.ceil(error.retryAfter)); left > 0; left -= 1) {
          run.note = `The server is busy. Trying again in ${left} s …`;
          show(message, run);
          await pause(1000, aborter.signal);
        }
        run.note = "";
      }
    }
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "error";
    if (message.finish === "error") Object.assign(message, { error: error.message, code: error.code ?? "" });
  }
  refresh.cancel();
  keep.cancel();
  running.delete(conversation.id);
  writing.delete(message.id);
  conversation.updated = Date.now();
  await save(conversation);
  show(message, null);
}

async function receive(body, given, message, run, signal, changed) {
  const started = performance.now();
  const before = message.text.length;
  let first = 0;
  let finish = "";
  let parts = 0;
  for await (const part of chat(body, signal)) {
    const now = performance.now();
    if (part.thoughts || part.text) {
      first ||= now;
      parts += 1;
    }
    if (part.thoughts) message.thoughts += part.thoughts;
    if (part.text) {
      if (message.thoughts && !message.text) message.thinking_ms = now - first;
      message.text += part.text;
    }
    finish = part.finish ?? finish;
    message.stats = {
      first_ms: first && first - started,
      rate: (part.timings?.predicted_per_second ?? (parts - 1) / ((now - first) / 1000)) || 0,
      prompt: part.usage?.prompt_tokens ?? 0,
      cached: part.usage?.prompt_tokens_details?.cached_tokens ?? 0,
      tokens: part.usage?.completion_tokens ?? parts,
      characters: given + message.text.length - before, // of all these tokens
    };
    changed();
  }
  message.finish = finish || "stop";
}

function requestBody(conversation, message, model) {
  const messages = above(conversation, message)
    .map((other) => ({ role: other.role, content: contentOf(other, model.vision) }))
    .filter(({ content }) => content); // without an answer that failed before its first word
  const { system, params } = effective(conversation);
  const { reasoning_effort, ...sent } = params;
  if (system) messages.unshift({ role: "system", content: system });
  const body = { model: model.id, messages, stream: true, stream_options: { include_usage: true } };
  Object.assign(body, { max_tokens: model.longest }, sent);
  if (message.text) {
    const { text: content, thoughts } = message;
    messages.push({ role: "assistant", content, ...(thoughts && { reasoning_content: thoughts }) });
    Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
  }
  if (model.thinks) {
    body.chat_template_kwargs = { enable_thinking: conversation.think };
    if (reasoning_effort && conversation.think) body.reasoning_effort = reasoning_effort;
  }
  return body;
}

/** `work`, at most once in `ms`, and once more for the last call. */
function paced(ms, work) {
  let timer = 0;
  const call = () => {
    timer ||= setTimeout(() => {
      timer = 0;
      work();
    }, ms);
  };
  call.cancel = () => clearTimeout(timer);
  return call;
}

const pause = (ms, signal) =>
  new Promise((resolve, reject) => {
    const stopped = () => reject(signal.reason);
    signal.addEventListener("abort", stopped, { once: true });
    setTimeout(() => (signal.removeEventListener("abort", stopped), resolve()), ms);
  });
