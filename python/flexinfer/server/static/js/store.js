// Conversations and settings, kept in this browser and the same in all its tabs. Views listen for "change".
//
// A conversation that is being answered belongs to the tab that asked: `answering` says which, since when, and when it was
// last heard of. Other tabs show the answer as it comes. Two tabs that ask at the same moment both keep what they said:
// the later one goes on in a fork. A deletion wins over everything.
import { Records, readJson, writeJson } from "./records.js";

const SETTINGS_PLACE = "flexinfer.settings.v1";
const CURRENT_PLACE = "flexinfer.current"; // of this tab
export const STALE_MS = 5000; // a tab that was not heard of for so long has gone

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
  #records;
  #isFull = false;

  constructor() {
    super();
    this.tab = newId();
    this.#records = new Records({
      settingsPlace: SETTINGS_PLACE,
      onForeign: (id, written) => this.#onForeign(id, written),
      onSettings: () => this.#readSettings(),
    });
    this.settings = { ...DEFAULT_SETTINGS, ...readJson(SETTINGS_PLACE, {}) };
    this.conversations = this.#records.load();
    for (const conversation of this.conversations) this.#watchForeignAnswer(conversation);
    this.currentId = sessionStorage.getItem(CURRENT_PLACE) ?? this.conversations[0]?.id;
    if (!this.current) this.create();
  }

  get current() {
    return this.find(this.currentId);
  }

  find(id) {
    return this.conversations.find((conversation) => conversation.id === id);
  }

  // Whether the browser keeps no more: what is said now is lost with the tab.
  get isFull() {
    return this.#isFull;
  }

  // An empty conversation is kept only once something is said in it; there is at most one.
  create(messages = [], title = "", parentId = null) {
    const empty = messages.length === 0 && this.conversations.find((one) => one.messages.length === 0);
    if (empty) {
      this.select(empty.id);
      return empty;
    }
    const id = newId();
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
    this.changed(fork);
    return fork;
  }

  select(id) {
    this.currentId = id;
    this.changed(null);
  }

  remove(id) {
    this.#records.remove(id);
    this.#forget(id);
  }

  saveSettings(settings) {
    this.settings = settings;
    writeJson(SETTINGS_PLACE, settings);
    this.dispatchEvent(new Event("settings"));
  }

  // Take over what other tabs have said in a conversation, before something is said in it here.
  refresh(conversation) {
    const record = this.#records.read(conversation.id);
    if (record !== null && record.version > (conversation.version ?? 0)) adopt(conversation, record);
  }

  // Tell the views, and keep the conversation that has changed.
  changed(conversation = this.current) {
    if (conversation) this.save(conversation);
    sessionStorage.setItem(CURRENT_PLACE, this.currentId);
    this.dispatchEvent(new Event("change"));
  }

  save(conversation) {
    if (conversation.messages.length === 0 || !this.conversations.includes(conversation)) return;
    this.#isFull = !this.#records.write(conversation);
  }

  // `written` is what the other tab wrote, `record` the last word of all tabs, which may be our own again.
  #onForeign(id, written) {
    const record = this.#records.read(id);
    const mine = this.find(id);
    if (record === null) this.#forget(id);
    else if (!mine) this.#insert(record);
    else if (mine.answering?.tab !== this.tab) adopt(mine, record);
    else if (written) this.#compete(mine, written);
    if (record !== null) this.#watchForeignAnswer(this.find(id));
    this.dispatchEvent(new Event("change"));
  }

  // Another tab has written what is being answered here. If it answers too, the one that began first stays.
  #compete(mine, written) {
    if (isEarlier(written.answering, mine.answering)) this.#moveAway(mine, written);
    else if (!written.answering) {
      mine.system = written.system;
      this.save(mine); // what comes here are the newer messages
    }
  }

  #insert(record) {
    this.conversations = [...this.conversations, record].sort((a, b) => b.createdAt - a.createdAt);
  }

  // Both tabs have asked: the other one was first, so that what was said here becomes a fork.
  #moveAway(mine, record) {
    Object.assign(mine, { id: newId(), parentId: record.id, createdAt: Date.now(), title: `${mine.title} (2)` });
    if (this.currentId === record.id) this.currentId = mine.id;
    this.#insert(record);
    this.changed(mine);
  }

  #forget(id) {
    const gone = this.find(id);
    if (!gone) return;
    this.conversations = this.conversations.filter((conversation) => conversation !== gone);
    this.dispatchEvent(new CustomEvent("gone", { detail: gone }));
    if (this.conversations.length === 0) this.create();
    else if (this.currentId === id) this.currentId = this.conversations[0].id;
    this.changed(null);
  }

  // An answer of another tab, or one that was left in the middle: stopped, once that tab is not heard of any more.
  #watchForeignAnswer(conversation) {
    const { answering } = conversation;
    if (!answering || answering.tab === this.tab) return;
    const check = () => {
      if (conversation.answering?.tab === this.tab || conversation.answering?.at !== answering.at) return;
      conversation.answering = null;
      stopLast(conversation);
      this.dispatchEvent(new Event("change"));
    };
    const left = answering.at + STALE_MS - Date.now();
    if (left <= 0) check();
    else setTimeout(check, left);
  }

  #readSettings() {
    this.settings = { ...DEFAULT_SETTINGS, ...readJson(SETTINGS_PLACE, {}) };
    this.dispatchEvent(new Event("settings"));
  }
}

export function titleOf(conversation) {
  return conversation.title || "New conversation";
}

// The last answer, if it is still being written, is all there will be of it.
export function stopLast(conversation) {
  const last = conversation.messages.at(-1);
  if (last?.state === "waiting" || last?.state === "streaming") last.state = "stopped";
}

// In place, and with the same message objects where nothing has changed: views know them.
function adopt(conversation, record) {
  const messages = record.messages.map((message, i) => {
    const mine = conversation.messages[i];
    return mine && JSON.stringify(mine) === JSON.stringify(message) ? mine : message;
  });
  Object.assign(conversation, { answering: null }, record, { messages });
}

function isEarlier(theirs, mine) {
  if (!theirs || theirs.tab === mine.tab) return false;
  return theirs.since < mine.since || (theirs.since === mine.since && theirs.tab < mine.tab);
}

function newId() {
  return crypto.randomUUID ? crypto.randomUUID() : `${Date.now()}-${Math.random().toString(36).slice(2)}`;
}
