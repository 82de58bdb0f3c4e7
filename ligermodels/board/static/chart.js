// A chart on a canvas: curves of several runs over steps, with log axes, zoom by dragging, and values under the pointer.

import { h, number } from "./dom.js";

const MARGIN = { left: 52, right: 10, top: 8, bottom: 22 };
const MIN_DRAG = 6; // pixels
export const view = { first: null, last: null, logX: false, logY: false, smoothing: 0.6 }; // of all charts
const charts = new Set();
let pending = false;

// Draws all charts that are on the screen, once for any number of calls in a frame.
export function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    for (const chart of charts) if (chart.visible) chart.draw();
  });
}

const onScreen = new IntersectionObserver((entries) => {
  for (const entry of entries) entry.target.chart.visible = entry.isIntersecting;
  redraw();
});
const sizes = new ResizeObserver(redraw);

// Exponential moving average without a bias towards its beginning.
function smoothed(values, factor) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = factor * sum + value;
    weight = factor * weight + 1;
    return sum / weight;
  });
}

function ticks(low, high, logarithmic, count) {
  if (logarithmic) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++)
      for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
    const inside = found.filter((x) => x >= low && x <= high);
    return inside.length > 2 * count ? inside.filter((x) => Math.abs(Math.log10(x) % 1) < 1e-9) : inside;
  }
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((x) => x * power).find((x) => x >= rough) || power;
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return found;
}

export class Chart {
  // title: text. large: whether it is the big one. zoomed: called when the range of steps changes.
  constructor(title, { large = false, unit = "", zoomed }) {
    this.large = large;
    this.zoomed = zoomed;
    this.curves = []; // {name, colour, steps, low, high, mean, kind: "line" | "marks" | "floor"}
    this.canvas = h("canvas", { tabIndex: 0, role: "img", "aria-label": `${title}, a curve over steps` });
    this.tip = h("div", { class: "tip", hidden: true });
    this.element = h("div", { class: large ? "chart large" : "chart" },
      h("h3", {}, title, h("small", {}, unit)), this.canvas, this.tip);
    this.canvas.chart = this;
    this.title = title;
    this.visible = true;
    this.pointer = null;
    this.drag = null;
    const listen = (kind, action) => this.canvas.addEventListener(kind, action);
    listen("pointermove", (event) => this.moved(event));
    listen("pointerleave", () => { this.pointer = null; redraw(); });
    listen("pointerdown", (event) => this.pressed(event));
    listen("pointerup", (event) => this.released(event));
    listen("dblclick", () => this.zoomTo(null, null));
    listen("keydown", (event) => this.typed(event));
    listen("blur", () => { this.pointer = null; redraw(); });
    charts.add(this);
    onScreen.observe(this.canvas);
    sizes.observe(this.canvas);
  }

  remove() {
    charts.delete(this);
    onScreen.unobserve(this.canvas);
    sizes.unobserve(this.canvas);
    this.element.remove();
  }

  show(curves) {
    this.curves = curves;
    redraw();
  }

  // -- pointer and keys

  moved(event) {
    this.pointer = event.offsetX;
    redraw();
  }

  pressed(event) {
    if (event.button !== 0 || event.pointerType === "touch") return;
    this.drag = event.offsetX;
    this.canvas.setPointerCapture(event.pointerId);
  }

  released(event) {
    const begin = this.drag;
    this.drag = null;
    if (begin === null || Math.abs(event.offsetX - begin) < MIN_DRAG) return redraw();
    const [a, b] = [this.stepAt(Math.min(begin, event.offsetX)), this.stepAt(Math.max(begin, event.offsetX))];
    this.zoomTo(a, b);
  }

  zoomTo(first, last) {
    view.first = first === null ? null : Math.max(0, Math.floor(first));
    view.last = last === null ? null : Math.ceil(Math.max(last, view.first + 2));
    redraw();
    this.zoomed();
  }

  typed(event) {
    const { first, last } = this.range(), width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const middle = this.pointer === null ? (first + last) / 2 : this.stepAt(this.pointer);
    const scale = (factor) => this.zoomTo(middle - (middle - first) * factor, middle + (last - middle) * factor);
    const actions = {
      ArrowLeft: () => { this.pointer = Math.max(MARGIN.left, (this.pointer ?? MARGIN.left + width) - width / 60); redraw(); },
      ArrowRight: () => { this.pointer = Math.min(MARGIN.left + width, (this.pointer ?? MARGIN.left) + width / 60); redraw(); },
      "+": () => scale(0.5), "=": () => scale(0.5), "-": () => scale(2), 0: () => this.zoomTo(null, null),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    event.stopPropagation();
    actions[event.key]();
  }

  // -- scales

  range() {
    let first = Infinity, last = -Infinity;
    for (const { steps } of this.curves) {
      if (!steps.length) continue;
      first = Math.min(first, steps[0]);
      last = Math.max(last, steps[steps.length - 1]);
    }
    if (first > last) [first, last] = [0, 1];
    first = view.first ?? first;
    last = view.last ?? last;
    return { first: view.logX ? Math.max(1, first) : first, last: last > first ? last : first + 1 };
  }

  stepAt(x) {
    const { first, last } = this.range(), width = this.canvas.clientWidth - MARGIN.left - MARGIN.right;
    const part = Math.min(1, Math.max(0, (x - MARGIN.left) / width));
    return view.logX ? first * (last / first) ** part : first + (last - first) * part;
  }

  // -- drawing

  draw() {
    const width = this.canvas.clientWidth, height = this.canvas.clientHeight, ratio = devicePixelRatio || 1;
    if (!width) return;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name).trim();
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = "11px system-ui, sans-serif";
    const { first, last } = this.range();
    const shown = this.curves.map((curve) => this.prepared(curve, first, last)).filter((curve) => curve.steps.length);
    const { low, high, logarithmic } = this.heights(shown);
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const part = (value, a, b, log) => (log ? Math.log(value / a) / Math.log(b / a) : (value - a) / (b - a));
    const x = (step) => MARGIN.left + inner.width * part(Math.max(step, view.logX ? 1 : -Infinity), first, last, view.logX);
    const y = (value) => MARGIN.top + inner.height * (1 - part(Math.max(value, logarithmic ? low / 10 : -Infinity), low, high, logarithmic));

    context.lineWidth = 1;
    context.strokeStyle = colour("--line");
    context.fillStyle = colour("--soft");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const value of ticks(low, high, logarithmic, height / 45)) {
      context.beginPath();
      context.moveTo(MARGIN.left, y(value));
      context.lineTo(width - MARGIN.right, y(value));
      context.stroke();
      context.fillText(number(value, 3), MARGIN.left - 7, y(value));
    }
    context.textAlign = "center";
    context.textBaseline = "top";
    for (const step of ticks(first, last, view.logX, width / 110))
      if (Number.isInteger(step)) context.fillText(step.toLocaleString("en-US"), Math.min(x(step), width - 24), height - MARGIN.bottom + 7);
    if (!shown.length) {
      context.textBaseline = "middle";
      context.fillText("nothing yet", width / 2, height / 2);
    }

    context.save();
    context.beginPath();
    context.rect(MARGIN.left, 0, inner.width + MARGIN.right, height - MARGIN.bottom + 1);
    context.clip();
    for (const curve of shown) this.drawCurve(context, curve, x, y);
    context.restore();
    if (this.drag !== null && this.pointer !== null) {
      context.fillStyle = colour("--tint");
      context.fillRect(Math.min(this.drag, this.pointer), MARGIN.top, Math.abs(this.pointer - this.drag), inner.height);
    }
    this.drawPointer(context, shown, x, y, colour, width, height);
  }

  // The part of a curve in a range, with one point beyond either end, and its smoothed values.
  prepared(curve, first, last) {
    let a = curve.steps.findIndex((step) => step >= first), b = curve.steps.length;
    if (a < 0) a = Math.max(0, b - 1);
    while (b > 0 && curve.steps[b - 1] > last) b--;
    a = Math.max(0, a - 1);
    b = Math.min(curve.steps.length, b + 1);
    const soft = curve.kind === "line" && view.smoothing > 0 && curve.mean.length > 20;
    curve.soft ??= {};
    if (soft && curve.soft.factor !== view.smoothing)
      curve.soft = { factor: view.smoothing, values: smoothed(curve.mean, view.smoothing) };
    const cut = (values) => values && values.slice(a, b);
    return { ...curve, steps: cut(curve.steps), low: cut(curve.low), high: cut(curve.high), mean: cut(curve.mean),
      smooth: soft ? cut(curve.soft.values) : null };
  }

  heights(curves) {
    const values = curves.flatMap((curve) => (curve.smooth && curves.length > 6 ? curve.smooth : curve.mean));
    let low = Infinity, high = -Infinity;
    for (const value of values) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
    if (low > high) return { low: 0, high: 1, logarithmic: false };
    const logarithmic = view.logY && this.large && low > 0;
    if (logarithmic) return { low: low / 1.05, high: Math.max(high * 1.05, low * 1.2), logarithmic };
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    const base = low >= 0 && low - room < 0 ? 0 : low - room;
    return { low: !this.large && low >= 0 && low < high / 2 ? 0 : base, high: high + room, logarithmic };
  }

  drawCurve(context, curve, x, y) {
    const line = (values, width, alpha) => {
      context.globalAlpha = alpha;
      context.lineWidth = width;
      context.beginPath();
      curve.steps.forEach((step, i) => (i ? context.lineTo(x(step), y(values[i])) : context.moveTo(x(step), y(values[i]))));
      context.stroke();
    };
    context.strokeStyle = context.fillStyle = curve.colour;
    context.lineJoin = "round";
    if (curve.kind === "floor") {
      context.setLineDash([4, 4]);
      line(curve.mean, 1.2, 0.8);
      context.setLineDash([]);
    } else if (curve.kind === "marks") {
      line(curve.mean, 1.4, 0.9);
      curve.steps.forEach((step, i) => {
        context.beginPath();
        context.arc(x(step), y(curve.mean[i]), 3, 0, 7);
        context.fill();
      });
    } else {
      if (curve.low) {
        context.globalAlpha = 0.12;
        context.beginPath();
        curve.steps.forEach((step, i) => (i ? context.lineTo(x(step), y(curve.high[i])) : context.moveTo(x(step), y(curve.high[i]))));
        for (let i = curve.steps.length - 1; i >= 0; i--) context.lineTo(x(curve.steps[i]), y(curve.low[i]));
        context.fill();
      }
      if (curve.smooth) line(curve.mean, 1, 0.22);
      line(curve.smooth || curve.mean, 1.7, 1);
      if (curve.steps.length === 1) context.fillRect(x(curve.steps[0]) - 2, y(curve.mean[0]) - 2, 4, 4);
    }
    context.globalAlpha = 1;
  }

  drawPointer(context, curves, x, y, colour, width, height) {
    if (this.pointer === null || !curves.length || this.drag !== null) {
      this.tip.hidden = true;
      return;
    }
    const step = this.stepAt(this.pointer);
    const rows = curves.map((curve) => {
      let i = curve.steps.findIndex((s) => s >= step);
      if (i < 0) i = curve.steps.length - 1;
      if (i > 0 && step - curve.steps[i - 1] < curve.steps[i] - step) i--;
      return { curve, i, value: curve.mean[i] };
    });
    const near = rows.reduce((a, b) => (Math.abs(b.curve.steps[b.i] - step) < Math.abs(a.curve.steps[a.i] - step) ? b : a));
    const place = x(near.curve.steps[near.i]);
    context.strokeStyle = colour("--soft");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(place, MARGIN.top);
    context.lineTo(place, height - MARGIN.bottom);
    context.stroke();
    for (const { curve, i, value } of rows) {
      context.fillStyle = curve.colour;
      context.beginPath();
      context.arc(x(curve.steps[i]), y(curve.smooth ? curve.smooth[i] : value), 3, 0, 7);
      context.fill();
    }
    rows.sort((a, b) => a.value - b.value);
    this.tip.replaceChildren(
      h("div", {}, `step ${Math.round(near.curve.steps[near.i]).toLocaleString("en-US")}`),
      ...rows.slice(0, 12).map(({ curve, value }) => h("div", {}, h("i", { colour: curve.colour }), h("span", {}, curve.name), h("b", {}, number(value)))),
      ...(rows.length > 12 ? [h("div", {}, `and ${rows.length - 12} more`)] : []),
    );
    this.tip.hidden = false;
    const left = place > width / 2;
    this.tip.style.left = left ? "auto" : `${place + 24}px`;
    this.tip.style.right = left ? `${width - place + 20}px` : "auto";
    this.tip.style.top = "2.4rem";
  }
}
