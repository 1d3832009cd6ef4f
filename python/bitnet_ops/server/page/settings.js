// The sheet of system prompt and parameters, of one conversation or of all. A field that is empty
// shows what holds then: what is set for all conversations, or else the model's own value.

import { $, h } from "./dom.js";
import { fit } from "./message.js";
import { share, shared } from "./store.js";

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

const HELP = {
  one: "What is empty is as for all conversations, or else the model's own.",
  all: "For conversations that say nothing else. What is empty is the model's own.",
};

/** Fills the dialog. get(): the conversation; changed(): it was edited; model(): its row of `models`. */
export function startSettings({ get, changed, model }) {
  const dialog = $("settings");
  const scope = dialog.querySelector(".scope");
  const forAll = () => scope.querySelector(":checked").value === "all";
  /** Edits what the sheet shows now. */
  const change = (edit) => {
    const target = forAll() ? shared() : get();
    edit(target);
    if (forAll()) share(target);
    note();
    changed();
  };
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
      change(({ params }) => (value === undefined ? delete params[name] : (params[name] = value)));
    });
  };
  for (const [name, label, min, max, step, help] of NUMBERS) {
    const input = h("input", { type: "number", min, max, step: step === 1 ? 1 : "any", inputmode: "decimal" });
    const read = () => (input.value === "" ? undefined : Number(input.value));
    add(name, input, label, help, { read, write: (value) => (input.value = value ?? "") });
  }
  const effort = h("select", {}, ["default", "low", "medium", "high"].map((level) => h("option", { value: level === "default" ? "" : level }, level)));
  add("reasoning_effort", effort, "Effort of thinking", "For models that take a word for it.", {
    read: () => effort.value || undefined,
    write: (value) => (effort.value = value ?? ""),
  });
  const stop = h("textarea", { rows: "2", spellcheck: "false" });
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
    change((target) => (target.system = system.value));
  });

  function write() {
    const all = forAll();
    const { system: text, params } = all ? shared() : get();
    const below = all ? { system: "", params: {} } : shared();
    const own = { ...model()?.sampling, max_tokens: model()?.longest, seed: "any", stop: "none", ...below.params };
    for (const [name, { element, write: put }] of fields) {
      put(params[name]);
      element.removeAttribute("aria-invalid");
      element.placeholder = own[name] === undefined ? "" : `default: ${[own[name]].flat().join(", ")}`;
    }
    effort.options[0].text = below.params.reasoning_effort ? `default: ${below.params.reasoning_effort}` : "default";
    system.value = text;
    system.placeholder = below.system || "none";
    $("scope-help").textContent = HELP[all ? "all" : "one"];
    $("params").querySelector('[data-name="reasoning_effort"]').hidden = !model()?.thinks;
    note();
  }

  /** Marks the button, for what is set here is not seen while the sheet is closed. */
  function note() {
    const count = countOf(get());
    $("open-settings").dataset.count = count || "";
    const label = count ? `Parameters (${count} set)` : "Parameters";
    $("open-settings").setAttribute("aria-label", label);
    $("open-settings").title = label;
    $("reset").disabled = countOf(forAll() ? shared() : get()) === 0;
  }

  $("reset").addEventListener("click", () => {
    change((target) => Object.assign(target, { params: {}, system: "" }));
    write();
    system.focus();
  });
  scope.addEventListener("change", () => {
    write();
    fit(system);
  });
  $("open-settings").addEventListener("click", () => {
    write();
    dialog.showModal();
    fit(system);
  });
  return { refresh: write };
}

const countOf = ({ params, system }) => Object.keys(params).length + (system.trim() ? 1 : 0);
