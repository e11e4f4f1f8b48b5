// ChatView: the messages of the current conversation and the box to write the next one.
import { h, icon, iconButton, replaceChildren } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { titleOf } from "./store.js";

const SUGGESTIONS = ["Hello! My name is Ada.", "What is 17 plus 25?", "What can you remember?"];
const NEAR_END_PX = 80;

export class ChatView {
  constructor(element, store, replies, { openSettings }) {
    Object.assign(this, { element, store, replies });
    this.title = h("h2", {});
    this.modelName = h("span", { class: "model" });
    this.log = h("div", { class: "messages", role: "log", "aria-live": "polite", "aria-label": "Messages", tabindex: "0" });
    this.text = h("textarea", {
      id: "composer-text", rows: "1", placeholder: "Message", "aria-label": "Message",
      oninput: () => this.#fit(), onkeydown: (event) => this.#onKey(event),
    });
    this.button = h("button", { type: "submit", class: "send" });
    replaceChildren(
      element,
      h("header", { class: "bar" }, h("div", { class: "heading" }, this.title, this.modelName),
        iconButton("settings", "Settings and system prompt", openSettings)),
      this.log,
      h("form", { class: "composer", onsubmit: (event) => this.#onSubmit(event) },
        h("div", { class: "field" }, this.text, this.button),
        h("p", { class: "hint" }, "Enter sends, Shift+Enter starts a line, Escape stops.")),
    );
    store.addEventListener("change", () => this.render());
    replies.addEventListener("change", () => this.#update());
    this.render();
  }

  focus() {
    this.text.focus();
  }

  setModel(name) {
    this.modelName.textContent = name;
  }

  get #conversation() {
    return this.store.current;
  }

  render() {
    const conversation = this.#conversation;
    this.title.textContent = titleOf(conversation);
    const isEmpty = conversation.messages.length === 0;
    const last = conversation.messages.length - 1;
    this.log.replaceChildren(
      ...(isEmpty ? [this.#welcome()] : conversation.messages.map((message, i) => this.#message(message, i, i === last))));
    this.#showButton();
    this.#scroll(true);
  }

  // Only the last message and the button change while an answer comes.
  #update() {
    const { messages } = this.#conversation;
    const last = messages.length - 1;
    const isNear = this.#isNearEnd();
    if (last >= 0 && messages[last].role === "assistant" && this.log.children.length === messages.length) {
      this.log.lastElementChild.replaceWith(this.#message(messages[last], last, true));
    }
    this.#showButton();
    this.#scroll(isNear);
  }

  #welcome() {
    return h("section", { class: "welcome" },
      h("h3", {}, "Say something, and watch the memory."),
      h("p", {}, "Every conversation has one contiguous range of virtual memory for its KV cache. Chunks are mapped behind it " +
        "as the answer grows, and what two conversations share is the same physical chunk, shown in the same colour."),
      h("div", { class: "suggestions" }, SUGGESTIONS.map((text) =>
        h("button", { type: "button", onclick: () => this.#send(text) }, text))));
  }

  #message(message, index, isLast) {
    const isUser = message.role === "user";
    const body = h("div", { class: "body" }, isUser ? h("p", {}, message.content) : renderMarkdown(message.content));
    if (!isUser && (message.state === "waiting" || message.state === "streaming")) {
      body.append(h("span", { class: "caret", "aria-label": "writing" }));
    }
    return h("article", { class: `message ${message.role} ${message.state ?? ""}`, "aria-label": isUser ? "You" : "Assistant" },
      body,
      message.state === "failed" ? h("p", { class: "error", role: "alert" }, message.error) : null,
      h("footer", {}, facts(message), this.#actions(message, index, isLast)));
  }

  #actions(message, index, isLast) {
    const conversation = this.#conversation;
    if (this.replies.isRunning(conversation.id) && isLast) return null;
    const isAnswer = message.role === "assistant";
    return h("span", { class: "actions" },
      isAnswer && isLast ? iconButton("redo", "Regenerate the answer", () => this.replies.regenerate(conversation)) : null,
      isAnswer ? iconButton("fork", "Fork the conversation here", () => {
        this.store.fork(conversation.id, index + 1);
        this.focus();
      }) : null,
      iconButton("copy", "Copy the text", () => navigator.clipboard?.writeText(message.content)));
  }

  #showButton() {
    const isRunning = this.replies.isRunning(this.#conversation.id);
    const label = isRunning ? "Stop" : "Send";
    if (this.button.getAttribute("aria-label") === label) return;
    this.button.setAttribute("aria-label", label);
    this.button.title = label;
    this.button.replaceChildren(icon(isRunning ? "stop" : "send"));
  }

  #onSubmit(event) {
    event.preventDefault();
    const { id } = this.#conversation;
    if (this.replies.isRunning(id)) this.replies.stop(id);
    else this.#send(this.text.value);
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.replies.isRunning(this.#conversation.id)) this.#send(this.text.value);
    }
  }

  #send(text) {
    if (text.trim() === "") return;
    this.text.value = "";
    this.#fit();
    this.replies.send(this.#conversation, text.trim());
  }

  #fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, 200)}px`;
  }

  #isNearEnd() {
    return this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
  }

  #scroll(toEnd) {
    if (toEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}

// What the server told about an answer.
function facts(message) {
  if (message.role !== "assistant") return null;
  const parts = [];
  if (message.state === "stopped") parts.push("stopped");
  if (message.finish === "length") parts.push("cut at the token limit");
  if (message.tokens) parts.push(`${message.tokens} tokens`);
  if (message.firstMs) parts.push(`first after ${Math.round(message.firstMs)} ms`);
  if (message.promptTokens) parts.push(`${message.cachedTokens} of ${message.promptTokens} prompt tokens from the cache`);
  return h("span", { class: "facts" }, parts.join(" · "));
}
