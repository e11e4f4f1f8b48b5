// RowNames: what the rows of the map are called: after the conversation of this browser that they belong to, else after
// their first words, where the server shows them, else by a number.
import { formatCount } from "./dom.js";
import { overlap } from "./memory-model.js";
import { titleOf } from "./store.js";

export class RowNames {
  #lastChunks = new Map(); // conversation id -> chunks of its newest live row
  #conversations = new Map(); // row key -> conversation id
  #numbers = new Map(); // row key -> number of a row without words

  // `replica`: whose map it is, where there are several: all of them count their chunks from 0.
  constructor(store, replies, replica) {
    Object.assign(this, { store, replies, replica });
  }

  // Which conversation a row belongs to: by request id while it is live, afterwards by its chunks.
  learn(rows, generations) {
    const unique = ({ chunks }) => chunks.filter((id) => id !== null).map((id) => `${id}.${generations.get(id)}`); // ids are used again
    this.#conversations.clear();
    for (const row of rows.filter((one) => one.kind === "live")) {
      const id = this.replies.conversationOf(row.requestId);
      if (id === null) continue;
      this.#conversations.set(row.key, id);
      this.#lastChunks.set(id, unique(row));
    }
    const cached = rows.filter((one) => one.kind === "cached");
    const finished = this.replies.takeFinishedAlone(this.replica);
    if (finished !== null && cached.length > 0) {
      const newest = cached.reduce((a, b) => (b.lastUsed > a.lastUsed ? b : a));
      this.#lastChunks.set(finished, unique(newest));
    }
    for (const row of cached) {
      const mine = unique(row);
      let best = null;
      let most = row.chunks.length / 2; // another conversation's if less than half is the same
      for (const [id, chunks] of this.#lastChunks) {
        const common = overlap(chunks, mine);
        if (common > most) [best, most] = [id, common];
      }
      if (best !== null) this.#conversations.set(row.key, best);
    }
    for (const key of this.#numbers.keys()) {
      if (!cached.some((row) => row.key === key)) this.#numbers.delete(key);
    }
  }

  isOwn(row) {
    return this.store.find(this.#conversations.get(row.key)) !== undefined;
  }

  of(row) {
    if (row.isLane) return `Window of ${formatCount(row.window, "token")}`;
    const id = this.#conversations.get(row.key);
    const conversation = this.store.find(id);
    const goesOn = row.above && this.#conversations.get(row.above.key) === id; // the same talk, from another point on
    if (conversation && !goesOn) return titleOf(conversation);
    if (row.kind === "parked") return `Slot ${row.key.slice(1)}`;
    if (row.isState) return `State ${row.key.slice(1)}`;
    if (row.kind === "live") return `Request ${row.key.slice(1)}`;
    if (row.text) return row.above ? `… ${row.text}` : row.text;
    return row.above ? `… from token ${row.branch} on` : `Prefix ${this.#numberOf(row)}`;
  }

  #numberOf(row) {
    if (!this.#numbers.has(row.key)) this.#numbers.set(row.key, Math.max(0, ...this.#numbers.values()) + 1);
    return this.#numbers.get(row.key);
  }
}
