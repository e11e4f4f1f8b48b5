// Conversations and settings, kept in this browser (localStorage). Views listen for "change".

const PLACE = "flexinfer.chats.v1";
const SETTINGS_PLACE = "flexinfer.settings.v1";

export const DEFAULT_SETTINGS = {
  system: "You are a helpful assistant.",
  temperature: 0,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  max_tokens: 256,
  repetition_penalty: 1,
  seed: "",
  theme: "auto",
};

export class Store extends EventTarget {
  constructor() {
    super();
    const saved = read(PLACE, { conversations: [], currentId: null });
    this.conversations = saved.conversations;
    for (const message of this.conversations.flatMap(({ messages }) => messages)) {
      if (message.state === "waiting" || message.state === "streaming") message.state = "stopped"; // the page was left
    }
    this.currentId = saved.currentId;
    this.settings = { ...DEFAULT_SETTINGS, ...read(SETTINGS_PLACE, {}) };
    if (!this.current) this.create();
  }

  get current() {
    return this.conversations.find((conversation) => conversation.id === this.currentId);
  }

  find(id) {
    return this.conversations.find((conversation) => conversation.id === id);
  }

  create(messages = [], title = "", parentId = null) {
    const id = crypto.randomUUID ? crypto.randomUUID() : String(Date.now() + Math.random());
    const system = this.settings.system;
    this.conversations.unshift({ id, title, parentId, system, messages, createdAt: Date.now() });
    this.currentId = id;
    this.changed();
    return this.current;
  }

  // A new conversation with the first `count` messages of another: the server finds its KV in the cache.
  fork(id, count) {
    const source = this.find(id);
    const messages = source.messages.slice(0, count).map((message) => ({ ...message }));
    const fork = this.create(messages, source.title, id);
    fork.system = source.system;
    fork.isNewFork = true;
    this.changed();
    return fork;
  }

  select(id) {
    this.currentId = id;
    this.changed();
  }

  remove(id) {
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    if (this.conversations.length === 0) this.create();
    else if (this.currentId === id) this.currentId = this.conversations[0].id;
    this.changed();
  }

  saveSettings(settings) {
    this.settings = settings;
    write(SETTINGS_PLACE, settings);
    this.dispatchEvent(new Event("settings"));
  }

  // Tell the views, and keep it.
  changed() {
    this.save();
    this.dispatchEvent(new Event("change"));
  }

  save() {
    write(PLACE, { conversations: this.conversations, currentId: this.currentId });
  }
}

export function titleOf(conversation) {
  return conversation.title || "New conversation";
}

function read(place, fallback) {
  try {
    return JSON.parse(localStorage.getItem(place)) ?? fallback;
  } catch {
    return fallback;
  }
}

// A full or forbidden store is no reason to stop a chat.
function write(place, value) {
  try {
    localStorage.setItem(place, JSON.stringify(value));
  } catch (error) {
    console.info("conversations are not kept:", error.message);
  }
}
