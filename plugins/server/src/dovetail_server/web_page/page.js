// Starts the page and switches between its two views.

import { startChat } from "./chat.js";
import { show, startLive } from "./live.js";
import { request } from "./server.js";

const VIEWS = ["chat", "live"];

function select(name) {
  for (const view of VIEWS) {
    document.getElementById(view).hidden = view !== name;
    const tab = document.getElementById(`tab-${view}`);
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
  }
  show(name === "live");
  if (name === "chat") document.getElementById("input").focus();
}

async function showModel() {
  const target = document.getElementById("model");
  try {
    const models = await (await request("v1/models")).json();
    target.textContent = models.data[0].id;
  } catch (error) {
    target.textContent = error.message;
  }
}

for (const view of VIEWS) {
  const tab = document.getElementById(`tab-${view}`);
  tab.addEventListener("click", () => select(view));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = VIEWS[1 - VIEWS.indexOf(view)];
    select(other);
    document.getElementById(`tab-${other}`).focus();
  });
}
startChat();
startLive();
select(location.hash === "#live" ? "live" : "chat");
document.getElementById("api_key").addEventListener("change", showModel);
showModel();
document.documentElement.dataset.ready = "yes";
