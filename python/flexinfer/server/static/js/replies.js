// Replies: the answers that are being streamed, at most one per conversation. Views listen for "change".
import { stopLast } from "./store.js";

const MAX_TITLE = 40;
const REGENERATE_TEMPERATURE = 0.8; // where answers are greedy; that of `flexinfer chat`
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
const KEEP_MS = 500; // how often a growing answer is kept, and seen in other tabs
const HEARTBEAT_MS = 1000; // while none comes

export class Replies extends EventTarget {
  #running = new Map(); // conversation -> AbortController
  #conversationOf = new Map(); // request id -> conversation
  #finishedAlone = null; // {id, replica}
  #tabs = "BroadcastChannel" in window ? new BroadcastChannel("flexinfer") : null;

  constructor(api, store) {
    super();
    this.api = api;
    this.store = store;
    this.model = "";
    store.addEventListener("gone", ({ detail }) => this.#running.get(detail)?.abort());
    this.#tabs?.addEventListener("message", ({ data }) => this.#running.get(store.find(data.stop))?.abort());
    setInterval(() => this.#heartbeat(), HEARTBEAT_MS);
  }

  // Here, or in another tab.
  isRunning(conversationId) {
    const conversation = this.store.find(conversationId);
    return this.#running.has(conversation) || Boolean(conversation?.answering);
  }

  get count() {
    return this.store.conversations.filter(({ id }) => this.isRunning(id)).length;
  }

  // The conversation of the last answer, if it came alone: then the newest prefix in the cache is its own.
  takeFinishedAlone(replica) {
    if (this.#finishedAlone?.replica !== replica) return null;
    const { id } = this.#finishedAlone;
    this.#finishedAlone = null;
    return id;
  }

  // The conversation that asked for the request, if it was one of this browser.
  conversationOf(requestId) {
    const asked = this.#conversationOf.get(requestId)
      ?? this.store.conversations.find(({ answering }) => answering && answering.requestId === requestId);
    return asked?.id ?? null;
  }

  stop(conversationId) {
    const controller = this.#running.get(this.store.find(conversationId));
    if (controller) controller.abort();
    else this.#tabs?.postMessage({ stop: conversationId });
  }

  // The page is left: what was said so far is kept, as stopped answers.
  leave() {
    for (const conversation of this.#running.keys()) {
      conversation.answering = null;
      stopLast(conversation);
      this.store.save(conversation);
    }
  }

  send(conversation, text) {
    this.store.refresh(conversation);
    if (this.isRunning(conversation.id)) return false;
    conversation.messages.push({ role: "user", content: text });
    // A fork is called after what it says first that its parent did not.
    if (!conversation.title || conversation.isNewFork) conversation.title = shortTitle(text);
    conversation.isNewFork = false;
    this.answer(conversation);
    return true;
  }

  // Drop the last answer and ask again: sampled and without a seed, or it would be the same again.
  regenerate(conversation) {
    if (!this.#dropAnswer(conversation)) return;
    const temperature = this.store.settings.temperature || REGENERATE_TEMPERATURE;
    this.answer(conversation, { temperature, seed: undefined });
  }

  // Ask again for an answer that failed.
  retry(conversation) {
    if (this.#dropAnswer(conversation)) this.answer(conversation);
  }

  #dropAnswer(conversation) {
    this.store.refresh(conversation);
    if (this.isRunning(conversation.id)) return false;
    while (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
    return true;
  }

  async answer(conversation, changed = {}) {
    const controller = new AbortController();
    const request = { ...this.#body(conversation), ...changed };
    const reply = { role: "assistant", content: "", state: "waiting" };
    conversation.messages.push(reply);
    conversation.answering = { tab: this.store.tab, since: Date.now(), at: Date.now() };
    this.#running.set(conversation, controller);
    this.store.changed(conversation);
    this.#changed();
    const started = performance.now();
    try {
      for await (const chunk of this.api.chat(request, controller.signal)) {
        this.#conversationOf.set(chunk.id, conversation);
        if (conversation.answering) conversation.answering.requestId = chunk.id;
        this.#take(reply, chunk, started);
        this.#keep(conversation);
      }
      reply.state = "done";
    } catch (error) {
      reply.state = error.name === "AbortError" ? "stopped" : "failed";
      if (reply.state === "failed") reply.error = error.message;
      if (error.needsKey) this.dispatchEvent(new Event("key"));
    } finally {
      const isAlone = this.#running.size === 1 && reply.state === "done";
      this.#finishedAlone = isAlone ? { id: conversation.id, replica: this.api.answeredBy } : null;
      this.#running.delete(conversation);
      conversation.answering = null;
      this.store.changed(conversation);
      this.#changed();
    }
  }

  #keep(conversation) {
    const now = Date.now();
    if (!conversation.answering || now - conversation.answering.at < KEEP_MS) return;
    conversation.answering.at = now;
    this.store.save(conversation);
  }

  #heartbeat() {
    for (const conversation of this.#running.keys()) this.#keep(conversation);
  }

  #body(conversation) {
    const { max_tokens, seed } = this.store.settings;
    const body = { model: this.model, messages: promptOf(conversation), max_completion_tokens: max_tokens };
    // All of them: the server has other defaults than the dialog shows, where the model's makers advise some.
    for (const name of SAMPLING) body[name] = this.store.settings[name];
    if (seed !== "") body.seed = Number(seed);
    return body;
  }

  #take(reply, chunk, started) {
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      if (reply.state === "waiting") reply.firstMs = performance.now() - started;
      reply.state = "streaming";
      reply.content += choice.delta.content;
    }
    if (choice?.finish_reason) reply.finish = choice.finish_reason;
    if (chunk.usage) {
      reply.promptTokens = chunk.usage.prompt_tokens;
      reply.cachedTokens = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
      reply.tokens = chunk.usage.completion_tokens;
      reply.totalMs = performance.now() - started;
    }
    this.#changed();
  }

  #changed() {
    this.dispatchEvent(new Event("change"));
  }
}

// What the model is asked. Failed answers are left out, and what was said on both sides of one is joined: many chat
// templates refuse two messages of the user in a row.
function promptOf(conversation) {
  const messages = conversation.system ? [{ role: "system", content: conversation.system }] : [];
  for (const { role, content, state } of conversation.messages) {
    if (!content || state === "failed") continue;
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  return messages;
}

function shortTitle(text) {
  const line = text.trim().split("\n")[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}
