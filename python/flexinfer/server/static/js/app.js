// The page: conversations, chat and the live memory map over one server.
import { Api } from "./api.js";
import { ChatView } from "./chat-view.js";
import { h, icon } from "./dom.js";
import { MemoryView } from "./memory-view.js";
import { Replies } from "./replies.js";
import { SettingsDialog } from "./settings-dialog.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";

let wasOffline = false;
const api = new Api();
const store = new Store();
const replies = new Replies(api, store);
const app = document.getElementById("app");

const settings = new SettingsDialog(store, api, { onKeys: connect });
const openSettings = (focus) => settings.open(typeof focus === "string" ? focus : "system");
const chat = new ChatView(document.getElementById("chat"), store, replies);
const sidebar = new Sidebar(document.getElementById("sidebar"), store, replies, {
  openSettings,
  showChat: () => {
    show("chat");
    chat.focus();
  },
});
const memory = new MemoryView(document.getElementById("memory"), api, store, replies, { openSettings, onState });

// On a phone one pane at a time; the tabs do nothing on a wide screen, where all stand side by side.
const tabs = [["conversations", "Chats", "list"], ["chat", "Chat", "chat"], ["memory", "Memory", "map"]].map(([view, label, picture]) =>
  h("button", { type: "button", dataset: { view }, onclick: () => show(view) }, icon(picture), label));
document.getElementById("tabs").append(...tabs);

function show(view) {
  app.dataset.view = view;
  for (const tab of tabs) tab.setAttribute("aria-pressed", String(tab.dataset.view === view));
}

// What holds all answers up stands above the message box, too: on a phone the map is not seen.
function onState({ isOffline, isAsleep }) {
  if (isOffline) chat.setObstacle("The server does not answer. This page tries again every second.");
  else if (isAsleep) chat.setObstacle("The engine sleeps: answers come when somebody wakes it.");
  else chat.setObstacle(null);
  if (!isOffline && wasOffline) connect(); // perhaps another server, with another model
  wasOffline = isOffline;
}

async function connect() {
  try {
    const models = await api.models();
    replies.model = models.data[0].id;
    chat.setModel(replies.model);
  } catch (error) {
    chat.setModel(error.message);
    if (error.needsKey) settings.open("api-key");
  }
  memory.refresh();
}

replies.addEventListener("key", () => settings.open("api-key"));
window.addEventListener("pagehide", () => replies.leave());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") replies.stop(store.currentId);
  if (event.altKey && event.key.toLowerCase() === "n") {
    event.preventDefault();
    sidebar.create();
  }
});

show("chat");
connect();
chat.focus();
