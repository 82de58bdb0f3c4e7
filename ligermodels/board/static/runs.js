// The runs: their list, their curves, and all that is known of the one that has the focus.

import { Chart, redraw, view } from "./chart.js";
import { ago, fill, get, h } from "./dom.js";
import { openDetail } from "./detail.js";

const PALETTE = ["#2f6fde", "#e8590c", "#2b8a3e", "#7048e8", "#0b7285", "#d6336c", "#a17800", "#5c7cfa", "#12b886", "#868e96"];
const FIRST_SHOWN = 8; // runs whose curves are shown at the beginning
const POINTS = 900, POINTS_OF_MANY = 240, MANY = 12;
const STOPPED = [130, 143]; // exit statuses of a run that SIGINT or SIGTERM has stopped
const REFRESH = 700; // milliseconds between two requests for curves
const MINUTE = 60_000; // after which "4 min ago" is no longer true
const LOSS = ["loss", "validation_loss", "floor"];
const TITLES = {
  loss: "loss", learning_rate: "learning rate", grad_norm: "gradient norm", tokens_per_second: "tokens per second",
  mfu: "model FLOPs utilisation", peak_memory_gib: "peak memory, GiB", reward: "reward",
};
const HIDDEN = ["validation_perplexity", "questions", "seconds_left"];

export function openRuns(page) {
  const runs = new Map(), chosen = new Set(), loaded = new Map(), charts = new Map();
  let focus = null, known = false, fetching = false, wanted = false, filter = "", dirty = new Set();
  const colours = new Map();
  const list = h("ul", { class: "runs", "aria-label": "Runs" });
  const published = h("ul", { class: "runs", "aria-label": "Published runs of real models" });
  const search = h("input", { type: "search", placeholder: "find a run", "aria-label": "find a run",
    oninput: () => { filter = search.value.toLowerCase(); drawList(); } });
  const grid = h("div", { class: "charts" });
  const place = h("div"), loss = h("div", { class: "charts" });
  const detail = openDetail(place, { failed: (name, message) => notice(`${name}: ${message}`) });
  const notices = h("div", { "aria-live": "polite" });
  const toggle = (name, label) => {
    const box = h("input", { type: "checkbox", checked: view[name], onchange: () => { view[name] = box.checked; redraw(); } });
    return { box, element: h("label", {}, box, label) };
  };
  const logY = toggle("logY", "log loss"), logX = toggle("logX", "log steps");
  const smoothing = h("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: view.smoothing, "aria-label": "smoothing",
    oninput: () => { view.smoothing = Number(smoothing.value); redraw(); } });
  const all = h("button", { onclick: () => choose(ordered().map((run) => run.id)) }, "all"), none = h("button", { onclick: () => choose([]) }, "none");
  fill(page,
    h("aside", { class: "side" }, h("div", { class: "tools" }, search, all, none), list,
      h("details", { id: "published" }, h("summary", {}, "Published runs of real models"), published)),
    h("div", { class: "stage" }, notices,
      h("div", { class: "controls" }, h("label", {}, "smoothing", smoothing), logY.element, logX.element,
        h("button", { class: "quiet", onclick: () => { view.first = view.last = null; zoomed(); redraw(); } }, "all steps"),
        h("span", {}, "drag to zoom, double-click for all")),
      loss, place, grid));

  const colourOf = (id) => {
    if (!colours.has(id)) {
      const i = colours.size;
      colours.set(id, i < PALETTE.length ? PALETTE[i] : `hsl(${Math.round(i * 137.5) % 360} 55% 52%)`);
    }
    return colours.get(id);
  };

  function notice(text) {
    const element = h("div", { class: "notice bad" }, text, " ", h("button", { class: "quiet", onclick: () => element.remove() }, "close"));
    notices.append(element);
  }

  // -- the list

  const ordered = () => [...runs.values()].filter((run) => run.state !== "published").sort((a, b) => (b.state === "running") - (a.state === "running") || b.newest - a.newest || a.name.localeCompare(b.name));
  const matching = (some = ordered()) => some.filter((run) => `${run.name} ${run.model} ${run.state} ${run.objective}`.toLowerCase().includes(filter));

  function facts(run) {
    const parts = [run.step === null ? "no step yet" : `step ${run.step.toLocaleString("en-US")}${run.steps ? `/${run.steps.toLocaleString("en-US")}` : ""}`];
    if (run.losses.loss) parts.push(`loss ${run.losses.loss}`);
    parts.push(run.eta ? `ETA ${run.eta}` : run.newest ? ago(run.newest) : "");
    return parts.join(" · ");
  }

  // Updates the elements of the list in place: a click that is on its way must not lose its target.
  const rows = new Map();
  function rowOf(run) {
    if (rows.has(run.id)) return rows.get(run.id);
    const parts = { swatch: h("button", { class: "swatch", title: "show or hide its curves (x)", onclick: (event) => { event.stopPropagation(); flip(run.id); } }),
      name: h("span", { class: "name" }), state: h("span", {}), facts: h("span", { class: "facts" }), fill: h("i") };
    parts.element = h("li", { class: "run", tabIndex: 0, onclick: () => setFocus(run.id),
      onkeydown: (event) => { if (event.key === "Enter") setFocus(run.id); } },
    parts.swatch, parts.name, parts.state, parts.facts, h("span", { class: "bar" }, parts.fill));
    rows.set(run.id, parts);
    return parts;
  }

  function drawList() {
    drawRows(list, matching(), known ? "no runs here" : "looking for runs …");
    drawRows(published, matching([...runs.values()].filter((run) => run.state === "published")), "none");
  }

  function drawRows(place, shown, empty) {
    for (const run of shown) {
      const row = rowOf(run), on = chosen.has(run.id), colour = on || run.state !== "published" ? colourOf(run.id) : "";
      row.swatch.style.borderColor = colour;
      row.swatch.style.background = on ? colour : "none";
      row.swatch.setAttribute("aria-label", `curves of ${run.name}`);
      row.swatch.setAttribute("aria-pressed", on);
      row.name.textContent = row.name.title = run.name;
      row.state.textContent = run.read < 1 ? `reading ${Math.round(100 * run.read)} %` : run.state;
      row.state.className = `state ${run.state}`;
      row.facts.textContent = facts(run);
      row.fill.style.width = `${run.steps && run.step ? Math.min(100, (100 * run.step) / run.steps) : 0}%`;
      row.element.classList.toggle("focus", run.id === focus);
      row.element.dataset.run = run.id;
    }
    const elements = shown.map((run) => rows.get(run.id).element);
    if (elements.length !== place.children.length || elements.some((element, i) => place.children[i] !== element))
      fill(place, elements.length ? elements : h("li", { class: "empty" }, empty));
  }

  function flip(id) {
    if (!chosen.delete(id)) chosen.add(id);
    drawList();
    refresh(true);
  }

  function choose(ids) {
    chosen.clear();
    for (const id of ids) chosen.add(id);
    drawList();
    refresh(true);
  }

  function setFocus(id) {
    focus = id;
    if (id && !chosen.has(id)) {
      chosen.add(id);
      refresh(true);
    }
    drawList();
    drawDetail();
  }

  function step(by) {
    const shown = matching();
    if (!shown.length) return;
    const i = shown.findIndex((run) => run.id === focus);
    setFocus(shown[Math.min(shown.length - 1, Math.max(0, i + by))].id);
    rows.get(focus).element.scrollIntoView({ block: "nearest" });
  }

  const drawDetail = () => detail.show(focus ? runs.get(focus) : null, [...chosen].map((id) => runs.get(id)).filter(Boolean));

  // -- curves

  function names() {
    const found = new Set(["loss", "validation_loss", "floor", "learning_rate", "grad_norm", "tokens_per_second"]);
    for (const id of chosen) for (const name of runs.get(id)?.names || []) if (!HIDDEN.includes(name)) found.add(name);
    return [...found];
  }

  function chartOf(name) {
    if (!charts.has(name)) {
      const title = TITLES[name] || name.replaceAll("_", " ");
      charts.set(name, new Chart(title, { large: name === "loss", unit: name === "loss" ? "training; ● validation; ┄ floor" : "", zoomed }));
    }
    return charts.get(name);
  }

  function drawCharts() {
    const shown = names().filter((name) => name === "loss" || (!LOSS.includes(name) && [...chosen].some((id) => loaded.get(id)?.curves[name])));
    for (const [name, chart] of charts) if (!shown.includes(name)) { chart.remove(); charts.delete(name); }
    shown.forEach((name, i) => {
      const chart = chartOf(name), next = i ? grid.children[i - 1] : loss.firstChild; // the first is the loss
      if (next !== chart.element) (i ? grid : loss).insertBefore(chart.element, next || null);
      const parts = name === "loss" ? LOSS : [name];
      chart.show([...chosen].flatMap((id) => parts.filter((part) => loaded.get(id)?.curves[part]).map((part) => {
        const [steps, low, high, mean] = loaded.get(id).curves[part], plain = high === undefined;
        const kind = part === "floor" ? "floor" : part === "validation_loss" || steps.length < 3 ? "marks" : "line";
        const label = part === "validation_loss" ? ", validation" : part === "floor" ? ", floor" : "";
        return { name: runs.get(id).name + label, colour: colourOf(id), kind, steps, mean: plain ? low : mean,
          low: plain ? null : low, high: plain ? null : high };
      })));
    });
  }

  function zoomed() {
    for (const id of chosen) dirty.add(id);
    refresh(true);
  }

  // Fetches the curves that are shown and have changed; soon, and never two at a time.
  async function refresh(at_once = false) {
    wanted = true;
    drawCharts();
    if (fetching) return;
    fetching = true;
    while (wanted) {
      wanted = false;
      const ids = [...chosen].filter((id) => runs.has(id) && (dirty.has(id) || loaded.get(id)?.version !== runs.get(id).version));
      if (ids.length) {
        dirty = new Set();
        const query = { runs: ids.join("\n"), names: names().join("\n"), points: chosen.size > MANY ? POINTS_OF_MANY : POINTS };
        if (view.first !== null) query.first = view.first;
        if (view.last !== null) query.last = view.last;
        try {
          for (const [id, found] of Object.entries(await get("/api/curves", query))) loaded.set(id, found);
          drawCharts();
        } catch {
          break;
        }
        if (!at_once) await new Promise((done) => setTimeout(done, REFRESH));
        at_once = false;
      }
    }
    fetching = false;
  }

  // -- what the server says

  function update({ runs: changed, ids }) {
    for (const run of changed) runs.set(run.id, run);
    for (const id of [...runs.keys()]) if (!ids.includes(id) && runs.get(id).state !== "published") { runs.delete(id); chosen.delete(id); rows.delete(id); }
    if (!known && ids.length) {
      for (const run of ordered().slice(0, ids.length <= 50 ? 50 : FIRST_SHOWN)) chosen.add(run.id);
      if (ids.length <= FIRST_SHOWN) focus = ordered()[0].id;
    }
    known = true;
    for (const run of ordered()) colourOf(run.id);
    drawList();
    if (focus && !runs.has(focus)) focus = null;
    drawDetail();
    refresh();
    const running = [...runs.values()].filter((run) => run.state === "running").length;
    document.title = running ? `${running} running · ligermodels` : "ligermodels";
  }

  // Waits until a run that was started is there, or has failed before.
  async function await_(process) {
    const waiting = h("div", { class: "notice" }, `${process}: starting …`);
    notices.append(waiting);
    for (;;) {
      const seen = await get("/api/process", { name: process });
      const id = [...runs.keys()].find((key) => key.endsWith(`:${process}`));
      if (id && (runs.get(id).state === "running" || !seen.running)) setFocus(id);
      if (id && runs.get(id).state === "running") break;
      if (!seen.running) {
        if (seen.status && !STOPPED.includes(seen.status)) notice(seen.output.trim().split("\n").slice(-3).join("\n") || `${process}: ended with status ${seen.status}`);
        break;
      }
      await new Promise((done) => setTimeout(done, 500));
    }
    waiting.remove();
  }

  const keys = {
    j: () => step(1), k: () => step(-1), x: () => focus && flip(focus), "/": () => search.focus(),
    l: () => logY.box.click(), s: () => logX.box.click(),
  };
  drawList();
  drawCharts();
  get("/api/published").then((found) => { for (const run of found) runs.set(run.id, run); drawList(); }, () => undefined);
  setInterval(() => { drawList(); drawDetail(); }, MINUTE);
  return { update, keys, await: await_, shown: redraw };
}
