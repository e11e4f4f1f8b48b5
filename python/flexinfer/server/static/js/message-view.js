// MessageView: one message of the chat. What has not changed is left as it is: a growing answer keeps its selection, a
// button its focus.
import { copyButton } from "./code-block.js";
import { h, iconButton, replaceChildren } from "./dom.js";
import { Markdown } from "./markdown.js";

export class MessageView {
  #shown = null;
  #footer = null;

  // `actions`: {regenerate, retry, fork}, each called without arguments.
  constructor(message, actions) {
    Object.assign(this, { message, actions });
    this.isUser = message.role === "user";
    this.body = h("div", { class: "body" });
    this.markdown = this.isUser ? null : new Markdown(this.body);
    this.problem = h("div", { class: "error", role: "alert", hidden: true });
    this.footer = h("footer", {});
    this.element = h("article", { "aria-label": this.isUser ? "You" : "Assistant" }, this.body, this.problem, this.footer);
  }

  // `canAct`: whether it may be regenerated or tried again: the last one, while no answer comes.
  update(canAct, canFork) {
    const { message } = this;
    const { role, state = "", content } = message;
    const shown = [state, content.length, canAct, canFork, message.tokens].join(" ");
    if (shown === this.#shown) return;
    this.#shown = shown;
    this.element.className = `message ${role} ${state}`;
    this.element.setAttribute("aria-busy", String(this.isWriting));
    if (this.isUser) replaceChildren(this.body, h("p", {}, content));
    else this.markdown.update(content);
    this.#showProblem(canAct);
    this.#showFooter(canAct, canFork);
  }

  get isWriting() {
    return this.message.state === "waiting" || this.message.state === "streaming";
  }

  #showProblem(canAct) {
    const isFailed = this.message.state === "failed";
    this.problem.hidden = !isFailed;
    if (!isFailed) return;
    replaceChildren(this.problem, h("p", {}, this.message.error),
      canAct ? h("button", { type: "button", class: "quiet", onclick: this.actions.retry }, "Try again") : null);
  }

  #showFooter(canAct, canFork) {
    const { message } = this;
    const text = factsOf(message);
    const footer = [text, canAct, canFork, this.isWriting].join(" ");
    if (footer === this.#footer) return;
    this.#footer = footer;
    replaceChildren(this.footer,
      this.isUser ? null : h("span", { class: "facts" }, text),
      this.isWriting ? null : h("span", { class: "actions" },
        !this.isUser && canAct ? iconButton("redo", "Regenerate the answer", this.actions.regenerate) : null,
        !this.isUser && canFork ? iconButton("fork", "Fork the conversation here", this.actions.fork) : null,
        copyButton("Copy the text", () => message.content)));
  }
}

// A rate over less would be that of one packet: short answers may come in one.
const MIN_RATE_MS = 100;

// What the server told about an answer.
export function factsOf(message) {
  const parts = [];
  if (message.state === "stopped") parts.push("stopped");
  if (message.finish === "length") parts.push("cut at the token limit");
  if (message.tokens) parts.push(`${message.tokens} tokens`);
  if (message.firstMs) parts.push(`first after ${Math.round(message.firstMs)} ms`);
  const decodeMs = message.totalMs - message.firstMs;
  if (message.tokens > 1 && decodeMs >= MIN_RATE_MS) {
    parts.push(`${Math.round((1000 * (message.tokens - 1)) / decodeMs)} per second`);
  }
  if (message.promptTokens) parts.push(`${message.cachedTokens} of ${message.promptTokens} prompt tokens from the cache`);
  return parts.join(" · ");
}
