// The list of conversations: by date or as found, renamed and deleted where they stand.

import { $, h, iconButton, toast } from "./dom.js";
import { running } from "./answering.js";
import { events, remove, restore, save, search } from "./store.js";

export const address = (conversation) => `#/${conversation.id}`;

let current = () => null; // the open conversation

export function startSidebar(currentConversation) {
  current = currentConversation;
  const field = $("search");
  field.addEventListener("input", show);
  $("sidebar").addEventListener("keydown", (event) => {
    const links = [...$("conversations").querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    const inField = document.activeElement === field;
    if (event.key === "Escape" && inField && field.value) {
      event.stopPropagation();
      field.value = "";
      show();
    } else if (event.key === "Enter" && inField) {
      links[0]?.click();
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && (at >= 0 || inField)) {
      event.preventDefault();
      const next = at + (event.key === "ArrowDown" ? 1 : -1);
      (next < 0 ? field : (links[next] ?? links.at(-1)))?.focus();
    } else if (event.key === "F2" && at >= 0) {
      links[at].closest("li").querySelector('[data-action="rename"]').click();
    }
  });
  events.addEventListener("change", show);
  show();
}

export function show() {
  if ($("conversations").querySelector("input")) return; // a name is being typed
  const query = $("search").value;
  const groups = new Map();
  for (const hit of search(query)) {
    const group = query.trim() ? "Found" : dayOf(hit.conversation.updated);
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(row(hit));
  }
  const { activeElement } = document;
  const focused = activeElement.closest("li[data-id]")?.dataset.id;
  const part = activeElement.dataset.action ? `[data-action="${activeElement.dataset.action}"]` : "a";
  const lists = [...groups].map(([name, rows]) => [h("p", { class: "group", "aria-hidden": "true" }, name), h("ul", { "aria-label": name }, rows)]);
  const none = query.trim() ? `Nothing holds “${query.trim()}”.` : "Your conversations will stand here.";
  $("conversations").replaceChildren(...(lists.length ? lists.flat() : [h("p", { class: "none" }, none)]));
  $("found").textContent = query.trim() ? `${groups.get("Found")?.length ?? 0} found` : "";
  if (focused) $("conversations").querySelector(`li[data-id="${focused}"] ${part}`)?.focus();
}

function dayOf(time) {
  const midnight = new Date().setHours(0, 0, 0, 0);
  const days = Math.ceil((midnight - time) / 86_400_000);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  return days <= 7 ? "Last 7 days" : "Earlier";
}

function row({ conversation, found }) {
  const here = conversation === current();
  const busy = running.has(conversation.id);
  const snippet = found && h("small", {}, found[0], h("mark", {}, found[1]), found[2]);
  const link = h(
    "a",
    { href: address(conversation), "aria-current": here ? "page" : undefined, dir: "auto", title: conversation.title },
    h("span", {}, conversation.title),
    busy && h("i", { class: "busy", role: "img", "aria-label": "answering" }),
    snippet,
  );
  const item = h(
    "li",
    { "data-id": conversation.id },
    link,
    iconButton("edit", `Rename ${conversation.title}`, () => rename(conversation), { "data-action": "rename" }),
    iconButton("trash", `Delete ${conversation.title}`, () => discard(conversation), { "data-action": "delete" }),
  );
  return item;
}

/** Makes the row of the conversation a field for its name. */
export function rename(conversation) {
  const item = $("conversations").querySelector(`li[data-id="${conversation.id}"]`);
  if (!item) return;
  const field = h("input", { "aria-label": "Name of the conversation", maxlength: "200" });
  field.value = conversation.title;
  let done = false;
  const close = (keep) => {
    if (done) return;
    done = true;
    const title = field.value.trim();
    const refocus = document.activeElement === field;
    field.remove();
    if (keep && title && title !== conversation.title) {
      conversation.title = title;
      save(conversation);
    } else show();
    if (refocus) $("conversations").querySelector(`li[data-id="${conversation.id}"] a`)?.focus();
  };
  field.addEventListener("blur", () => close(true));
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") close(true);
    if (event.key === "Escape") close(false);
  });
  item.replaceChildren(field);
  field.focus();
  field.select();
}

/** Deletes, and offers to take it back. */
export async function discard(conversation) {
  const open = conversation === current();
  await remove(conversation);
  $("new").focus();
  toast(`Deleted “${conversation.title}”`, {
    action: "Undo",
    act: async () => {
      await restore(conversation);
      if (open) location.hash = address(conversation);
    },
  });
}
