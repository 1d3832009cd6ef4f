// The sheet of a conversation's system prompt and parameters. An empty field leaves a parameter to
// the server, and is not sent.

import { $, h } from "/page/dom.js";
import { fit } from "/page/message.js";

const NUMBERS = [
  // name, label, smallest, largest, step, what it does
  ["temperature", "Temperature", 0, 2, 0.05, "Higher is more varied; 0 takes the likeliest word."],
  ["max_tokens", "Longest answer", 1, 1_000_000, 1, "In tokens."],
  ["top_p", "Top p", 0, 1, 0.01, "The likeliest tokens that together have this probability."],
  ["top_k", "Top k", 0, 1_000_000, 1, "This many of the likeliest tokens; 0 is all."],
  ["min_p", "Min p", 0, 1, 0.01, "Tokens at least this likely, relative to the likeliest."],
  ["seed", "Seed", 0, 2 ** 53 - 1, 1, "The same seed gives the same answer."],
  ["repetition_penalty", "Repetition penalty", 0.01, 2, 0.01, "Above 1, what was there is less likely."],
  ["frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Grows with each time a token was there."],
  ["presence_penalty", "Presence penalty", -2, 2, 0.1, "The same however often it was there."],
];

/** Fills the dialog. get(): the conversation; changed(): it was edited; thinks(): its model can think. */
export function startSettings({ get, changed, thinks }) {
  const dialog = $("settings");
  const fields = new Map(); // name -> {element, write(value), read()}: undefined is "not stated"
  const add = (name, element, label, help, { write, read }) => {
    element.id = `param-${name}`;
    element.setAttribute("aria-describedby", `help-${name}`);
    const hint = h("small", { id: `help-${name}` }, help);
    $("params").append(h("div", { class: "field", "data-name": name }, h("label", { for: element.id }, label), element, hint));
    fields.set(name, { element, write, read });
    element.addEventListener("input", () => {
      const valid = element.checkValidity();
      element.setAttribute("aria-invalid", String(!valid));
      hint.textContent = valid ? help : element.validationMessage;
      hint.classList.toggle("wrong", !valid);
      if (!valid) return;
      const value = read();
      if (value === undefined) delete get().params[name];
      else get().params[name] = value;
      note();
      changed();
    });
  };
  for (const [name, label, min, max, step, help] of NUMBERS) {
    const input = h("input", { type: "number", min, max, step: step === 1 ? 1 : "any", inputmode: "decimal", placeholder: "default" });
    const read = () => (input.value === "" ? undefined : Number(input.value));
    add(name, input, label, help, { read, write: (value) => (input.value = value ?? "") });
  }
  const effort = h("select", {}, ["default", "low", "medium", "high"].map((level) => h("option", { value: level === "default" ? "" : level }, level)));
  add("reasoning_effort", effort, "Effort of thinking", "For models that take a word for it.", {
    read: () => effort.value || undefined,
    write: (value) => (effort.value = value ?? ""),
  });
  const stop = h("textarea", { rows: "2", placeholder: "none", spellcheck: "false" });
  add("stop", stop, "Stop texts", "The answer ends before any of these; one a line.", {
    read: () => {
      const lines = stop.value.split("\n").filter(Boolean);
      return lines.length ? lines : undefined;
    },
    write: (value) => (stop.value = [value ?? []].flat().join("\n")),
  });
  const system = $("system");
  system.addEventListener("input", () => {
    fit(system);
    get().system = system.value;
    note();
    changed();
  });

  function write() {
    for (const [name, { element, write: put }] of fields) {
      put(get().params[name]);
      element.removeAttribute("aria-invalid");
    }
    system.value = get().system;
    $("params").querySelector('[data-name="reasoning_effort"]').hidden = !thinks();
    note();
  }

  /** Marks the button, for what is set here is not seen while the sheet is closed. */
  function note() {
    const count = Object.keys(get().params).length + (get().system.trim() ? 1 : 0);
    $("open-settings").dataset.count = count || "";
    const label = count ? `Parameters (${count} set)` : "Parameters";
    $("open-settings").setAttribute("aria-label", label);
    $("open-settings").title = label;
    $("reset").disabled = count === 0;
  }

  $("reset").addEventListener("click", () => {
    get().params = {};
    get().system = "";
    write();
    system.focus();
    changed();
  });
  $("open-settings").addEventListener("click", () => {
    write();
    dialog.showModal();
    fit(system);
  });
  return { refresh: write };
}
