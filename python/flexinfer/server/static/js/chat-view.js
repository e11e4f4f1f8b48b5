// ChatView: the messages of the current conversation and the box to write the next one.
import { h, icon, replaceChildren, soon } from "./dom.js";
import { MessageView } from "./message-view.js";
import { titleOf } from "./store.js";

const SUGGESTIONS = ["Hello! My name is Ada.", "What is 17 plus 25?", "What can you remember?"];
const NEAR_END_PX = 80;
const SETTLED_FRAMES = 3;

export class ChatView {
  #views = new WeakMap(); // message -> MessageView
  #shownId = null;
  #numSettling = 0; // frames until the end is where it stays
  #told = null; // the last answer that a screen reader was told

  constructor(element, store, replies) {
    Object.assign(this, { element, store, replies });
    this.title = h("h2", {});
    this.modelName = h("span", { class: "model" });
    this.log = h("div", { class: "messages", role: "log", "aria-live": "off", "aria-label": "Messages", tabindex: "0" });
    this.notice = h("p", { class: "notice", role: "status", hidden: true });
    this.status = h("p", { class: "offscreen", role: "status" });
    this.text = h("textarea", {
      id: "composer-text", rows: "1", placeholder: "Message", "aria-label": "Message",
      oninput: () => this.#fit(), onkeydown: (event) => this.#onKey(event),
    });
    this.button = h("button", { type: "submit", class: "send" });
    replaceChildren(
      element,
      h("header", { class: "bar" }, h("div", { class: "heading" }, this.title, this.modelName)),
      this.log, this.status,
      h("form", { class: "composer", onsubmit: (event) => this.#onSubmit(event) },
        this.notice,
        h("div", { class: "field" }, this.text, this.button),
        h("p", { class: "hint" }, "Enter sends, Shift+Enter starts a line, Escape stops.")),
    );
    for (const type of ["wheel", "touchmove", "pointerdown", "keydown"]) {
      this.log.addEventListener(type, () => { this.#numSettling = 0; }, { passive: true });
    }
    store.addEventListener("change", () => this.render());
    replies.addEventListener("change", soon(() => this.#update()));
    this.render();
  }

  focus() {
    this.text.focus();
  }

  setModel(name) {
    this.modelName.textContent = name;
  }

  // Something that holds all answers up, as long as it does; null: nothing.
  setObstacle(text) {
    this.obstacle = text;
    this.#showNotice();
  }

  get #conversation() {
    return this.store.current;
  }

  render() {
    const conversation = this.#conversation;
    this.title.textContent = titleOf(conversation);
    const toEnd = this.#shownId !== conversation.id || this.#isNearEnd();
    if (this.#shownId !== conversation.id) this.#told = conversation.messages.at(-1);
    this.#shownId = conversation.id;
    const elements = conversation.messages.map((message) => this.#viewOf(message).element);
    if (elements.length === 0) this.log.replaceChildren(this.#welcome());
    else place(this.log, elements);
    this.#update(toEnd);
    this.#showNotice();
  }

  #update(toEnd = this.#isNearEnd()) {
    const { id, messages } = this.#conversation;
    const isRunning = this.replies.isRunning(id);
    messages.forEach((message, i) => {
      const isLast = i === messages.length - 1;
      this.#viewOf(message).update(isLast && !isRunning, !(isLast && isRunning));
    });
    this.#tell(messages.at(-1));
    this.#showButton(isRunning);
    if (toEnd) this.#scrollToEnd();
  }

  #viewOf(message) {
    let view = this.#views.get(message);
    if (!view) {
      view = new MessageView(message, {
        regenerate: () => this.replies.regenerate(this.#conversation),
        retry: () => this.replies.retry(this.#conversation),
        fork: () => {
          this.store.fork(this.#shownId, this.#conversation.messages.indexOf(message) + 1);
          this.focus();
        },
      });
      this.#views.set(message, view);
    }
    return view;
  }

  // A whole answer is read aloud once; while it grows that would never end.
  #tell(last) {
    if (!last || last.role !== "assistant" || last === this.#told || this.#viewOf(last).isWriting) return;
    this.#told = last;
    this.status.textContent = last.state === "failed" ? "" : last.content; // an error is an alert of its own
  }

  #welcome() {
    return h("section", { class: "welcome" },
      h("h3", {}, "Say something, and watch the memory."),
      h("p", {}, "Every conversation has one contiguous range of virtual memory for its KV cache. Chunks are mapped behind it " +
        "as the answer grows, and what two conversations share is the same physical chunk, shown in the same colour."),
      h("div", { class: "suggestions" }, SUGGESTIONS.map((text) =>
        h("button", { type: "button", onclick: () => this.#send(text) }, text))));
  }

  #showNotice() {
    const full = this.store.isFull ? "This browser keeps no more conversations: delete some, or this one is lost with its tab." : null;
    const text = this.obstacle ?? full;
    this.notice.hidden = !text;
    if (this.notice.textContent !== (text ?? "")) this.notice.textContent = text ?? "";
  }

  #showButton(isRunning) {
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
    if (text.trim() === "" || !this.replies.send(this.#conversation, text.trim())) return;
    this.text.value = "";
    this.#fit();
    this.#scrollToEnd();
  }

  #fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, 200)}px`;
  }

  // Messages get their real height only once they are seen (content-visibility): the end moves away until all there are.
  #scrollToEnd() {
    const isUnderWay = this.#numSettling > 0;
    this.#numSettling = SETTLED_FRAMES;
    let height = 0;
    const step = () => {
      if (this.#numSettling === 0) return; // the reader has taken over
      this.log.scrollTop = this.log.scrollHeight;
      this.#numSettling = this.log.scrollHeight === height ? this.#numSettling - 1 : SETTLED_FRAMES;
      height = this.log.scrollHeight;
      if (this.#numSettling > 0) requestAnimationFrame(step);
    };
    if (isUnderWay) this.log.scrollTop = this.log.scrollHeight;
    else step();
  }

  #isNearEnd() {
    return this.#numSettling > 0 || this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < NEAR_END_PX;
  }
}

// Make these the children, moving only those that stand elsewhere.
function place(parent, elements) {
  elements.forEach((element, i) => {
    if (parent.children[i] !== element) parent.insertBefore(element, parent.children[i] ?? null);
  });
  while (parent.childElementCount > elements.length) parent.lastElementChild.remove();
}
