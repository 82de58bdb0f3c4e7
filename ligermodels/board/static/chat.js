// A conversation with one model of the folder, or with two side by side.

import { fill, get, h, number, stream } from "./dom.js";

export function openChat(page) {
  let models = [], controller = null;
  const system = h("input", { id: "system", placeholder: "none", "aria-label": "system prompt" });
  const box = (id, value, label) => {
    const input = h("input", { id, value, inputMode: "decimal" });
    return { input, element: h("label", {}, label, input) };
  };
  const temperature = box("temperature", "0.7", "temperature"), top = box("top-p", "0.95", "top-p"), most = box("most", "128", "most tokens");
  const mode = h("select", { id: "mode" }, h("option", { value: "chat" }, "chat"), h("option", { value: "continue" }, "continue a text"));
  const text = h("textarea", { id: "message", rows: 2, placeholder: "Write a message", "aria-label": "message",
    onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); send(); } } });
  const button = h("button", { class: "primary", id: "send", onclick: () => (controller ? controller.abort() : send()) }, "Send");
  const talks = [0, 1].map((slot) => {
    const select = h("select", { id: `model-${slot}`, "aria-label": slot ? "second model" : "model", onchange: () => { talks[slot].chosen = select.value; talks[slot].history = []; fill(talks[slot].messages); arrange(); } });
    const messages = h("div", { class: "messages", "aria-live": "polite" });
    return { slot, select, messages, chosen: null, history: [], element: h("div", { class: "talk" }, h("label", {}, slot ? "second model" : "model", select), messages) };
  });
  const columns = h("div", { class: "talks" }, talks.map((talk) => talk.element));
  const clear = h("button", { class: "quiet", onclick: () => talks.forEach((talk) => { talk.history = []; fill(talk.messages); }) }, "clear");
  fill(page, h("div", { class: "chat-options" }, h("label", {}, "system prompt", system), temperature.element, top.element, most.element, h("label", {}, "mode", mode)),
    columns, h("div", { class: "ask" }, text, button, clear));

  async function shown() {
    models = await get("/api/models");
    for (const { slot, select, chosen, messages } of talks) {
      const before = messages.firstChild ? select.value : chosen; // untouched, it shows the newest
      const label = ({ name, kind, step }) => `${name}${step === null ? ` (${kind})` : `, step ${step}`}`;
      fill(select, slot || !models.length ? h("option", { value: "" }, models.length ? "none" : "no models in the folders") : null,
        models.map((model) => h("option", { value: model.id }, label(model))));
      if (models.some((model) => model.id === before)) select.value = before;
    }
    arrange();
  }

  function arrange() {
    columns.classList.toggle("one", !talks[1].select.value);
    talks[1].messages.hidden = !talks[1].select.value;
  }

  function say(talk, kind, words) {
    const element = h("div", { class: `message ${kind}` }, words);
    talk.messages.append(element);
    talk.messages.scrollTop = talk.messages.scrollHeight;
    return element;
  }

  async function answer(talk, words) {
    const messages = [...talk.history, { role: "user", content: words }];
    say(talk, "user", words);
    const written = document.createTextNode(""), meta = h("span", { class: "meta" }, "waiting …");
    const element = say(talk, "assistant", null);
    element.append(written, meta);
    const value = (input) => (input.value.trim() === "" ? null : Number(input.value));
    const body = { model: talk.select.value, slot: talk.slot, max_new_tokens: value(most.input), temperature: value(temperature.input) };
    if (body.temperature) body.top_p = value(top.input);
    if (mode.value === "chat") body.messages = system.value ? [{ role: "system", content: system.value }, ...messages] : messages;
    else body.prompt = words;
    let tokens = 0, began = null;
    try {
      await stream("/api/chat", body, controller.signal, (part) => {
        if (part.error) throw new Error(part.error);
        if (part.state) meta.textContent = `${part.state} …`;
        if (part.text === undefined) return;
        began ??= performance.now();
        tokens++;
        written.data += part.text;
        const speed = tokens > 1 ? `, ${number((1000 * (tokens - 1)) / (performance.now() - began), 3)} tokens/s` : "";
        meta.textContent = `${tokens} tokens${speed}${part.finish === "length" ? ", cut at the most tokens" : ""}`;
        talk.messages.scrollTop = talk.messages.scrollHeight;
      });
      talk.history = [...messages, { role: "assistant", content: written.data }];
      element.dataset.done = "true";
    } catch (error) {
      if (error.name === "AbortError") meta.textContent += ", stopped";
      else element.replaceWith(h("div", { class: "message error" }, error.message));
    }
  }

  async function send() {
    const words = text.value;
    if (controller || !words.trim() || !talks[0].select.value) return;
    text.value = "";
    controller = new AbortController();
    button.textContent = "Stop";
    await Promise.all(talks.filter((talk) => talk.select.value).map((talk) => answer(talk, words)));
    controller = null;
    button.textContent = "Send";
    text.focus();
  }

  return { shown };
}
