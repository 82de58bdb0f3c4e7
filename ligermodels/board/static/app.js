// The page: its tabs, its theme, its keys, and the events of the server.

import { redraw } from "./chart.js";
import { openChat } from "./chat.js";
import { openForm } from "./form.js";
import { openRuns } from "./runs.js";

const pages = ["runs", "start", "chat"];
const byId = (id) => document.getElementById(id);
const opened = { runs: openRuns(byId("page-runs")), start: null, chat: null };

export function show(name) {
  if (name === "start") opened.start ??= openForm(byId("page-start"), { started: (process) => { show("runs"); opened.runs.await(process); } });
  if (name === "chat") opened.chat ??= openChat(byId("page-chat"));
  for (const page of pages) {
    byId(`page-${page}`).hidden = page !== name;
    byId(`tab-${page}`).setAttribute("aria-selected", page === name);
  }
  opened[name].shown?.();
  history.replaceState(null, "", `#${name}`);
  redraw();
}

// The scheme that was clicked, else that of the system, also when the system changes it.
const system = matchMedia("(prefers-color-scheme: dark)");
function setTheme() {
  document.documentElement.dataset.theme = localStorage.getItem("theme") || (system.matches ? "dark" : "light");
  redraw();
}

function flipTheme() {
  localStorage.setItem("theme", document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  setTheme();
}

setTheme();
system.addEventListener("change", setTheme);
byId("theme").addEventListener("click", flipTheme);
byId("keys").addEventListener("click", () => byId("help").showModal());
for (const page of pages) byId(`tab-${page}`).addEventListener("click", () => show(page));

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) return;
  const actions = { 1: () => show("runs"), 2: () => show("start"), 3: () => show("chat"), d: flipTheme, "?": () => byId("help").showModal() };
  const action = actions[event.key] || (byId("page-runs").hidden ? null : opened.runs.keys[event.key]);
  if (!action) return;
  event.preventDefault();
  action();
});

const events = new EventSource("/api/events");
events.onmessage = (event) => {
  byId("connection").textContent = "";
  opened.runs.update(JSON.parse(event.data));
};
events.onerror = () => { byId("connection").textContent = "the board does not answer"; };
const wanted = location.hash.slice(1);
if (pages.includes(wanted) && wanted !== "runs") show(wanted);
