// What both pages are built with: elements, icons, messages, the theme. Text becomes text nodes;
// nothing here or elsewhere parses HTML.

/** An element; attributes that are functions are listeners, false and undefined are left out. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  // Children first: with dir="auto" a browser looks for a letter again at each child that comes.
  element.append(...children.flat().filter((child) => child !== null && child !== false));
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  return element;
}

export const $ = (id) => document.getElementById(id);

export function icon(name) {
  const use = svg("use", { href: `#icon-${name}` }); // the page holds them: they are there without a server
  return svg("svg", { class: "icon", "aria-hidden": "true" }, use);
}

/** A button that shows an icon only; `label` is its name and its tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  const given = { class: "icon-button", type: "button", title: label, "aria-label": label };
  return h("button", { ...given, ...attributes, onclick }, icon(name));
}

/** Says a text to screen readers; the empty text between makes a repetition heard. */
export function announce(text) {
  $("announcer").textContent = "";
  setTimeout(() => ($("announcer").textContent = text), 50);
}

/** A message at the foot of the page, with one action at most; it waits while it is pointed at. */
export function toast(text, { action, act, seconds = 8, alert = false } = {}) {
  const close = () => {
    clearTimeout(timer);
    element.remove();
  };
  const start = () => (timer = setTimeout(close, seconds * 1000));
  const button = action && h("button", { type: "button", onclick: () => (close(), act()) }, action);
  const element = h(
    "div",
    { class: alert ? "toast alert" : "toast", role: alert ? "alert" : undefined },
    h("span", {}, text),
    button ?? null,
    iconButton("close", "Dismiss", close),
  );
  for (const event of ["pointerenter", "focusin"]) {
    element.addEventListener(event, () => clearTimeout(timer));
  }
  for (const event of ["pointerleave", "focusout"]) element.addEventListener(event, start);
  let timer;
  start();
  $("toasts").append(element);
  return close;
}

/** Copies `text`; pages that came over plain HTTP from another machine have no clipboard API. */
export async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "sr-only" });
    area.value = text;
    (document.querySelector("dialog[open]") ?? document.body).append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const shown = [...button.childNodes];
  if (button.dataset.copied) return;
  button.dataset.copied = "yes";
  button.replaceChildren(icon("check"), ...shown.filter((node) => node.nodeType === 3));
  announce("Copied");
  setTimeout(() => {
    button.replaceChildren(...shown);
    delete button.dataset.copied;
  }, 1500);
}

const THEMES = ["system", "light", "dark"];

/** Makes `button` go through the themes; another tab's choice is followed. */
export function themeSwitch(button) {
  const name = "bitnet-ops-theme";
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.replaceChildren(icon(theme));
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  const current = () => document.documentElement.dataset.theme ?? "system";
  button.addEventListener("click", () => {
    const theme = THEMES[(THEMES.indexOf(current()) + 1) % THEMES.length];
    show(theme);
    announce(`Theme: ${theme}`);
    try {
      localStorage.setItem(name, theme);
    } catch {
      // Then the choice lasts as long as the page.
    }
  });
  addEventListener("storage", (event) => {
    if (event.key === name) show(THEMES.includes(event.newValue) ? event.newValue : "system");
  });
  show(current());
}

export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
