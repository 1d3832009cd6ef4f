// The conversations of this browser: kept in IndexedDB, shared with its other tabs, searched,
// exported, imported.
//
// A conversation is a tree: a message names its parent (ROOT for the first), and another answer or
// another wording is a sibling. `chosen` says which child of a parent is shown. A message does not
// change once it has a `finish`, so what two tabs wrote is joined message by message.

export const ROOT = "";
export const conversations = new Map(); // id -> conversation, all of them
/** "change": {id}, of this or another tab; "trouble": {message}, when nothing can be kept. */
export const events = new EventTarget();
export const writing = new Set(); // ids of the messages that this tab is receiving

const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");
const tell = (type, detail) => events.dispatchEvent(new CustomEvent(type, { detail }));

// The tree -----------------------------------------------------------------------------------------

export function newConversation(settings = {}) {
  const now = Date.now();
  return {
    id: newId(),
    title: "",
    created: now,
    updated: now,
    model: "",
    system: "",
    think: true,
    params: {},
    messages: [],
    chosen: {},
    ...settings,
  };
}

/** Adds a message and shows it; fields: role, parent, text. */
export function add(conversation, fields) {
  const message = { id: newId(), thoughts: "", finish: "", time: Date.now(), ...fields };
  conversation.messages.push(message);
  conversation.chosen[message.parent] = message.id;
  conversation.updated = message.time;
  conversation.title ||= titleOf(message.text);
  return message;
}

const titleOf = (text) => {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
};

/** What is shown, from the first message on: [{message, siblings}]. */
export function path(conversation) {
  const below = new Map();
  for (const message of conversation.messages) {
    if (!below.has(message.parent)) below.set(message.parent, []);
    below.get(message.parent).push(message);
  }
  const steps = [];
  let siblings = below.get(ROOT);
  while (siblings) {
    const parent = siblings[0].parent;
    const chosen = siblings.find((message) => message.id === conversation.chosen[parent]);
    const message = chosen ?? siblings.at(-1);
    steps.push({ message, siblings });
    siblings = below.get(message.id);
  }
  return steps;
}

/** The messages above `message`, the first one first. */
export function above(conversation, message) {
  const byId = new Map(conversation.messages.map((other) => [other.id, other]));
  const found = [];
  for (let at = byId.get(message.parent); at; at = byId.get(at.parent)) found.unshift(at);
  return found;
}

// Keeping ------------------------------------------------------------------------------------------

let database = null;
let channel = null;
let troubled = false;

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const table = (mode) => database.transaction("conversations", mode).objectStore("conversations");

/** Reads everything, and listens to other tabs. */
export async function open() {
  try {
    const request = indexedDB.open("bitnet-ops", 1);
    request.onupgradeneeded = () =>
      request.result.createObjectStore("conversations", { keyPath: "id" });
    database = await settled(request);
    for (const kept of await settled(table("readonly").getAll())) conversations.set(kept.id, kept);
  } catch {
    trouble("This browser keeps no data for this page: conversations last as long as the tab.");
    return;
  }
  channel = new BroadcastChannel("bitnet-ops");
  channel.onmessage = ({ data: id }) => follow(id);
}

async function follow(id) {
  const kept = await settled(table("readonly").get(id));
  const mine = conversations.get(id);
  if (!kept) conversations.delete(id);
  else if (!mine) conversations.set(id, kept);
  else {
    join(mine, kept);
    for (const field of ["title", "updated", "model", "system", "think", "params"]) {
      mine[field] = kept[field];
    }
    // What is shown stays as it is here, except that a new message is shown.
    mine.chosen = { ...kept.chosen, ...mine.chosen };
  }
  tell("change", { id });
}

/** Takes over the messages of `kept`, except those that are being received here. */
function join(mine, kept) {
  const byId = new Map(mine.messages.map((message) => [message.id, message]));
  for (const message of kept.messages) {
    const own = byId.get(message.id);
    if (!own) mine.messages.push(message);
    else if (!own.finish && !writing.has(own.id)) Object.assign(own, message);
  }
}

/** Keeps the conversation as it is now, joined with what another tab added. */
export async function save(conversation) {
  conversations.set(conversation.id, conversation);
  tell("change", { id: conversation.id });
  if (!database) return;
  try {
    const records = table("readwrite");
    const finished = new Promise((resolve, reject) => {
      records.transaction.oncomplete = resolve;
      records.transaction.onabort = () => reject(records.transaction.error);
    });
    finished.catch(() => {}); // awaited below, unless put throws before
    const kept = await settled(records.get(conversation.id));
    if (kept) join(conversation, kept);
    if (!conversations.has(conversation.id)) return records.transaction.abort(); // deleted meanwhile
    records.put(conversation);
    await finished;
    troubled = false;
    channel.postMessage(conversation.id);
  } catch (error) {
    const full = error?.name === "QuotaExceededError";
    trouble(
      full
        ? "The browser's storage is full: this conversation is not kept. Delete some, or export it."
        : "The browser could not keep this conversation. Export it before you close the tab.",
    );
  }
}

function trouble(message) {
  if (!troubled) tell("trouble", { message });
  troubled = true; // until something is kept again: one message, not one a second
}

/** Deletes a conversation; `save` brings it back. */
export async function remove(conversation) {
  conversations.delete(conversation.id);
  tell("change", { id: conversation.id });
  if (!database) return;
  await settled(table("readwrite").delete(conversation.id));
  channel.postMessage(conversation.id);
}

// Searching ----------------------------------------------------------------------------------------

/** Conversations whose title or messages hold `query`, newest first: [{conversation, found}]. */
export function search(query) {
  const wanted = query.trim().toLowerCase();
  const all = [...conversations.values()].sort((a, b) => b.updated - a.updated);
  if (!wanted) return all.map((conversation) => ({ conversation, found: null }));
  return all.flatMap((conversation) => {
    for (const { text } of conversation.messages) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at < 0) continue;
      const start = at > 30 ? text.indexOf(" ", at - 30) + 1 || at - 30 : 0;
      const end = at + wanted.length;
      const parts = [text.slice(Math.min(start, at), at), text.slice(at, end), text.slice(end, end + 60)];
      return [{ conversation, found: parts }];
    }
    const named = conversation.title.toLowerCase().includes(wanted);
    return named ? [{ conversation, found: null }] : [];
  });
}

// Exporting and importing --------------------------------------------------------------------------

const FORMAT = "bitnet-ops conversation";

export const asJson = (conversation) =>
  JSON.stringify({ format: FORMAT, version: 1, conversation }, null, 2);

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.system) parts.push("## System", conversation.system);
  for (const { message } of path(conversation)) {
    parts.push(message.role === "user" ? "## You" : `## ${message.model}`, message.text);
  }
  return `${parts.join("\n\n")}\n`;
}

const text = (value) => (typeof value === "string" ? value : "");
const count = (value) => (Number.isFinite(value) ? value : 0);

/** The conversation of a file of `asJson`, under new ids; only what this page knows is taken over. */
export function fromJson(source) {
  let file;
  try {
    file = JSON.parse(source);
  } catch {
    throw new Error("This file is not JSON. Choose a conversation exported from this page.");
  }
  const given = file?.conversation;
  if (file?.format !== FORMAT || !Array.isArray(given?.messages)) {
    throw new Error("This file holds no conversation exported from this page.");
  }
  const conversation = newConversation({
    title: text(given.title).slice(0, 200) || "Imported conversation",
    created: count(given.created),
    model: text(given.model),
    system: text(given.system),
    think: given.think !== false,
    params: Object.fromEntries(
      Object.entries(given.params ?? {}).filter(
        ([, value]) =>
          Number.isFinite(value) ||
          typeof value === "string" ||
          (Array.isArray(value) && value.every((item) => typeof item === "string")),
      ),
    ),
  });
  const renamed = new Map([[ROOT, ROOT]]);
  for (const message of given.messages) {
    const parent = renamed.get(message?.parent);
    // A parent comes first, so there are no circles.
    if (parent === undefined || !["user", "assistant"].includes(message.role)) {
      throw new Error("This file holds a message without its place in the conversation.");
    }
    const taken = add(conversation, {
      parent,
      role: message.role,
      text: text(message.text),
      thoughts: text(message.thoughts),
      thinking_ms: count(message.thinking_ms),
      model: text(message.model),
      finish: text(message.finish) || "stop",
      error: text(message.error),
      time: count(message.time),
    });
    if (message.stats) {
      const names = ["first_ms", "rate", "prompt", "cached", "tokens"];
      taken.stats = Object.fromEntries(names.map((name) => [name, count(message.stats[name])]));
    }
    renamed.set(message.id, taken.id);
  }
  conversation.chosen = {};
  for (const [parent, child] of Object.entries(given.chosen ?? {})) {
    if (renamed.has(parent) && renamed.has(child)) {
      conversation.chosen[renamed.get(parent)] = renamed.get(child);
    }
  }
  conversation.updated = Date.now();
  return conversation;
}
