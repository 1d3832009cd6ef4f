// Markdown to elements. Builds text nodes and a fixed set of elements, so markup in the text stays
// text; a link leads to http, https or mail only. Every loop moves forward, and nesting is bounded:
// time grows with the length of the text, whatever it holds.

import { copyText, h, icon } from "./dom.js";

const DEEPEST = 12; // lists, quotes and emphasis within each other; what is deeper stays text

/** Renders a growing text into `target`; blocks that stay the same keep their elements. */
export class Markdown {
  constructor(target) {
    this.target = target;
    this.shown = []; // blocks
  }

  update(text) {
    const blocks = blocksOf(visible(text).split(/\r\n?|\n/));
    const before = this.shown;
    let same = 0;
    while (same < before.length && equal(before[same], blocks[same])) same += 1;
    const rest = blocks.slice(same);
    const [last] = rest;
    const grows = last?.kind === "code" && before[same]?.kind === "code" && before[same].head === last.head;
    if (grows && rest.length === 1 && before.length === same + 1) {
      // The same elements: a reader may have scrolled or selected in them.
      this.target.lastChild.querySelector("code").textContent = last.lines.join("\n");
    } else {
      while (this.target.children.length > same) this.target.lastChild.remove();
      this.target.append(...rest.map((block) => elementOf(block, 0)));
    }
    this.shown = blocks;
  }
}

const equal = (a, b) =>
  b !== undefined &&
  a.kind === b.kind &&
  a.head === b.head &&
  a.lines.length === b.lines.length &&
  a.lines.every((line, at) => line === b.lines[at]);

// Characters that turn the direction of text can make code or an address read as another.
const visible = (text) => text.replace(/[\u202a-\u202e\u2066-\u2069]/g, "\ufffd");

// Blocks -------------------------------------------------------------------------------------------

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+([^]*))?$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DIVIDER = /^\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?$/; // of a trimmed line
const MATH = /^ {0,3}(\$\$|\\\[)/;

const blank = (line) => !line || !/\S/.test(line);
const indentOf = (line) => line.length - line.trimStart().length;
const startsBlock = (line) =>
  FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
const isTable = (line, next) =>
  line.includes("|") && next !== undefined && next.includes("-") && next.includes("|") && DIVIDER.test(next.trim());

/** The outermost blocks: {kind, lines} and for some a `head`. */
function blocksOf(lines) {
  const blocks = [];
  const headings = new Headings();
  let at = 0;
  const take = (kind, end, head) => {
    blocks.push({ kind, head, lines: lines.slice(at, end) });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at];
    let end = at + 1;
    let match;
    if (blank(line)) {
      at = end;
    } else if ((match = FENCE.exec(line))) {
      const closing = new RegExp(`^ {0,3}${match[2][0]}{${match[2].length},}[ \t]*$`);
      while (end < lines.length && !closing.test(lines[end])) end += 1;
      const indent = match[1].length;
      const inner = lines.slice(at + 1, end);
      const code = indent ? inner.map((other) => other.slice(Math.min(indent, indentOf(other)))) : inner;
      blocks.push({ kind: "code", head: match[3].trim(), lines: code });
      at = end + 1;
    } else if ((match = MATH.exec(line))) {
      const close = match[1] === "$$" ? "$$" : "\\]";
      const closes = (other, from) => other.indexOf(close, from) >= 0;
      if (!closes(line, match[0].length)) {
        while (end < lines.length && !blank(lines[end]) && !closes(lines[end], 0)) end += 1;
        end += end < lines.length && !blank(lines[end]) ? 1 : 0;
      }
      take("math", end);
    } else if ((match = HEADING.exec(line))) {
      blocks.push({ kind: headings.next(match[1].length), head: (match[2] ?? "").trim(), lines: [line] });
      at = end;
    } else if (RULE.test(line)) {
      take("rule", end);
    } else if (QUOTE.test(line)) {
      while (end < lines.length && !blank(lines[end]) && (QUOTE.test(lines[end]) || !startsBlock(lines[end]))) end += 1;
      take("quote", end);
    } else if (ITEM.test(line)) {
      take("list", endOfList(lines, at));
    } else if (isTable(line, lines[at + 1])) {
      end += 1;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      take("table", end);
    } else {
      while (
        end < lines.length &&
        !blank(lines[end]) &&
        !startsBlock(lines[end]) &&
        !MATH.test(lines[end]) &&
        !isTable(lines[end], lines[end + 1])
      ) {
        end += 1;
      }
      take("paragraph", end);
    }
  }
  return blocks;
}

/** Levels of headings below that of a message, h2, of which none is left out. */
class Headings {
  above = [];

  next(level) {
    while (this.above.at(-1) >= level) this.above.pop();
    this.above.push(level);
    return `h${Math.min(this.above.length + 2, 6)}`;
  }
}

/** Where the list that starts at `at` ends: at text that is not indented, behind a blank line. */
function endOfList(lines, at) {
  const indent = indentOf(lines[at]);
  const ordered = /\d/.test(ITEM.exec(lines[at])[2]);
  let end = at + 1;
  for (let line = end; line < lines.length; line += 1) {
    const text = lines[line];
    if (blank(text)) continue;
    const inside = indentOf(text) > indent + 1;
    const item = ITEM.exec(text);
    const sibling = item && /\d/.test(item[2]) === ordered && !RULE.test(text);
    const lazy = line === end && !startsBlock(text) && !blank(lines[line - 1]);
    if (!inside && !sibling && !lazy) break;
    end = line + 1;
  }
  return end;
}

function elementOf({ kind, head, lines }, depth) {
  if (kind === "code") return codeBlock(head, lines.join("\n"));
  if (kind === "rule") return h("hr");
  if (kind === "math") return h("p", { class: "math" }, lines.join("\n"));
  if (kind === "paragraph" || depth >= DEEPEST) return h("p", { dir: "auto" }, inline(lines.join("\n")));
  if (kind === "quote") {
    return h("blockquote", {}, within(lines.map((line) => line.replace(QUOTE, "")), depth));
  }
  if (kind === "list") return list(lines, depth);
  if (kind === "table") return table(lines);
  return h(kind, { dir: "auto" }, inline(head));
}

const within = (lines, depth) => blocksOf(lines).map((block) => elementOf(block, depth + 1));

function list(lines, depth) {
  const [, , mark] = ITEM.exec(lines[0]);
  const indent = indentOf(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && indentOf(line) <= indent + 1 && !RULE.test(line)) {
      items.push([line.slice(match[0].length)]);
      items.at(-1).width = match[0].length;
    } else {
      const item = items.at(-1);
      item.push(line.slice(Math.min(indentOf(line), item.width)));
    }
  }
  const loose = items.slice(0, -1).some((item) => blank(item.at(-1)));
  const start = parseInt(mark, 10);
  return h(
    start >= 0 ? "ol" : "ul",
    { dir: "auto", class: loose ? "loose" : undefined, start: start >= 0 && start !== 1 ? start : undefined },
    items.map((item) => {
      const task = /^\[([ xX])\] /.exec(item[0]);
      if (task) item[0] = item[0].slice(4);
      const parts = within(item, depth);
      if (task) {
        const done = task[1] !== " ";
        parts.unshift(h("span", { class: "task", role: "img", "aria-label": done ? "Done:" : "To do:" }, done ? "☑" : "☐"));
      }
      return h("li", { class: task ? "has-task" : undefined }, parts);
    }),
  );
}

function cellsOf(row) {
  const cells = row.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && blank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const aligned = cellsOf(lines[1]).map((cell) => {
    if (!cell.endsWith(":")) return undefined;
    return cell.startsWith(":") ? "middle" : "end";
  });
  const row = (tag, line) =>
    h("tr", {}, cellsOf(line).map((cell, at) => h(tag, { class: aligned[at], dir: "auto" }, inline(cell))));
  const body = lines.slice(2).map((line) => row("td", line));
  const inner = h("table", {}, h("thead", {}, row("th", lines[0])), h("tbody", {}, body));
  return h("div", { class: "table", role: "group", "aria-label": "Table", tabindex: "0" }, inner);
}

function codeBlock(language, code) {
  const name = /^[\w+#.-]{1,30}/.exec(language)?.[0] ?? "";
  const inner = h("code", {}, code);
  const copy = h("button", { type: "button", class: "quiet", onclick: () => copyText(inner.textContent, copy) }, icon("copy"), "Copy");
  return h(
    "div",
    { class: "code", dir: "ltr" },
    h("div", { class: "bar" }, h("span", {}, name || "text"), copy),
    h("pre", { tabindex: "0", role: "group", "aria-label": `Code, ${name || "text"}` }, inner),
  );
}

// Inline -------------------------------------------------------------------------------------------

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const ENTITY = /&(?:(amp|lt|gt|quot|apos|nbsp)|#(\d{1,7})|#[xX]([\da-fA-F]{1,6}));/y;
const ADDRESS = /https?:\/\/[^\s<>"`*|\\]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/y;
const DOLLARS = /\$(?!\s)(?:[^$\n\\]|\\.){1,300}(?<!\s)\$(?!\d)/y;
const PLAIN = /[^\\`*_~[\]!<&$h\n]+/y; // up to the next character that may mean something
const PUNCTUATION = /^[\p{P}\p{S}]/u;

/** The nodes of a line of text. */
function inline(source) {
  const items = []; // text, {node}, {open}, {close}, {run}: a run of delimiters, {bracket}
  const brackets = []; // positions in `items`
  const ticks = backticks(source);
  const noEnd = new Set(); // closing marks of which none follows
  let at = 0;
  const match = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(source);
    if (found) at += found[0].length;
    return found;
  };
  /** The text up to `mark`, which follows `from`; null if it never does. */
  const until = (mark, from) => {
    const end = noEnd.has(mark) ? -1 : source.indexOf(mark, from);
    if (end < 0) noEnd.add(mark);
    return end < 0 ? null : source.slice(at, (at = end + mark.length));
  };
  while (at < source.length) {
    const character = source[at];
    const next = source[at + 1];
    let found;
    if ((found = match(PLAIN))) {
      items.push(found[0]);
    } else if (character === "\n") {
      items.push({ node: h("br") });
      at += 1;
    } else if (character === "\\") {
      const math = next === "(" ? until("\\)", at + 2) : next === "[" ? until("\\]", at + 2) : null;
      if (math) items.push(math);
      else {
        const escapes = next && /[!-/:-@[-`{-~]/.test(next);
        items.push(escapes ? next : "\\");
        at += escapes ? 2 : 1;
      }
    } else if (character === "$" && (found = match(DOLLARS))) {
      items.push(found[0]);
    } else if (character === "`") {
      const run = runLength(source, at);
      const end = ticks.next(run, at + run);
      if (end < 0) items.push(source.slice(at, (at += run)));
      else {
        const code = source.slice(at + run, end).replaceAll("\n", " ");
        items.push({ node: h("code", {}, padded(code) ? code.slice(1, -1) : code) });
        at = end + run;
      }
    } else if (character === "*" || character === "_" || character === "~") {
      const run = runLength(source, at);
      const strikes = character !== "~" || run === 2;
      items.push(strikes ? delimiter(source, at, run) : source.slice(at, at + run));
      at += run;
    } else if (character === "[" || (character === "!" && next === "[")) {
      brackets.push(items.length);
      items.push({ bracket: character === "!" ? "![" : "[" });
      at += character === "!" ? 2 : 1;
    } else if (character === "]") {
      at += 1;
      const opened = brackets.pop();
      const target = opened === undefined ? null : destination(source, at);
      const address = target && safeAddress(target.address);
      if (address) {
        emphasise(items, opened + 1);
        const words = items.slice(opened + 1);
        items[opened] = { open: "a", address, ends: null };
        const end = { close: "a", warn: misleading(words, address) };
        items.push(end);
        items[opened].ends = end;
        brackets.length = 0; // no links in links
        at = target.end;
      } else items.push("]");
    } else if (character === "<" && (found = match(ANGLED)) && safeAddress(found[1])) {
      items.push({ node: link(safeAddress(found[1]), [found[1]]) });
    } else if (found) {
      items.push(found[0]);
    } else if (character === "&" && (found = match(ENTITY))) {
      const point = found[2] ? parseInt(found[2], 10) : parseInt(found[3], 16);
      items.push(found[1] ? ENTITIES[found[1]] : visible(fromPoint(point)));
    } else if (character === "h" && !/\w/.test(source[at - 1] ?? "") && (found = match(ADDRESS))) {
      const bare = trimmed(found[0]);
      at -= found[0].length - bare.length;
      const address = safeAddress(bare);
      items.push(address ? { node: link(address, [bare]) } : bare);
    } else {
      items.push(character);
      at += 1;
    }
  }
  emphasise(items, 0);
  return built(items);
}

const padded = (code) => code.startsWith(" ") && code.endsWith(" ") && !blank(code);
const fromPoint = (point) => (point > 0 && point <= 0x10ffff ? String.fromCodePoint(point) : "\ufffd");

function runLength(source, at) {
  let end = at + 1;
  while (source[end] === source[at]) end += 1;
  return end - at;
}

/** Finds the next run of backticks of a length; as positions only grow, each is looked at once. */
function backticks(source) {
  const runs = new Map();
  for (const { 0: run, index } of source.matchAll(/`+/g)) {
    if (!runs.has(run.length)) runs.set(run.length, { starts: [], seen: 0 });
    runs.get(run.length).starts.push(index);
  }
  return {
    next(length, from) {
      const run = runs.get(length);
      while (run && run.starts[run.seen] < from) run.seen += 1;
      return run?.starts[run.seen] ?? -1;
    },
  };
}

/** A run of *, _ or ~ and whether it may open or close, by what stands beside it. */
function delimiter(source, at, length) {
  const mark = source[at];
  const before = source[at - 1] ?? " ";
  const after = source[at + length] ?? " ";
  const left = !/\s/.test(after) && (!PUNCTUATION.test(after) || /\s/.test(before) || PUNCTUATION.test(before));
  const right = !/\s/.test(before) && (!PUNCTUATION.test(before) || /\s/.test(after) || PUNCTUATION.test(after));
  const word = mark === "_"; // no emphasis inside of snake_case
  return {
    run: mark,
    left: length,
    opens: left && (!word || !right || PUNCTUATION.test(before)),
    closes: right && (!word || !left || PUNCTUATION.test(after)),
    before: [],
    after: [],
  };
}

/** Matches the runs of `items` from `from` on: the nearest opening run of the same character. */
function emphasise(items, from) {
  const openers = [];
  const waiting = { "*": 0, _: 0, "~": 0 }; // of openers, so that no search is in vain
  for (let at = from; at < items.length; at += 1) {
    const item = items[at];
    if (!item.run) continue;
    while (item.closes && item.left && waiting[item.run]) {
      const opener = openers.at(-1);
      if (opener.run !== item.run) {
        waiting[openers.pop().run] -= 1;
        continue;
      }
      const size = Math.min(opener.left, item.left, 2);
      const tag = item.run === "~" ? "del" : size === 2 ? "strong" : "em";
      const end = { close: tag };
      opener.after.unshift({ open: tag, ends: end });
      item.before.push(end);
      opener.left -= size;
      item.left -= size;
      if (!opener.left) waiting[openers.pop().run] -= 1;
    }
    if (item.opens && item.left) {
      openers.push(item);
      waiting[item.run] += 1;
    }
    item.closes = item.opens = false; // settled: a later pass over this range leaves it
  }
}

/** The tree of `items`; below DEEPEST elements the text goes on without new ones. */
function built(items) {
  const root = document.createDocumentFragment();
  const stack = [{ node: root, ends: null }];
  const put = (item) => {
    const top = stack.at(-1);
    if (typeof item === "string") top.node.append(item);
    else if (item.node) top.node.append(item.node);
    else if (item.bracket) top.node.append(item.bracket);
    else if (item.run) {
      item.before.forEach(put);
      if (item.left) stack.at(-1).node.append(item.run.repeat(item.left));
      item.after.forEach(put);
    } else if (item.open && stack.length <= DEEPEST) {
      const node = item.open === "a" ? link(item.address, []) : h(item.open);
      top.node.append(node);
      stack.push({ node, ends: item.ends });
    } else if (item.close && top.ends === item) {
      stack.pop();
      if (item.warn) stack.at(-1).node.append(h("span", { class: "host" }, ` (${item.warn})`));
    }
  };
  items.forEach(put);
  return root;
}

// Links --------------------------------------------------------------------------------------------

/** The address in parentheses at `at`, with an optional title; null if there is none. */
function destination(source, at) {
  const pattern = /\([ \t]{0,9}(?:<([^<>\n]{0,2000})>|((?:[^\s()<>\\]|\\[()]|\([^\s()<>]{0,500}\)){0,2000}))(?:[ \t]{1,9}(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?[ \t]{0,9}\)/y;
  pattern.lastIndex = at;
  const found = pattern.exec(source);
  return found && { address: (found[1] ?? found[2]).replace(/\\([()])/g, "$1"), end: pattern.lastIndex };
}

/** The address if it is absolute and leads to http, https or mail. */
function safeAddress(address) {
  if (!/^(?:https?:\/\/|mailto:)/i.test(address)) return null;
  try {
    return new URL(address).href;
  } catch {
    return null;
  }
}

/** The real host, where the words of a link name another one. */
function misleading(words, address) {
  const shown = words.map((word) => (typeof word === "string" ? word : (word.node?.textContent ?? ""))).join("");
  const named = /^\s*(?:https?:\/\/)?([\w-]+(?:\.[\w-]+)+)(?:[/:?#@]|\s*$)/i.exec(shown)?.[1];
  const { host, pathname, protocol } = new URL(address);
  const real = protocol === "mailto:" ? pathname : host;
  const bare = (name) => name.toLowerCase().replace(/^www\./, "");
  return named && bare(named) !== bare(real) ? real : null;
}

const link = (address, words) =>
  h("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, words);

function trimmed(address) {
  let end = address.length;
  let opened = 0;
  for (const character of address) opened += character === "(" ? 1 : character === ")" ? -1 : 0;
  for (; end > 8; end -= 1) {
    const last = address[end - 1];
    if (last === ")" && opened < 0) opened += 1;
    else if (!/[.,:;!?'"\]}_~]/.test(last)) break;
  }
  return address.slice(0, end);
}
