// Text files beside the message that is being written: chosen, dropped or pasted; no more than their
// text is ever looked at.

import { $, h, icon, iconButton, toast } from "./dom.js";
import { sizeOf } from "./message.js";

const MOST = 10; // files of a message
const LARGEST = 1_000_000; // bytes of a file

export class Attachments {
  /** target: where they are shown; changed() is called as they come and go. */
  constructor(target, changed) {
    this.target = target;
    this.changed = changed;
    this.files = []; // {name, text}, of the conversation that is open
    this.others = new Map(); // those of others, by the name that `open` got
    this.name = "";
    const input = $("attachment");
    $("attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      const chosen = [...input.files];
      input.value = "";
      await this.take(chosen);
      $("prompt").focus();
    });
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
        const taken = await read(file); // meanwhile others may have come
        if (this.files.length >= MOST) throw new Error(`A message takes at most ${MOST} files.`);
        this.files = [...this.files, taken];
      } catch (error) {
        toast(error.message, { alert: true });
      }
    }
    this.show();
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
    return h("li", {}, icon("attach"), h("span", {}, file.name), h("small", {}, sizeOf(file.text)), button);
  }
}

async function read(file) {
  if (file.size > LARGEST) throw new Error(`${file.name} is too large: a file has at most 1 MB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name: file.name.slice(0, 200), text };
  } catch {
    // It is a folder, or not UTF-8.
  }
  throw new Error(`${file.name} is no text file, and the model reads nothing else.`);
}
