// The page of the server's state, asked every two seconds while it is seen.

import { request } from "./api.js";
import { $, h, number, svg, themeSwitch } from "./dom.js";

const EVERY = 2000; // milliseconds

async function refresh() {
  if (!document.hidden) {
    try {
      show(await (await request("status/data")).json());
    } catch (error) {
      showState("lost", error.message, "Asking again every two seconds.");
    }
  }
  setTimeout(refresh, EVERY);
}

function show(data) {
  const words = { ready: "Ready", loading: "Loading the model", draining: "Finishing, takes no new requests" };
  showState(data.state, words[data.state] ?? data.state, `bitnet-ops ${data.version}, up ${duration(data.uptime_s)}`);
  const { queue, requests } = data;
  const failed = requests.error + requests.rejected + requests.invalid;
  $("tiles").replaceChildren(
    tile("Running", number(queue.running)),
    tile("Waiting", number(queue.waiting), queue.limit ? ` of ${number(queue.limit)}` : ""),
    tile("Answered", number(requests.ok)),
    tile("Stopped by the client", number(requests.cancelled)),
    tile("Failed or turned away", number(failed)),
  );
  for (const plot of plots) plot.update(data.history[plot.name], data.history.seconds_per_point);
  $("models-title").hidden = data.models.length === 0;
  $("models").replaceChildren(...data.models.map(modelCard));
}

/** Said anew only when it changed, as a screen reader speaks it; the time is left out of that. */
function showState(state, word, more) {
  $("state").dataset.state = state;
  if ($("state-word").textContent !== word) $("state-word").textContent = word;
  $("state-more").setAttribute("aria-live", "off");
  $("state-more").textContent = more;
}

const tile = (name, value, more = "") => h("div", {}, h("dt", {}, name), h("dd", {}, value, h("small", {}, more)));

function duration(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

// The plots ----------------------------------------------------------------------------------------

const WIDTH = 600;
const HEIGHT = 150;

/** Tokens a second over the last minutes; a pointer or the arrow keys read single values. */
class Plot {
  constructor(name, title) {
    this.name = name;
    this.values = [];
    this.at = null; // the value that is read, if one is
    this.now = h("strong", {});
    this.curve = svg("path", { class: "curve" });
    this.area = svg("path", { class: "area" });
    this.cross = svg("line", { class: "cross", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((part) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: part * HEIGHT, y2: part * HEIGHT }));
    this.svg = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 },
      ...grid, this.area, this.curve, this.cross,
    );
    this.title = title;
    this.caption = h("figcaption", {});
    this.start = h("span", {});
    this.scales = [h("span", { class: "scale" }), h("span", { class: "scale" })];
    this.scales[0].style.top = "0";
    this.scales[1].style.top = "50%";
    const frame = h("div", { class: "frame" }, this.svg, this.scales);
    const axis = h("div", { class: "axis", "aria-hidden": "true" }, this.start, h("span", {}, "now"));
    $("plots").append(h("figure", { class: "plot" }, h("h2", {}, title, this.now), frame, axis, this.caption));
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.read(Math.round(((event.clientX - box.left) / box.width) * (this.values.length - 1)));
    });
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("blur", () => this.read(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.read((this.at ?? this.values.length - 1) + step);
    });
  }

  update(values, secondsPerPoint) {
    this.values = values;
    this.seconds = secondsPerPoint;
    const top = roundUp(Math.max(...values, 1));
    const last = Math.max(values.length - 1, 1);
    this.x = (at) => (at / last) * WIDTH;
    const y = (value) => HEIGHT - (value / top) * HEIGHT;
    const line = values.map((value, at) => `${this.x(at).toFixed(1)} ${y(value).toFixed(1)}`).join("L");
    this.curve.setAttribute("d", line && `M${line}`);
    this.area.setAttribute("d", line && `M0 ${HEIGHT}L${line}L${this.x(values.length - 1)} ${HEIGHT}Z`);
    this.scales[0].textContent = number(top);
    this.scales[1].textContent = number(top / 2, top % 2 ? 1 : 0);
    this.start.textContent = values.length ? `${duration(values.length * secondsPerPoint)} ago` : "";
    this.now.textContent = rate(values.at(-1) ?? 0);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.summary()}`);
    this.read(this.at);
  }

  summary() {
    const { values, seconds } = this;
    if (!values.length) return "nothing yet.";
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const span = duration(values.length * seconds);
    return `now ${rate(values.at(-1))}, mean ${rate(mean)} and highest ${rate(Math.max(...values))} in ${span}.`;
  }

  read(at) {
    const inside = at !== null && this.values.length > 0;
    this.at = inside ? Math.min(Math.max(at, 0), this.values.length - 1) : null;
    this.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    if (!inside) {
      this.caption.textContent = this.summary().replace(/^./, (first) => first.toUpperCase());
      this.caption.removeAttribute("role");
      return;
    }
    const ago = (this.values.length - 1 - this.at) * this.seconds;
    for (const end of ["x1", "x2"]) this.cross.setAttribute(end, this.x(this.at));
    this.caption.setAttribute("role", "status");
    this.caption.textContent = `${ago ? `${duration(ago)} ago` : "Now"}: ${rate(this.values[this.at])} tokens a second.`;
  }
}

const rate = (value) => number(value, value < 10 ? 1 : 0);

/** 1, 2 or 5 times a power of ten, at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= value);
}

// Models -------------------------------------------------------------------------------------------

function modelCard(model) {
  const { kv, prefix } = model;
  const share = (part, whole) => (whole ? `${number((100 * part) / whole)} %` : "–");
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return h(
    "article",
    { class: "model" },
    h("h3", {}, model.id),
    h("p", {}, model.summary),
    meter(kv),
    h(
      "dl",
      { class: "facts" },
      fact("Running, waiting", `${number(model.running)}, ${number(model.waiting)}`),
      fact("Context", `${number(model.context_length)} tokens`),
      fact("Prompt tokens found cached", `${share(prefix.reused_tokens, prefix.prompt_tokens)} of ${number(prefix.prompt_tokens)}`),
      prefix.disk_blocks ? fact("Kept on disk", `${number(prefix.disk_blocks)} blocks, ${number(prefix.disk_mib)} MiB`) : null,
      fact("Preemptions", number(model.preemptions)),
      model.adapters.length ? fact("Adapters", model.adapters.join(", ")) : null,
    ),
  );
}

function meter({ blocks, used, cached, mib_total, mib_used }) {
  const part = (value) => (blocks ? (100 * value) / blocks : 0);
  const text = `${number(used)} used, ${number(cached)} cached, ${number(Math.max(blocks - used - cached, 0))} free`;
  const bar = svg(
    "svg",
    { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": `KV pool: ${text} of ${number(blocks)} blocks` },
    svg("rect", { class: "used", width: part(used), height: 10 }),
    svg("rect", { class: "cached", x: part(used), width: part(cached), height: 10 }),
  );
  const sizes = `${number(mib_used)} of ${number(mib_total)} MiB`;
  return h("div", { class: "meter" }, h("p", {}, h("span", {}, `KV pool: ${sizes}`), h("span", {}, `Blocks: ${text}`)), bar);
}

const plots = [new Plot("generated", "Tokens generated a second"), new Plot("prompt", "Prompt tokens read a second")];
themeSwitch($("theme"));
refresh();
