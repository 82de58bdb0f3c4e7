// The form of a new run: every setting with its help, and the plan of what is typed.

import { bytes, fill, get, h, post } from "./dom.js";

const FIRST = ["model", "data", "objective", "lora_rank"]; // what is asked first, with the output; the rest is folded
const ESSENTIALS = "essentials"; // their group
const WAIT = 450; // milliseconds without a key before a plan is made
const COLOURS = ["#2f6fde", "#7048e8", "#0b7285", "#e8590c", "#2b8a3e", "#a17800", "#d6336c", "#868e96"];

export function openForm(page, { started }) {
  const inputs = new Map();
  let timer = null, asking = false, again = false;
  const groups = h("div", {}, "…");
  const name = h("input", { id: "run-name", placeholder: "first-run" }), place = h("small");
  const start = h("button", { class: "primary", id: "start-run", disabled: true, onclick: () => begin(false) }, "Start");
  const anyway = h("button", { id: "start-anyway", hidden: true, onclick: () => begin(true) }, "Start without a plan");
  const message = h("div", { class: "notice bad", hidden: true, role: "alert", id: "refusal" });
  const plan = h("div", { id: "plan" });
  const filter = h("input", { type: "search", placeholder: "find a setting", "aria-label": "find a setting", oninput: () => narrow() });
  const side = h("aside", { class: "plan" }, h("h2", {}, "Plan"),
    h("div", { class: "row" }, start, anyway), message, plan);
  fill(page, h("div", {}, h("div", { class: "controls" }, filter), groups), side);

  function input(field) {
    const properties = { id: `field-${field.name}`, oninput: changed, onchange: changed };
    if (field.kind === "switch" || (field.choices.length && !field.several)) {
      const values = field.choices.length ? field.choices : ["on", "off"];
      return h("select", properties, h("option", { value: "" }, "default"), values.map((value) => h("option", { value }, value)));
    }
    if (field.several) return h("textarea", { ...properties, rows: 1, placeholder: "one value a line" });
    return h("input", { ...properties, autocomplete: "off", inputMode: field.kind === "number" ? "decimal" : "text" });
  }

  const labelled = (label, control, help) => h("div", { class: "field" }, h("label", { for: control.id }, label), control, help);

  function draw({ fields, folder }) {
    place.textContent = `a new folder in ${folder}`;
    const first = FIRST.map((name) => ({ ...fields.find((field) => field.name === name), group: ESSENTIALS }));
    const ordered = [...first, ...fields.filter((field) => !FIRST.includes(field.name))];
    fill(groups, [...new Set(ordered.map((field) => field.group))].map((group) => {
      const members = ordered.filter((field) => field.group === group).map((field) => {
        const control = input(field), element = labelled(field.flag, control, h("small", {}, field.help));
        inputs.set(field.name, { field, control, element });
        return element;
      });
      if (group === ESSENTIALS) members.push(labelled("--output", name, place));
      const details = h("details", { class: "group", open: group === ESSENTIALS }, h("summary", {}, group), h("div", { class: "fields" }, members));
      details.dataset.group = group;
      return details;
    }));
    narrow();
  }

  // Shows the settings that the objective has, and that the search finds; the essentials always.
  function narrow() {
    const objective = inputs.get("objective").control.value || "sft", words = filter.value.trim().toLowerCase();
    for (const details of groups.children) {
      let any = false;
      for (const { field, element } of inputs.values()) {
        if (field.group !== details.dataset.group) continue;
        const found = field.group === ESSENTIALS || `${field.flag} ${field.help}`.toLowerCase().includes(words);
        element.hidden = !field.objectives.includes(objective) || !found;
        any ||= !element.hidden;
      }
      details.hidden = !any;
      if (words && any) details.open = true;
    }
  }

  function settings() {
    const given = {};
    for (const { field, control, element } of inputs.values()) {
      const value = control.value.trim();
      element.classList.toggle("set", value !== "");
      if (value && field.objectives.includes(inputs.get("objective").control.value || "sft"))
        given[field.name] = field.several ? value.split("\n").map((line) => line.trim()).filter(Boolean) : value;
    }
    return given;
  }

  function changed() {
    narrow();
    clearTimeout(timer);
    timer = setTimeout(ask, WAIT);
  }

  // Asks for one plan at a time; what was typed meanwhile is planned next.
  async function ask() {
    again = true;
    if (asking) return;
    asking = true;
    side.classList.add("waiting");
    while (again) {
      again = false;
      const given = settings();
      try {
        if (!given.model && !given.adapter) throw new Error("--model is missing: a family such as qwen2, a Hub id or a folder");
        const made = await post("/api/plan", { settings: given });
        if (made.refused) throw new Error(made.refused);
        drawPlan(made);
        refuse(null);
      } catch (error) {
        refuse(error.message, given);
      }
    }
    side.classList.remove("waiting");
    asking = false;
  }

  function refuse(words, given = {}) {
    message.hidden = !words;
    message.textContent = words || "";
    start.disabled = Boolean(words);
    anyway.hidden = !(words && /cache|HF_HUB_OFFLINE|offline/i.test(words) && given.model);
    const first = (words || "").split(" ")[0].replace(/:$/, "");
    for (const { field, element } of inputs.values())
      if (element.classList.toggle("wrong", field.flag === first)) element.closest("details").open = true;
    if (words) fill(plan);
  }

  function drawPlan({ table, parts, peaks }) {
    const total = Object.values(parts).reduce((a, b) => a + b, 0), entries = Object.entries(parts);
    const bar = h("div", { class: "parts", role: "img", "aria-label": "parts of the memory" }, entries.map(([part, size], i) => {
      const element = h("i", { colour: COLOURS[i % COLOURS.length], title: `${part} ${bytes(size)}` });
      element.style.width = `${(100 * size) / total}%`;
      return element;
    }));
    fill(plan,
      h("div", { class: "numbers" }, Object.entries(peaks).map(([phase, size]) => h("div", {}, h("small", {}, `peak memory, ${phase}`), h("b", { class: "peak" }, bytes(size))))),
      bar,
      h("div", { class: "legend" }, entries.map(([part, size], i) => h("span", {}, h("i", { colour: COLOURS[i % COLOURS.length] }), `${part} ${bytes(size)}`))),
      h("table", {}, table.filter(([label]) => !label.startsWith("  ")).map(([label, value]) => h("tr", { class: label === "warning" ? "warned" : "" }, h("th", {}, label), h("td", {}, value)))));
  }

  async function begin(unplanned) {
    start.disabled = true;
    try {
      const { process } = await post("/api/start", { name: name.value.trim() || name.placeholder, settings: settings(), unplanned });
      started(process);
    } catch (error) {
      refuse(error.message, settings());
    }
    start.disabled = false;
  }

  get("/api/form").then((form) => {
    draw(form);
    refuse("--model is missing: a family such as qwen2, a Hub id or a folder");
  });
  return {};
}
