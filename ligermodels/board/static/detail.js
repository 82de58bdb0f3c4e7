// The run that has the focus: its numbers, settings, texts, checkpoints, and what can be done with it.

import { ago, fill, get, h, number, post } from "./dom.js";

const WORDS = {
  died: "This run died: its process is gone, and it did not say why. It can be resumed from its last checkpoint.",
  failed: "This run failed.",
};

export function openDetail(place, { failed }) {
  let run = null, chosen = [], found = null, tab = "overview", shownVersion = null, drawn = "";
  const inner = h("div", { class: "inner-page" });

  async function act(path, button) {
    button.disabled = true;
    try {
      await post(path, { run: run.id });
    } catch (error) {
      failed(run.name, error.message);
    }
    button.disabled = false;
  }

  async function show(next, others) {
    chosen = others;
    if (!next) {
      run = found = shownVersion = null;
      drawn = "";
      fill(place, others.length > 1 ? comparison() : null);
      return;
    }
    const key = `${next.id} ${next.version} ${next.state} ${others.map((other) => other.id)}`;
    if (key === shownVersion) return drawNumbers(next);
    const other = run?.id !== next.id;
    run = next;
    shownVersion = key;
    try {
      const details = await get("/api/run", { run: next.id });
      if (run.id !== next.id) return;
      found = details;
    } catch {
      return;
    }
    draw(other);
  }

  const numbers = h("div", { class: "numbers" });
  function drawNumbers(now) {
    const values = now.values, item = (label, value) => (value ? h("div", {}, h("small", {}, label), h("b", {}, value)) : null);
    fill(numbers,
      item("step", now.step === null ? null : `${now.step.toLocaleString("en-US")}${now.steps ? ` / ${now.steps.toLocaleString("en-US")}` : ""}`),
      item("ETA", now.eta),
      item("loss", now.losses.loss),
      item("validation loss", now.losses.validation_loss),
      item("reward", values.reward === null ? null : number(values.reward)),
      item("margin", values["rewards/margins"] === null ? null : number(values["rewards/margins"])),
      item("tokens/s", values.tokens_per_second === null ? null : number(values.tokens_per_second)),
      item("MFU", values.mfu === null ? null : `${number(100 * values.mfu, 3)} %`),
      item("memory", values.peak_memory_gib === null ? null : `${number(values.peak_memory_gib)} GiB`),
      item("last written", now.newest ? ago(now.newest) : null));
  }

  function draw(fresh) {
    drawNumbers(found);
    const outer = `${found.id} ${found.state} ${found.error} ${found.warnings.length} ${found.resume}`;
    if (!fresh && outer === drawn) return drawInner();
    drawn = outer;
    const stop = h("button", { class: "danger", id: "stop", onclick: () => act("/api/stop", stop) }, "Stop with a checkpoint");
    const resume = h("button", { id: "resume", onclick: () => act("/api/resume", resume) }, "Resume");
    const tabs = ["overview", "settings", "samples", ...(found.has_completions ? ["completions"] : []), "compare"];
    if (!tabs.includes(tab)) tab = "overview";
    fill(place, h("section", { class: "detail", "aria-label": `run ${found.name}` },
      h("div", { class: "head" }, h("h2", {}, found.name), h("span", { class: `state ${found.state}` }, found.state),
        h("div", { class: "actions" }, found.state === "running" ? stop : null, found.resumable ? resume : null)),
      WORDS[found.state] ? h("div", { class: "notice bad" }, WORDS[found.state], found.error ? ` ${found.error}` : "") : null,
      found.warnings.slice(-4).map((warning) => h("div", { class: "notice" }, warning.step === null ? "" : `step ${warning.step}: `, warning.text)),
      numbers,
      h("div", { class: "inner", role: "tablist" }, tabs.map((name) =>
        h("button", { role: "tab", "aria-selected": String(name === tab), onclick: () => { tab = name; draw(true); } }, name))),
      inner));
    drawInner();
  }

  const pages = { overview, settings, samples, completions, compare: () => fill(inner, comparison() || h("div", { class: "empty" }, "Choose two runs or more: their curves are shown, and here what differs.")) };
  function drawInner() {
    pages[tab]();
  }

  function overview() {
    const row = (label, value) => (value ? [h("dt", {}, label), h("dd", {}, value)] : []);
    const copy = h("button", { class: "quiet", onclick: () => navigator.clipboard?.writeText(found.resume) }, "copy");
    const time = (seconds) => (seconds ? new Date(1000 * seconds).toLocaleString() : null);
    fill(inner,
      found.state === "running" || found.resumable ? h("div", { class: "command" }, h("code", { id: "resume-command" }, found.resume), copy) : null,
      h("dl", {},
        row("plan", found.plan), row("folder", found.folder && h("code", {}, found.folder)), row("objective", found.objective),
        row("began", time(found.began)), row("ended", time(found.ended)),
        row("checkpoints", found.checkpoints.join(", ") || (found.state === "published" ? null : "none yet")), row("exports", found.exports.join(", ")),
        row("warnings", found.warnings.length > 4 ? h("div", {}, found.warnings.map((warning) => h("div", {}, warning.step === null ? "" : `step ${warning.step}: `, warning.text))) : null)));
  }

  function settings() {
    fill(inner, h("table", {}, Object.entries(found.settings).map(([name, value]) => h("tr", {}, h("th", {}, h("code", {}, name)), h("td", {}, shown(value))))));
  }

  function comparison() {
    if (chosen.length < 2) return null;
    const place = h("div", {}, "…");
    Promise.all(chosen.slice(0, 8).map((one) => get("/api/run", { run: one.id }))).then((details) => {
      const names = [...new Set(details.flatMap((one) => Object.keys(one.settings)))];
      const rows = names.filter((name) => new Set(details.map((one) => shown(one.settings[name]))).size > 1);
      const ends = [["step", (one) => number(one.step)], ["loss", (one) => shown(one.losses.loss)], ["validation loss", (one) => shown(one.losses.validation_loss)], ["state", (one) => one.state]];
      fill(place, h("table", { class: "differences" }, h("tr", {}, h("th", {}, "differs"), details.map((one) => h("th", {}, one.name))),
        rows.map((name) => h("tr", {}, h("th", {}, h("code", {}, name)), details.map((one) => h("td", {}, shown(one.settings[name]))))),
        ends.map(([label, value]) => h("tr", {}, h("th", {}, label), details.map((one) => h("td", {}, value(one)))))),
      chosen.length > 8 ? h("p", {}, `the first 8 of ${chosen.length} runs`) : null);
    }, () => undefined);
    return place;
  }

  const shown = (value) => (value === undefined || value === null ? "–" : value === true ? "on" : value === false ? "off" : Array.isArray(value) ? value.join(" ") : String(value));

  // -- texts

  // Two columns, each with the texts of a step that is chosen above it.
  function sides(first, second, column) {
    fill(inner, h("div", { class: "sides" }, [first, second].map((at) => column(at))));
  }

  let samplesKey = null;
  async function samples() {
    const id = run.id, key = `${id} ${found.losses.validation_loss} ${found.step}`;
    if (samplesKey === key && inner.querySelector(".sample")) return;
    const texts = await get("/api/samples", { run: id });
    if (run?.id !== id || tab !== "samples") return;
    samplesKey = key;
    if (!texts.length) return void fill(inner, h("div", { class: "empty" }, "A validation writes a sample; there is none yet."));
    sides(0, texts.length - 1, (at) => {
      const text = h("div", { class: "text sample" });
      const write = () => {
        const { step, text: whole } = texts[Number(slider.value)], cut = (whole || "").indexOf(" | ");
        label.textContent = `step ${step}`;
        fill(text, cut < 0 ? whole || "" : [h("span", { class: "prompt" }, whole.slice(0, cut)), whole.slice(cut + 2)]);
      };
      const slider = h("input", { type: "range", min: 0, max: texts.length - 1, value: at, "aria-label": "step of the sample", oninput: write });
      const label = h("b", {});
      write();
      return h("div", {}, h("label", {}, slider, " ", label), text);
    });
  }

  let completionsKey = null;
  async function completions() {
    const id = run.id;
    if (completionsKey === id && inner.querySelector(".completions")) return;
    const { range } = await get("/api/completions", { run: id, step: 0 });
    if (run?.id !== id || tab !== "completions" || !range) return;
    completionsKey = id;
    sides(range[0], range[1], (at) => {
      const place = h("div", { class: "completions" }), label = h("b", {});
      const write = async () => {
        const { completions: lines } = await get("/api/completions", { run: id, step: slider.value });
        label.textContent = lines.length ? `step ${lines[0].step}` : `step ${slider.value}`;
        fill(place, lines.map(completion));
      };
      const slider = h("input", { type: "range", min: range[0], max: range[1], value: at, "aria-label": "step of the completions", onchange: write });
      write();
      return h("div", {}, h("label", {}, slider, " ", label), place);
    });
  }

  function completion(line) {
    const { step, prompt, completion: text, ...rest } = line;
    const meta = Object.entries(rest).map(([name, value]) => h("span", {}, `${name} `, h("b", {}, typeof value === "number" ? number(value) : shown(value))));
    return h("div", { class: "text" }, h("span", { class: "prompt" }, prompt ?? ""), text ?? "", h("div", { class: "meta" }, meta));
  }

  return { show };
}
