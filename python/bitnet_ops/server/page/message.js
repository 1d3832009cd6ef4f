// How one message looks: a question as it was typed, an answer as Markdown, what can be done with it.

import { copyText, h, icon, iconButton, number } from "./dom.js";
import { Markdown } from "./markdown.js";
import { wholeText } from "./store.js";

export const FORGET = "Forget the oldest";

/**
 * The view of a message. actions: edit(message, text), regenerate(message), goOn(message) with an
 * answer that was cut off, choose(message) of a sibling, focus() for the field of the next message;
 * forget(message): what is oldest above it, and answer then; remember(message): what is above it;
 * older(message): whether there is anything to forget; contextLength().
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.offers = []; // of the note: [name, act]
    this.foot = h("footer", { class: "foot" });
    this.versions = h("div", { class: "versions", role: "group", "aria-label": "Versions" });
    const title = `title-${message.id}`;
    const user = message.role === "user";
    this.element = h(
      "article",
      { class: user ? "question" : "answer", "aria-labelledby": title, "data-id": message.id },
      h("h2", { id: title, class: user ? "sr-only" : "who" }, user ? "You" : message.model),
    );
    if (user) this.buildQuestion();
    else this.buildAnswer();
  }

  buildQuestion() {
    const { text, files = [] } = this.message;
    this.bubble = h("div", { class: "bubble", dir: "auto" }, files.map(attachment), text);
    const copy = iconButton("copy", "Copy", () => copyText(wholeText(this.message), copy));
    const edit = iconButton("edit", "Edit", () => this.edit(), { "data-action": "edit" });
    this.foot.append(this.versions, copy, edit);
    this.element.append(this.bubble, this.foot);
  }

  buildAnswer() {
    this.summary = h("summary", {});
    this.thoughts = h("div", { class: "thought", dir: "auto" });
    this.details = h("details", { class: "thoughts", hidden: true }, this.summary, this.thoughts);
    this.body = h("div", { class: "markdown" });
    this.markdown = new Markdown(this.body);
    this.waiting = h("p", { class: "waiting" }, h("i"), h("i"), h("i"), h("span", { class: "sr-only" }, "Waiting for the answer"));
    this.note = h("p", { class: "note", hidden: true });
    const text = () => this.message.text;
    const copy = iconButton("copy", "Copy", () => copyText(text(), copy));
    this.again = iconButton("again", "Answer again", () => this.actions.regenerate(this.message), { "data-action": "again" });
    this.buttons = h("div", { class: "buttons" }, copy, this.again);
    this.stats = h("p", { class: "stats" });
    this.foot.append(this.versions, this.buttons, this.stats);
    this.element.append(this.details, this.body, this.waiting, this.note, this.foot);
  }

  /** Shows what the message holds now. run: of answering.js while the answer is coming. */
  update(run = null) {
    const { message } = this;
    if (message.role === "user") return;
    const { text, thoughts, thinking_ms, finish, stats } = message;
    const active = run !== null;
    this.element.setAttribute("aria-busy", String(active));
    this.details.hidden = !thoughts;
    this.summary.textContent = active && !text ? "Thinking …" : thoughtFor(thinking_ms);
    if (this.thoughts.textContent !== thoughts) this.thoughts.textContent = thoughts;
    this.markdown.update(text);
    this.waiting.hidden = !active || Boolean(text || thoughts || run.note);
    this.buttons.hidden = active;
    this.showNote(active ? { text: run.note } : this.noteOf(message), finish === "error" && !active);
    this.stats.replaceChildren(...(stats ? statsOf(stats, active) : []));
  }

  showNote({ text, offers = [] }, failed) {
    this.note.hidden = !text;
    this.note.classList.toggle("failed", failed);
    const shown = [text, ...offers.map(([name]) => name)].join("\n");
    if (this.note.dataset.shown === shown) return;
    this.note.dataset.shown = shown;
    this.offers = offers;
    const buttons = offers.map(([name, act]) => h("button", { type: "button", onclick: () => act(this.message) }, name));
    this.note.replaceChildren(h("span", {}, text), ...buttons);
  }

  /** How an answer ended, if there is anything to say, and what can be done: {text, offers}. */
  noteOf({ finish, error, code, text, stats }) {
    const { forget, goOn, older, regenerate } = this.actions;
    const context = number(this.actions.contextLength());
    const forgetting = older(this.message) ? [[FORGET, forget]] : [];
    const going = text ? [["Continue", goOn]] : [];
    if (code === "context_length_exceeded") {
      const why = forgetting.length
        ? `The context is full: the conversation does not fit into the ${context} tokens that the model can see.`
        : `This message does not fit into the ${context} tokens that the model can see. Make it shorter.`;
      return { text: why, offers: forgetting };
    }
    if (finish === "error") return { text: error, offers: [["Try again", regenerate], ...going] };
    if (finish === "stopped") return { text: "Stopped.", offers: going };
    if (finish === "length" && stats?.prompt + stats?.tokens >= this.actions.contextLength()) {
      return { text: `Cut off: the context of ${context} tokens is full.`, offers: forgetting };
    }
    if (finish === "length") return { text: "Cut off at the limit of tokens.", offers: going };
    if (finish === "content_filter") return { text: "Cut off by a filter." };
    if (!finish) return { text: "Not finished: the page was closed, or another tab is receiving it.", offers: going };
    return { text: text ? "" : "The model said nothing." };
  }

  /** Whether sending begins here, and what is above is forgotten. */
  showBegin(begins) {
    this.begin?.remove();
    this.begin = null;
    if (!begins) return;
    const button = h("button", { type: "button", class: "quiet", onclick: () => this.actions.remember(this.message) }, "Remember it again");
    this.begin = h("p", { class: "begin" }, h("span", {}, "The model no longer sees what stands above."), button);
    this.element.prepend(this.begin);
  }

  /** Which of its `siblings` this one is; nothing where it is the only one. */
  showVersions(siblings) {
    const at = siblings.indexOf(this.message);
    this.versions.hidden = siblings.length < 2;
    if (this.versions.hidden) return this.versions.replaceChildren();
    const go = (step, action) => () => {
      this.actions.choose(siblings[(at + step + siblings.length) % siblings.length], action);
    };
    this.versions.replaceChildren(
      iconButton("left", "Previous version", go(-1, "previous"), { "data-action": "previous" }),
      h("span", { "aria-label": `Version ${at + 1} of ${siblings.length}`, role: "img" }, `${at + 1}/${siblings.length}`),
      iconButton("right", "Next version", go(1, "next"), { "data-action": "next" }),
    );
  }

  /** Turns the question into a field; sending it makes another version. */
  edit() {
    if (this.element.classList.contains("editing")) return;
    const field = h("textarea", { "aria-label": "Edit your message", rows: "1", oninput: () => fit(field) });
    field.value = this.message.text;
    const close = () => {
      form.remove();
      this.element.classList.remove("editing");
    };
    const send = () => {
      const text = field.value.trim();
      if (!text && !this.message.files?.length) return;
      close();
      this.actions.edit(this.message, text);
      this.actions.focus();
    };
    const cancel = () => {
      close();
      this.foot.querySelector('[data-action="edit"]').focus();
    };
    const form = h(
      "form",
      { class: "editor", onsubmit: (event) => (event.preventDefault(), send()) },
      field,
      h(
        "div",
        { class: "row end" },
        h("button", { type: "button", onclick: cancel }, "Cancel"),
        h("button", { class: "primary" }, "Send"),
      ),
    );
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel();
      } else if (event.target === field && sends(event)) {
        event.preventDefault();
        send();
      }
    });
    this.element.classList.add("editing");
    this.element.insertBefore(form, this.foot);
    fit(field);
    field.focus();
  }
}

/** Whether a key sends: Enter, unless it makes a new line, ends a composed character or is on a phone. */
export const sends = (event) =>
  event.key === "Enter" &&
  !event.shiftKey &&
  !event.isComposing &&
  (event.ctrlKey || event.metaKey || !matchMedia("(pointer: coarse)").matches);

/** Makes a field as high as its text; the style sheet says how high at most. */
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function thoughtFor(ms) {
  return ms ? `Thought for ${ms < 9950 ? number(ms / 1000, 1) : number(ms / 1000)} s` : "Thoughts";
}

const attachment = (file) =>
  file.image
    ? h("figure", { class: "picture" }, pictureOf(file))
    : h(
        "details",
        { class: "file" },
        h("summary", {}, icon("attach"), h("span", {}, file.name), h("small", {}, sizeOf(file))),
        h("pre", { tabindex: "0", role: "group", "aria-label": `File ${file.name}` }, file.text),
      );

/** A picture as an element; what is seen on it, the page does not know. */
export const pictureOf = ({ name, image, width, height }) =>
  h("img", { src: image, alt: `Picture ${name}, ${width} by ${height} pixels`, width, height, decoding: "async" });

export const sizeOf = ({ text, image }) => {
  const bytes = image ? Math.floor(0.75 * (image.length - image.indexOf(","))) : new TextEncoder().encode(text).length;
  return bytes < 1000 ? `${bytes} bytes` : `${number(bytes / 1000, bytes < 9950 ? 1 : 0)} kB`;
};

function statsOf({ rate, first_ms, prompt, cached, tokens }, active) {
  const parts = [];
  if (rate) parts.push(`${number(rate, rate < 99.5 ? 1 : 0)} tokens/s`);
  if (active) return [h("span", {}, parts[0] ?? "")];
  if (tokens) parts.push(`${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
  if (first_ms) parts.push(`first after ${number(first_ms / 1000, 2)} s`);
  if (prompt) parts.push(`prompt ${number(prompt)}${cached ? ` (${number(cached)} cached)` : ""}`);
  return parts.map((part) => h("span", {}, part));
}
