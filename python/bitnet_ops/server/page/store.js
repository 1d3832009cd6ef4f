// The conversations of this browser: kept in IndexedDB, shared with its other tabs, searched,
// exported, imported; and what holds for all of them.
//
// A conversation is a tree: a message names its parent (ROOT for the first), and another answer or
// another wording is a sibling. `chosen` says which child of a parent is shown. A message does not
// change once it has a `finish`, so what two tabs wrote is joined message by message. Going on with
// an answer makes another one, which `continues` it and takes its place.

export const ROOT = "";
export const conversations = new Map(); // id -> conversation, all of them
/** "change": {id}, of this or another tab; "trouble": {message}, when nothing can be kept. */
export const events = new EventTarget();
export const writing = new Set(); // ids of the messages that this tab is receiving
const written = new Set(); // ids of the conversations that the database has had
const deleted = new Set(); // ids of those that were deleted, here or in another tab

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
    begins: [], // ids of messages: what stands above the last of them in the path is not sent
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
  conversation.title ||= titleOf(message.text || message.files?.[0]?.name || "");
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
  for (const [parent, siblings] of below) {
    const replaced = new Set();
    for (const { text, begun, finish, continues } of siblings) {
      if (text.length > begun || !finish) replaced.add(continues);
    }
    below.set(parent, siblings.filter(({ id }) => !replaced.has(id) || below.has(id)));
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

/** The messages above `message`, the first one first, from the one on with which sending begins. */
export function above(conversation, message) {
  const byId = new Map(conversation.messages.map((other) => [other.id, other]));
  const found = [];
  for (let at = byId.get(message.parent); at; at = byId.get(at.parent)) {
    found.unshift(at);
    if (conversation.begins.includes(at.id)) break;
  }
  return found;
}

/** The text of a message as it is shown elsewhere: its files, pictures by name, then what was typed. */
export function wholeText(message) {
  return [...picturesOf(message).map(({ name }) => `(Picture ${name})`), textOf(message)].filter(Boolean).join("\n");
}

/** What is sent of a message: a text, or parts with its pictures, which come before the text. */
export function contentOf(message, sees) {
  const pictures = picturesOf(message);
  if (!pictures.length) return textOf(message);
  if (!sees) return [...pictures.map(({ name }) => `(Here was a picture, ${name}, which you cannot see.)`), textOf(message)].join("\n");
  const parts = pictures.map(({ image: url }) => ({ type: "image_url", image_url: { url } }));
  const text = textOf(message);
  return text ? [...parts, { type: "text", text }] : parts;
}

const PICTURE_CHARACTERS = 3000; // a picture has as many tokens as a text of about so many

/** How many characters a message counts for in the context. */
export const lengthOf = (message) => textOf(message).length + PICTURE_CHARACTERS * picturesOf(message).length;

const picturesOf = ({ files = [] }) => files.filter(({ image }) => image);

function textOf({ text, files = [] }) {
  const parts = files.filter(({ image }) => !image).map((file) => {
    const runs = file.text.match(/`+/g) ?? [];
    const fence = "`".repeat(Math.max(3, ...runs.map((run) => run.length + 1)));
    return `${file.name}\n${fence}\n${file.text}${file.text.endsWith("\n") ? "" : "\n"}${fence}\n`;
  });
  return [...parts, text].filter(Boolean).join("\n");
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
    for (const kept of await settled(table("readonly").getAll())) know(kept);
  } catch {
    trouble("This browser keeps no data for this page: conversations last as long as the tab.");
    return;
  }
  channel = new BroadcastChannel("bitnet-ops");
  channel.onmessage = ({ data: id }) => follow(id);
}

/** Takes a conversation of the database into the list. */
function know(kept) {
  kept.begins ??= []; // what an older page has kept
  conversations.set(kept.id, kept);
  written.add(kept.id);
  deleted.delete(kept.id);
}

async function follow(id) {
  const before = deleted.has(id);
  const kept = await settled(table("readonly").get(id));
  if (!before && deleted.has(id)) return; // deleted here, while it was being read
  const mine = conversations.get(id);
  if (!kept) forget(id);
  else if (!mine) know(kept);
  else {
    join(mine, kept);
    for (const field of ["title", "updated", "model", "system", "think", "params", "begins"]) {
      mine[field] = kept[field] ?? mine[field];
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

/**
 * Keeps the conversation as it is now, joined with what another tab added. One that was deleted
 * stays so, here or in another tab: see `restore`.
 */
export async function save(conversation) {
  if (deleted.has(conversation.id)) return;
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
    else if (written.has(conversation.id)) forget(conversation.id); // by another tab
    if (deleted.has(conversation.id)) return records.transaction.abort();
    records.put(conversation);
    await finished;
    written.add(conversation.id);
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

function forget(id) {
  conversations.delete(id);
  deleted.add(id);
  tell("change", { id });
}

/** Deletes a conversation; an answer that is still coming to it is not kept. */
export async function remove(conversation) {
  forget(conversation.id);
  if (!database) return;
  await settled(table("readwrite").delete(conversation.id));
  channel.postMessage(conversation.id);
}

/** Takes back `remove`. */
export async function restore(conversation) {
  deleted.delete(conversation.id);
  written.delete(conversation.id);
  await save(conversation);
}

// Settings of all conversations --------------------------------------------------------------------

const SHARED = "bitnet-ops-settings";

/** {system, params}: of every conversation that does not say otherwise. */
export function shared() {
  let found = {};
  try {
    found = JSON.parse(localStorage.getItem(SHARED)) ?? {};
  } catch {
    // Nothing is kept, or by no page of this kind.
  }
  return { system: text(found.system), params: paramsOf(found.params) };
}

export function share(settings) {
  try {
    localStorage.setItem(SHARED, JSON.stringify(settings));
  } catch {
    tell("trouble", { message: "This browser keeps no data for this page: settings cannot be kept." });
  }
}

/** {system, params} as they are sent. */
export function effective(conversation) {
  const { system, params } = shared();
  return { system: conversation.system.trim() || system.trim(), params: { ...params, ...conversation.params } };
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
const FORMAT_OF_ALL = "bitnet-ops conversations";

export const asJson = (conversation) =>
  JSON.stringify({ format: FORMAT, version: 1, conversation }, null, 2);

export const allAsJson = () =>
  JSON.stringify({ format: FORMAT_OF_ALL, version: 1, conversations: [...conversations.values()] }, null, 2);

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  const { system } = effective(conversation);
  if (system) parts.push("## System", system);
  for (const { message } of path(conversation)) {
    parts.push(message.role === "user" ? "## You" : `## ${message.model}`, wholeText(message));
  }
  return `${parts.join("\n\n")}\n`;
}

const text = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);
const count = (value) => (Number.isFinite(value) ? value : 0);
const paramsOf = (given) =>
  Object.fromEntries(
    Object.entries(given ?? {}).filter(
      ([, value]) =>
        Number.isFinite(value) ||
        typeof value === "string" ||
        (Array.isArray(value) && value.every((item) => typeof item === "string")),
    ),
  );

/** A picture only as this page writes it: nothing is ever fetched for one. */
function fileOf(file) {
  const name = text(file?.name);
  if (!PICTURE.test(text(file?.image))) return { name, text: text(file?.text) };
  return { name, image: file.image, width: count(file.width), height: count(file.height) };
}

const PICTURE = /^data:image\/(png|jpeg|webp|gif|bmp);base64,[A-Za-z0-9+/]+={0,2}$/;

/** The conversations of a file of `asJson` or `allAsJson`, under new ids. */
export function fromJson(source) {
  let file;
  try {
    file = JSON.parse(source);
  } catch {
    throw new Error("This file is not JSON. Choose a file exported from this page.");
  }
  const given = { [FORMAT]: [file?.conversation], [FORMAT_OF_ALL]: list(file?.conversations) }[file?.format];
  if (!given?.length || !given.every((one) => Array.isArray(one?.messages))) {
    throw new Error("This file holds no conversation exported from this page.");
  }
  return given.map(imported);
}

/** A conversation of a file; only what this page knows is taken over. */
function imported(given) {
  const conversation = newConversation({
    title: text(given.title).slice(0, 200) || "Imported conversation",
    created: count(given.created),
    model: text(given.model),
    system: text(given.system),
    think: given.think !== false,
    params: paramsOf(given.params),
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
      files: list(message.files).map(fileOf),
      finish: text(message.finish) || "stop",
      error: text(message.error),
      code: text(message.code),
      begun: count(message.begun),
      continues: renamed.get(message.continues),
      time: count(message.time),
    });
    if (message.stats) {
      const names = ["first_ms", "rate", "prompt", "cached", "tokens", "characters"];
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
  conversation.begins = list(given.begins).flatMap((id) => renamed.get(id) ?? []);
  conversation.updated = count(given.updated) || Date.now();
  return conversation;
}
