// Replies: the answers that are being streamed, at most one a conversation. Views listen for "change".

const MAX_TITLE = 40;
const REGENERATE_TEMPERATURE = 0.8; // where answers are greedy; that of `flexinfer chat`

export class Replies extends EventTarget {
  #running = new Map(); // conversation id -> AbortController
  #conversationOf = new Map(); // request id -> conversation id
  #finishedAlone = null;

  constructor(api, store) {
    super();
    this.api = api;
    this.store = store;
    this.model = "";
  }

  isRunning(conversationId) {
    return this.#running.has(conversationId);
  }

  get count() {
    return this.#running.size;
  }

  // The conversation of the last answer, if it came alone: then the newest prefix in the cache is its own.
  takeFinishedAlone() {
    const id = this.#finishedAlone;
    this.#finishedAlone = null;
    return id;
  }

  // The conversation that asked for the request, if it was one of this page.
  conversationOf(requestId) {
    return this.#conversationOf.get(requestId) ?? null;
  }

  stop(conversationId) {
    this.#running.get(conversationId)?.abort();
  }

  send(conversation, text) {
    conversation.messages.push({ role: "user", content: text });
    // A fork is called after what it says first that its parent did not.
    if (!conversation.title || conversation.isNewFork) conversation.title = shortTitle(text);
    conversation.isNewFork = false;
    return this.answer(conversation);
  }

  // Drop the last answer and ask again: sampled and without a seed, or it would be the same again.
  regenerate(conversation) {
    while (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
    const temperature = this.store.settings.temperature || REGENERATE_TEMPERATURE;
    return this.answer(conversation, { temperature, seed: undefined });
  }

  async answer(conversation, changed = {}) {
    const controller = new AbortController();
    const request = { ...this.#body(conversation), ...changed };
    const reply = { role: "assistant", content: "", state: "waiting" };
    conversation.messages.push(reply);
    this.#running.set(conversation.id, controller);
    this.store.changed();
    this.#changed();
    const started = performance.now();
    try {
      for await (const chunk of this.api.chat(request, controller.signal)) {
        this.#conversationOf.set(chunk.id, conversation.id);
        this.#take(reply, chunk, started);
      }
      reply.state = "done";
    } catch (error) {
      reply.state = error.name === "AbortError" ? "stopped" : "failed";
      if (reply.state === "failed") reply.error = error.message;
      if (error.needsKey) this.dispatchEvent(new Event("key"));
    } finally {
      this.#finishedAlone = this.#running.size === 1 && reply.state === "done" ? conversation.id : null;
      this.#running.delete(conversation.id);
      this.store.changed();
      this.#changed();
    }
  }

  #body(conversation) {
    const { temperature, top_p, top_k, min_p, max_tokens, repetition_penalty, seed } = this.store.settings;
    const messages = conversation.messages
      .filter((message) => message.content && message.state !== "failed")
      .map(({ role, content }) => ({ role, content }));
    if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
    const body = { model: this.model, messages, temperature, top_p, max_completion_tokens: max_tokens };
    if (top_k > 0) body.top_k = top_k;
    if (min_p > 0) body.min_p = min_p;
    if (repetition_penalty !== 1) body.repetition_penalty = repetition_penalty;
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

function shortTitle(text) {
  const line = text.trim().split("\n")[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1)}…` : line;
}
