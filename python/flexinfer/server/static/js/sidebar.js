// Sidebar: the conversations, newest first; forks stand under the one they came from.
import { h, icon, iconButton, replaceChildren } from "./dom.js";
import { titleOf } from "./store.js";

export class Sidebar {
  constructor(element, store, replies, { openSettings, showChat }) {
    Object.assign(this, { element, store, replies, openSettings, showChat });
    store.addEventListener("change", () => {
      this.render();
      this.#markRunning();
    });
    replies.addEventListener("change", () => this.#markRunning());
    this.render();
  }

  create() {
    this.store.create();
    this.showChat();
  }

  render() {
    const { store } = this;
    // A button that is drawn anew between press and release of the pointer is not clicked.
    const shown = JSON.stringify([store.currentId, store.conversations.map(({ id, title, parentId }) => [id, title, parentId])]);
    if (shown === this.shown) return;
    this.shown = shown;
    const focused = this.#focused();
    replaceChildren(
      this.element,
      h("header", { class: "brand" },
        h("span", { class: "mark", "aria-hidden": "true" }, [0, 1, 2, 3, 4, 5].map(() => h("i"))),
        h("strong", {}, "FlexInfer")),
      h("button", { type: "button", class: "new", onclick: () => this.create() }, icon("plus"), "New conversation"),
      h("ul", { class: "conversations" }, inOrder(store.conversations).map(([item, depth]) => this.#item(item, depth))),
      h("footer", {}, h("button", { type: "button", class: "quiet", onclick: this.openSettings }, icon("settings"), "Settings")),
    );
    this.#markRunning();
    focused?.()?.focus();
  }

  // Finds the button again that has the focus now, after all are drawn anew.
  #focused() {
    const button = document.activeElement;
    if (!this.element.contains(button)) return null;
    const id = button.closest("li")?.dataset.id;
    const name = `.${button.classList[0]}`;
    return () => this.element.querySelector(id ? `li[data-id="${CSS.escape(id)}"] ${name}` : name) ?? this.element.querySelector(".new");
  }

  #item(conversation, depth) {
    const isCurrent = conversation.id === this.store.currentId;
    const title = titleOf(conversation);
    const select = () => {
      this.store.select(conversation.id);
      this.showChat();
    };
    return h("li", { class: isCurrent ? "current" : "", dataset: { id: conversation.id }, style: `--depth:${depth}` },
      h("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, onclick: select },
        depth > 0 ? icon("fork") : null, h("span", { class: "title" }, title)),
      iconButton("trash", `Delete “${title}”`, () => {
        this.replies.stop(conversation.id);
        this.store.remove(conversation.id);
      }));
  }

  #markRunning() {
    for (const item of this.element.querySelectorAll("li[data-id]")) {
      item.classList.toggle("running", this.replies.isRunning(item.dataset.id));
    }
  }
}

// [conversation, depth] with forks below their parents; a fork whose parent is gone is a root.
export function inOrder(conversations) {
  const ids = new Set(conversations.map(({ id }) => id));
  const children = Map.groupBy
    ? Map.groupBy(conversations, parentOf)
    : conversations.reduce((map, one) => map.set(parentOf(one), [...(map.get(parentOf(one)) ?? []), one]), new Map());
  const out = [];
  const visit = (parent, depth) => {
    for (const conversation of children.get(parent) ?? []) {
      out.push([conversation, depth]);
      visit(conversation.id, depth + 1);
    }
  };
  visit(null, 0);
  return out;

  function parentOf({ parentId }) {
    return ids.has(parentId) ? parentId : null;
  }
}
