// Files beside the message that is being written: chosen, dropped or pasted. Texts, of which no more
// than their text is ever looked at, and pictures where the model has eyes.

import { $, announce, h, icon, iconButton, toast } from "./dom.js";
import { pictureOf, sizeOf } from "./message.js";
import { readPicture } from "./pictures.js";

const MOST = 10; // files of a message
const LARGEST = 1_000_000; // bytes of a file

export class Attachments {
  /** target: where they are shown; changed() is called as they come and go; sees(): the model. */
  constructor(target, changed, sees) {
    this.target = target;
    this.changed = changed;
    this.sees = sees;
    this.files = []; // {name, text} or readPicture's, of the conversation that is open
    this.others = new Map(); // those of others, by the name that `open` got
    this.name = "";
    for (const [button, field] of [["attach", "attachment"], ["attach-picture", "picture"]]) {
      const input = $(field);
      $(button).addEventListener("click", () => input.click());
      input.addEventListener("change", async () => {
        const chosen = [...input.files];
        input.value = "";
        await this.take(chosen);
        $("prompt").focus();
      });
    }
    $("prompt").addEventListener("paste", (event) => {
      const { files, types } = event.clipboardData;
      if (!files.length || types.includes("text/plain")) return; // a picture beside a text is no file
      event.preventDefault();
      this.take([...files]);
    });
    for (const type of ["dragenter", "dragover", "dragleave", "drop"]) {
      $("main").addEventListener(type, (event) => this.drag(event));
    }
  }

  drag(event) {
    if (!event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    const left = event.type === "dragleave" && !$("main").contains(event.relatedTarget);
    $("composer").classList.toggle("dropping", !left && event.type !== "drop");
    if (event.type === "drop") this.take([...event.dataTransfer.files]);
  }

  async take(given) {
    for (const file of given) {
      try {
        const taken = await this.read(file); // meanwhile others may have come
        if (this.files.length >= MOST) throw new Error(`A message takes at most ${MOST} files.`);
        this.files = [...this.files, taken];
        if (taken.image) announce(`Picture ${taken.name} is attached.`);
      } catch (error) {
        toast(error.message, { alert: true });
      }
    }
    this.show();
  }

  async read(file) {
    if (!file.type.startsWith("image/") || file.type === "image/svg+xml") return readText(file);
    if (!this.sees()) throw new Error(`${file.name} is a picture, and this model reads texts alone.`);
    return readPicture(file);
  }

  /** Shows the files of another conversation. */
  open(name) {
    this.others.set(this.name, this.files);
    this.name = name;
    this.files = this.others.get(name) ?? [];
    this.show();
  }

  clear() {
    this.files = [];
    this.show();
  }

  show() {
    this.target.hidden = this.files.length === 0;
    this.target.replaceChildren(...this.files.map((file) => this.row(file)));
    this.changed();
  }

  row(file) {
    const remove = () => {
      this.files = this.files.filter((other) => other !== file);
      this.show();
      $("prompt").focus();
    };
    const button = iconButton("close", `Leave ${file.name} out`, remove);
    const sign = file.image ? pictureOf(file) : icon("attach");
    return h("li", {}, sign, h("span", {}, file.name), h("small", {}, sizeOf(file)), button);
  }
}

async function readText(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is too large: a file has at most 1 MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name.slice(0, 200), text };
  } catch {
    // It is a folder, or not UTF-8.
  }
  throw new Error(`${file.name} is no text file, and the model reads nothing else.`);
}
