// The page of conversations: which one is open, the field below it, keys, and the parts together.

import { $, announce, h, icon, number, themeSwitch, toast } from "./dom.js";
import { models as fetchModels } from "./api.js";
import { answer, running } from "./answering.js";
import { FORGET, MessageView, fit, sends } from "./message.js";
import { startSettings } from "./settings.js";
import { address, discard, rename, show as showSidebar, startSidebar } from "./sidebar.js";
import { Attachments } from "./attachments.js";
import * as store from "./store.js";

let current = store.newConversation(); // kept with its first message
let opened = ""; // its id as the address has it: none before its first message
let models = [];
const views = new Map(); // id of a message -> its view

const phone = matchMedia("(max-width: 820px)");
const prompt = $("prompt");
const scroll = $("scroll");
const run = () => running.get(current.id);
const model = () => models.find(({ id }) => id === current.model) ?? models[0];
const thinks = () => Boolean(model()?.thinks);
const saved = () => store.conversations.has(current.id);
const attachments = new Attachments($("attached"), () => showState(), () => Boolean(model()?.vision));

// Showing ------------------------------------------------------------------------------------------

/** Brings the messages in line with what is chosen; what stays above the first change is not touched. */
function show() {
  const steps = store.path(current);
  const list = $("messages");
  let same = 0;
  while (same < steps.length && list.children[same]?.dataset.id === steps[same].message.id) same += 1;
  while (list.children.length > same) {
    views.delete(list.lastChild.dataset.id);
    list.lastChild.remove();
  }
  const begin = steps.findLastIndex(({ message }) => current.begins.includes(message.id));
  for (const [at, { message, siblings }] of steps.entries()) {
    if (!views.has(message.id)) {
      const view = new MessageView(message, actions);
      views.set(message.id, view);
      list.append(view.element);
    }
    const view = views.get(message.id);
    view.update(run()?.message === message ? run() : null);
    view.showVersions(siblings);
    view.showBegin(at > 0 && at === begin);
  }
  $("empty").hidden = steps.length > 0;
  showState();
}

/** What depends on whether an answer is coming, and on the conversation's own fields. */
function showState() {
  const busy = Boolean(run());
  const send = $("send");
  send.classList.toggle("stop", busy);
  send.replaceChildren(icon(busy ? "stop" : "send"));
  send.title = busy ? "Stop (Esc)" : "Send";
  send.setAttribute("aria-label", busy ? "Stop the answer" : "Send");
  send.disabled = !busy && !((prompt.value.trim() || attachments.files.length) && model());
  const title = current.title || "New conversation";
  $("title").textContent = title;
  document.title = current.title ? `${title} – bitnet-ops` : "bitnet-ops";
  $("think").hidden = !thinks();
  $("attach-picture").hidden = !model()?.vision;
  $("think").setAttribute("aria-pressed", String(current.think));
  if (model()) $("model").value = model().id;
  $("about").textContent = model()?.about ?? "";
  $("about").hidden = !model()?.about;
  showContext();
  for (const id of ["rename", "export-markdown", "export-json", "delete"]) $(id).disabled = !saved();
  $("export-all").disabled = store.conversations.size === 0;
}

/** How full the context is, as the newest answer counted its tokens. */
function showContext() {
  const found = contextOf(newest());
  $("gauge").hidden = !found || !model();
  $("forget").hidden = true;
  if ($("gauge").hidden) return;
  const used = Math.round(found.characters * found.rate);
  const total = model().context_length;
  const share = Math.min(used / total, 1);
  const text = `${number(used)} of the ${number(total)} tokens that the model can see`;
  const attributes = { "aria-valuemax": total, "aria-valuenow": Math.min(used, total), "aria-valuetext": text, title: text };
  for (const [name, value] of Object.entries(attributes)) $("gauge").setAttribute(name, value);
  $("gauge").classList.toggle("full", share > NEARLY_FULL);
  $("gauge-used").setAttribute("stroke-dasharray", `${100 * share} 100`);
  $("gauge-text").textContent = `${number(100 * share)} %`;
  const offered = views.get(newest().id)?.offers.some(([name]) => name === FORGET); // by the answer itself
  $("forget").hidden = Boolean(run()) || share <= NEARLY_FULL || offered || beginnings(newest()).length === 0;
}

function open(conversation) {
  current = conversation;
  opened = saved() ? current.id : "";
  views.clear();
  $("messages").replaceChildren();
  show();
  settings.refresh();
  showSidebar();
  prompt.value = sessionStorage.getItem(`draft-${opened}`) ?? "";
  fit(prompt);
  attachments.open(opened);
  showState();
  scroll.scrollTop = scroll.scrollHeight;
  following = true;
  closeSidebar();
}

/** What is typed stays with its conversation while the tab is open. */
function keepDraft() {
  if (prompt.value) sessionStorage.setItem(`draft-${opened}`, prompt.value);
  else sessionStorage.removeItem(`draft-${opened}`);
}

function openAddress() {
  const id = location.hash.slice(2);
  if (id === opened) return;
  const found = store.conversations.get(id);
  if (found) open(found);
  else startOver();
  if (!phone.matches) prompt.focus();
}

/** A new conversation in place of what the address names. */
function startOver() {
  history.replaceState(null, "", "#/");
  open(store.newConversation({ model: current.model }));
}

let following = true; // whether the newest line stays in view

function follow() {
  if (following) scroll.scrollTop = scroll.scrollHeight;
  $("latest").hidden = following;
}

scroll.addEventListener("scroll", () => {
  following = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
  $("latest").hidden = following;
});
$("latest").addEventListener("click", () => {
  following = true;
  follow();
  prompt.focus();
});
new ResizeObserver(follow).observe($("messages"));

// Asking -------------------------------------------------------------------------------------------

async function ask(parent, text, files = []) {
  run()?.stop();
  const question = store.add(current, { role: "user", parent, text, files, finish: "sent" });
  await reply(question);
}

/** begun: an answer to go on with, or one that failed and is replaced. */
async function reply(question, begun = null) {
  run()?.stop();
  const conversation = current;
  conversation.model = model().id;
  following = true;
  const done = answer(conversation, question, begun, model(), (message, state) => {
    if (conversation !== current) return;
    views.get(message.id)?.update(state);
    follow();
  });
  if (!opened) {
    opened = conversation.id;
    attachments.open(opened);
    history.pushState(null, "", address(conversation));
  }
  show();
  follow();
  await done;
  if (conversation === current) {
    show();
    follow();
    const view = views.get(store.path(current).at(-1).message.id);
    if (view) sayAnswer(view);
  }
}

/** The whole answer at once, for a screen reader; its beginning, if it is long. */
function sayAnswer({ message, body }) {
  if (message.role !== "assistant") return;
  const words = body?.innerText.replace(/\s+/g, " ").trim() ?? "";
  const text = words.length > 1500 ? `${words.slice(0, 1500)} … The answer goes on.` : words;
  announce(message.finish === "error" ? `Error: ${message.error}` : `${message.model}: ${text}`);
}

function answerAgain(message, begun) {
  const [question] = store.above(current, message).slice(-1);
  if (question && model()) reply(question, begun);
  prompt.focus();
}

// The context --------------------------------------------------------------------------------------

const NEARLY_FULL = 0.75;
const charactersOf = (messages) => messages.reduce((sum, message) => sum + store.lengthOf(message), 0);
const newest = () => store.path(current).at(-1)?.message;

/** What is sent down to `message`: {sent, characters, rate}, tokens a character; null if unknown. */
function contextOf(message) {
  if (!message) return null;
  const sent = [...store.above(current, message), message];
  const counted = sent.findLast(({ stats }) => stats?.prompt && stats.characters)?.stats;
  if (!counted) return null;
  const characters = charactersOf(sent) + store.effective(current).system.length;
  return { sent, characters, rate: (counted.prompt + counted.tokens) / counted.characters };
}

/** The questions down to `message` with which sending could begin instead, the oldest one first. */
function beginnings(message) {
  const questions = [...store.above(current, message), message].filter(({ role }) => role === "user");
  return questions.slice(1);
}

/** Leaves out so many of the oldest turns that half of the context is free, and one at least. */
function forgetOldest(message) {
  const found = contextOf(message);
  const rate = found?.rate ?? 0.3;
  const sent = [...store.above(current, message), message];
  const fits = (question) => charactersOf(sent.slice(sent.indexOf(question))) * rate <= model().context_length / 2;
  const questions = beginnings(message);
  const begin = questions.find(fits) ?? questions.at(-1);
  if (!begin) return;
  current.begins.push(begin.id);
  store.save(current);
}

const actions = {
  edit: (message, text) => model() && ask(message.parent, text, message.files),
  regenerate: (message) => answerAgain(message, message.text ? null : message),
  goOn: (message) => answerAgain(message, message),
  forget: (message) => {
    forgetOldest(message);
    answerAgain(message, message);
  },
  remember: (message) => {
    current.begins = current.begins.filter((id) => id !== message.id);
    store.save(current);
    show();
    prompt.focus();
  },
  older: (message) => beginnings(message).length > 0,
  contextLength: () => model()?.context_length ?? Infinity,
  choose: (message, action) => {
    current.chosen[message.parent] = message.id;
    store.save(current);
    show();
    const { element } = views.get(message.id);
    element.querySelector(`[data-action="${action}"]`).focus();
    announce(element.querySelector(".versions span").getAttribute("aria-label"));
  },
  focus: () => prompt.focus(),
};

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (run()) return run().stop();
  const text = prompt.value.trim();
  const { files } = attachments;
  if (!(text || files.length) || !model()) return;
  prompt.value = "";
  fit(prompt);
  keepDraft();
  attachments.clear();
  ask(newest()?.id ?? store.ROOT, text, files);
});

$("forget").addEventListener("click", () => {
  forgetOldest(newest());
  show();
  toast("The model no longer sees the oldest messages; a line says from where on.");
  prompt.focus();
});

prompt.addEventListener("input", () => {
  fit(prompt);
  keepDraft();
  showState();
});

prompt.addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    if (!run()) $("composer").requestSubmit();
  } else if (event.key === "ArrowUp" && !prompt.value) {
    const questions = store.path(current).filter(({ message }) => message.role === "user");
    const last = questions.at(-1)?.message;
    if (!last) return;
    event.preventDefault();
    views.get(last.id).edit();
  }
});

// Around it ----------------------------------------------------------------------------------------

function openSidebar() {
  if (!phone.matches) return;
  document.body.classList.add("drawer");
  layOut();
  $("close-sidebar").focus();
}

function closeSidebar() {
  const was = document.body.classList.contains("drawer");
  document.body.classList.remove("drawer");
  layOut();
  if (was) $("open-sidebar").focus();
}

function layOut() {
  const drawer = document.body.classList.contains("drawer");
  $("sidebar").inert = phone.matches && !drawer;
  $("main").inert = phone.matches && drawer;
  $("scrim").hidden = !(phone.matches && drawer);
  $("open-sidebar").setAttribute("aria-expanded", String(drawer));
}

phone.addEventListener("change", layOut);
$("open-sidebar").addEventListener("click", openSidebar);
$("close-sidebar").addEventListener("click", closeSidebar);
$("scrim").addEventListener("click", closeSidebar);

function startNew() {
  if (opened) location.hash = "#/";
  closeSidebar();
  prompt.focus();
}

$("new").addEventListener("click", startNew);
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  prompt.focus();
});
$("help-button").addEventListener("click", () => $("help").showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
}

const apple = /Mac|iP(hone|ad)/.test(navigator.platform);
for (const key of document.querySelectorAll("kbd.mod")) key.textContent = apple ? "⌘" : "Ctrl";
$("search-key").textContent = apple ? "⌘K" : "Ctrl K";

document.addEventListener("keydown", (event) => {
  const modal = document.querySelector("dialog[open]");
  const key = event.key.toLowerCase();
  const command = event.ctrlKey || event.metaKey;
  let act = null;
  if (command && event.shiftKey && key === "o") act = startNew;
  else if (command && key === "k") act = () => (openSidebar(), $("search").focus());
  else if (command && key === ",") act = () => $("open-settings").click();
  else if (command && key === "/") act = () => $("help").showModal();
  else if (key === "escape" && document.body.classList.contains("drawer")) act = closeSidebar;
  else if (key === "escape" && run()) act = () => run().stop();
  if (!act || modal) return;
  event.preventDefault();
  act();
});

// The menu ---------------------------------------------------------------------------------------

function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const fileName = () => current.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation";

const menu = {
  rename: () => (openSidebar(), rename(current)),
  "export-markdown": () => download(`${fileName()}.md`, "text/markdown", store.asMarkdown(current)),
  "export-json": () => download(`${fileName()}.json`, "application/json", store.asJson(current)),
  "export-all": () => download("conversations.json", "application/json", store.allAsJson()),
  import: () => $("file").click(),
  delete: () => discard(current),
};
for (const [id, act] of Object.entries(menu)) {
  $(id).addEventListener("click", () => {
    $("menu").hidePopover();
    act();
  });
}

$("file").addEventListener("change", async () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  try {
    const found = store.fromJson(await file.text());
    for (const conversation of found) await store.save(conversation);
    if (found.length > 1) toast(`Took over ${found.length} conversations.`);
    else location.hash = address(found[0]);
  } catch (error) {
    toast(error.message, { alert: true });
  }
});

$("think").addEventListener("click", () => {
  current.think = !current.think;
  showState();
  if (saved()) store.save(current);
});

$("model").addEventListener("change", () => {
  current.model = $("model").value;
  show();
  settings.refresh();
  if (saved()) store.save(current);
});

const settings = startSettings({
  get: () => current,
  changed: () => saved() && store.save(current),
  model,
});

async function connect() {
  $("offline").hidden = true;
  try {
    models = await fetchModels();
    $("model").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    $("model").disabled = models.length === 0;
  } catch (error) {
    $("offline").hidden = false;
    $("offline-why").textContent = error.message;
    if ($("empty").hidden) toast(error.message, { action: "Try again", act: connect, alert: true, seconds: 60 });
  }
  show();
}

$("reconnect").addEventListener("click", connect);
store.events.addEventListener("trouble", ({ detail }) => toast(detail.message, { alert: true, seconds: 60 }));
store.events.addEventListener("change", ({ detail }) => {
  if (detail.id !== current.id) return;
  if (!saved() && opened) startOver(); // it was deleted, here or in another tab
  else if (!run()) show();
  else showState();
});

// Browsers that lay the keyboard over the page say here how much is left of it.
visualViewport?.addEventListener("resize", () => {
  if (visualViewport.scale !== 1) return;
  document.documentElement.style.setProperty("--height", `${visualViewport.height}px`);
});

themeSwitch($("theme"));
layOut();
await store.open();
startSidebar(() => current);
addEventListener("hashchange", openAddress);
addEventListener("popstate", openAddress);
open(store.conversations.get(location.hash.slice(2)) ?? current);
await connect();
settings.refresh();
