// Records: conversations in localStorage, one record each, so that two tabs never write each other's away.
//
//   flexinfer.chat.<id>     the conversation as JSON, with a version that each write raises
//   flexinfer.deleted.<id>  when it was deleted: a deletion wins over a tab that has not heard of it yet

const CHAT = "flexinfer.chat.";
const DELETED = "flexinfer.deleted.";
const DELETED_MS = 24 * 3600 * 1000; // no tab is so late

export class Records {
  // `onForeign(id, written)`: another tab has written a conversation, or deleted it (null). `onSettings()`: the settings.
  constructor({ onForeign, onSettings, settingsPlace }) {
    window.addEventListener("storage", ({ key, newValue }) => {
      if (key === settingsPlace) onSettings();
      else if (key?.startsWith(CHAT)) onForeign(key.slice(CHAT.length), newValue && JSON.parse(newValue));
      else if (key?.startsWith(DELETED) && newValue) this.#onDeleted(key.slice(DELETED.length), onForeign);
    });
  }

  // All conversations, the newest first.
  load() {
    const found = [];
    for (const key of keys()) {
      if (key.startsWith(DELETED) && Date.now() - Number(localStorage.getItem(key)) > DELETED_MS) localStorage.removeItem(key);
      const record = key.startsWith(CHAT) ? this.read(key.slice(CHAT.length)) : null;
      if (record !== null) found.push(record);
    }
    return found.sort((a, b) => b.createdAt - a.createdAt);
  }

  // The record as any tab wrote it last; null if there is none, or it was deleted.
  read(id) {
    return this.#isDeleted(id) ? null : readJson(CHAT + id, null);
  }

  // Returns false if the browser keeps nothing more.
  write(conversation) {
    if (this.#isDeleted(conversation.id)) return true;
    conversation.version = (conversation.version ?? 0) + 1;
    return writeJson(CHAT + conversation.id, conversation);
  }

  remove(id) {
    try {
      localStorage.removeItem(CHAT + id);
      localStorage.setItem(DELETED + id, String(Date.now()));
    } catch {
      // nothing was kept, so nothing is left
    }
  }

  // This tab may have written it once more before it heard of that.
  #onDeleted(id, onForeign) {
    localStorage.removeItem(CHAT + id);
    onForeign(id, null);
  }

  #isDeleted(id) {
    try {
      return localStorage.getItem(DELETED + id) !== null;
    } catch {
      return false;
    }
  }
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return [];
  }
}

export function readJson(place, fallback) {
  try {
    return JSON.parse(localStorage.getItem(place)) ?? fallback;
  } catch {
    return fallback;
  }
}

// A full or forbidden store is no reason to stop a chat: returns whether it was kept.
export function writeJson(place, value) {
  try {
    localStorage.setItem(place, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
