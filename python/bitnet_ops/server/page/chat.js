// The page of conversations: which one is open, the field below it, keys, and the parts together.

import { $, announce, h, icon, themeSwitch, toast } from "/page/dom.js";
import { models as fetchModels } from "/page/api.js";
import { answer, running } from "/page/answering.js";
import { MessageView, fit, sends } from "/page/message.js";
import { startSettings } from "/page/settings.js";
import { address, discard, rename, show as showSidebar, startSidebar } from "/page/sidebar.js";
import * as store from "/page/store.js";

let current = store.newConversation(); // kept with its first message
let models = [];
const views = new Map(); // id of a message -> its view

const phone = matchMedia("(max-width: 820px)");
const prompt = $("prompt");
const scroll = $("scroll");
const run = () => running.get(current.id);
const model = () => models.find(({ id }) => id === current.model) ?? models[0];
const thinks = () => Boolean(model()?.capabilities?.includes("thinking"));
const saved = () => store.conversations.has(current.id);

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
  for (const { message, siblings } of steps) {
    if (!views.has(message.id)) {
      const view = new MessageView(message, actions);
      views.set(message.id, view);
      list.append(view.element);
    }
    const view = views.get(message.id);
    view.update(run()?.message === message ? run() : null);
    view.showVersions(siblings);
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
  send.disabled = !busy && (!prompt.value.trim() || !model());
  const title = current.title || "New conversation";
  $("title").textContent = title;
  document.title = current.title ? `${title} – bitnet-ops` : "bitnet-ops";
  $("think").hidden = !thinks();
  $("think").setAttribute("aria-pressed", String(current.think));
  if (model()) $("model").value = model().id;
  for (const id of ["rename", "export-markdown", "export-json", "delete"]) $(id).disabled = !saved();
}

function open(conversation) {
  current = conversation;
  views.clear();
  $("messages").replaceChildren();
  show();
  settings.refresh();
  showSidebar();
  prompt.value = sessionStorage.getItem(`draft-${saved() ? current.id : ""}`) ?? "";
  fit(prompt);
  showState();
  scroll.scrollTop = scroll.scrollHeight;
  following = true;
  closeSidebar();
}

/** What is typed stays with its conversation while the tab is open. */
function keepDraft() {
  const name = `draft-${saved() ? current.id : ""}`;
  if (prompt.value) sessionStorage.setItem(name, prompt.value);
  else sessionStorage.removeItem(name);
}

function openAddress() {
  const id = location.hash.slice(2);
  if (id === current.id || (!id && !saved())) return;
  const found = store.conversations.get(id);
  if (!found && id) history.replaceState(null, "", "#/");
  open(found ?? store.newConversation({ model: current.model }));
  if (!phone.matches) prompt.focus();
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

async function ask(parent, text) {
  run()?.stop();
  const question = store.add(current, { role: "user", parent, text, finish: "sent" });
  await reply(question);
}

async function reply(question) {
  run()?.stop();
  const conversation = current;
  conversation.model = model().id;
  const isNew = !saved();
  following = true;
  const done = answer(conversation, question, model(), (message, state) => {
    if (conversation !== current) return;
    views.get(message.id)?.update(state);
    follow();
  });
  if (isNew) history.pushState(null, "", address(conversation));
  show();
  follow();
  await done;
  if (conversation === current) {
    showState();
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

const actions = {
  edit: (message, text) => model() && ask(message.parent, text),
  regenerate: (message) => {
    const [question] = store.above(current, message).slice(-1);
    if (question && model()) reply(question).then(() => {});
    prompt.focus();
  },
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
  if (!text || !model()) return;
  prompt.value = "";
  fit(prompt);
  ask(store.path(current).at(-1)?.message.id ?? store.ROOT, text);
  keepDraft();
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
  if (saved()) location.hash = "#/";
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
    const conversation = store.fromJson(await file.text());
    await store.save(conversation);
    location.hash = address(conversation);
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
  showState();
  if (saved()) store.save(current);
});

const settings = startSettings({
  get: () => current,
  changed: () => saved() && store.save(current),
  thinks,
});

async function connect() {
  $("offline").hidden = true;
  try {
    models = (await fetchModels()).filter(({ capabilities }) => capabilities?.includes("completion") ?? true);
    $("model").replaceChildren(...models.map(({ id }) => h("option", { value: id }, id)));
    $("model").disabled = models.length === 0;
  } catch (error) {
    $("offline").hidden = false;
    $("offline-why").textContent = error.message;
    if ($("empty").hidden) toast(error.message, { action: "Try again", act: connect, alert: true, seconds: 60 });
  }
  showState();
}

$("reconnect").addEventListener("click", connect);
store.events.addEventListener("trouble", ({ detail }) => toast(detail.message, { alert: true, seconds: 60 }));
store.events.addEventListener("change", ({ detail }) => {
  if (detail.id !== current.id) return;
  if (!saved() && location.hash === address(current)) location.hash = "#/"; // deleted in another tab
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
