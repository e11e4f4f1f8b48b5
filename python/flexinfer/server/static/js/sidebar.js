// Sidebar: the conversations, newest first; forks stand under the one they came from.
import { h, icon, iconButton, replaceChildren } from "./dom.js";
import { titleOf } from "./store.js";

export class Sidebar {
  #renamed = null; // id of the conversation whose title is being written

  constructor(element, store, replies, { openSettings, showChat }) {
    Object.assign(this, { element, store, replies, showChat });
    this.search = h("input", {
      type: "search", placeholder: "Search", "aria-label": "Search conversations", oninput: () => this.render(),
      onkeydown: (event) => {
        if (event.key !== "Escape" || this.search.value === "") return;
        event.stopPropagation(); // it would stop an answer
        this.search.value = "";
        this.render();
      },
    });
    this.list = h("ul", { class: "conversations" });
    this.nothing = h("p", { class: "nothing", role: "status" });
    replaceChildren(
      element,
      h("header", { class: "brand" },
        h("span", { class: "mark", "aria-hidden": "true" }, [0, 1, 2, 3, 4, 5].map(() => h("i"))),
        h("strong", {}, "FlexInfer")),
      h("button", { type: "button", class: "new", onclick: () => this.create() }, icon("plus"), "New conversation"),
      h("label", { class: "search" }, icon("search"), this.search), this.nothing, this.list,
      h("footer", {}, h("button", { type: "button", class: "quiet open-settings", onclick: openSettings }, icon("settings"), "Settings")));
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
    const found = this.#found();
    // A button that is drawn anew between press and release of the pointer is not clicked.
    const shown = JSON.stringify([store.currentId, this.#renamed, found.map(([{ id, title }, depth]) => [id, title, depth])]);
    if (shown === this.shown) return;
    this.shown = shown;
    const focused = this.#focused();
    this.nothing.textContent = found.length === 0 ? "No conversation has these words." : "";
    this.nothing.hidden = found.length > 0;
    replaceChildren(this.list, found.map(([item, depth]) => this.#item(item, depth)));
    this.#markRunning();
    focused?.()?.focus();
  }

  // [conversation, depth] of those in which the words that are looked for were said; all, as a tree, if none are.
  #found() {
    const wanted = this.search.value.trim().toLowerCase();
    if (wanted === "") return inOrder(this.store.conversations);
    const says = ({ title, messages }) => [title, ...messages.map(({ content }) => content)].some((text) => text.toLowerCase().includes(wanted));
    return this.store.conversations.filter(says).map((one) => [one, 0]);
  }

  // Finds the button again that has the focus now, after all are drawn anew.
  #focused() {
    const button = document.activeElement;
    if (!this.list.contains(button)) return null;
    const id = button.closest("li").dataset.id;
    const name = `.${button.classList[0]}`;
    return () => {
      const item = this.list.querySelector(`li[data-id="${CSS.escape(id)}"]`);
      return item ? item.querySelector(name) ?? item.querySelector(".open") : this.element.querySelector(".new");
    };
  }

  #item(conversation, depth) {
    const isCurrent = conversation.id === this.store.currentId;
    const title = titleOf(conversation);
    const select = () => {
      this.store.select(conversation.id);
      this.showChat();
    };
    const rename = () => this.#rename(conversation);
    const onkeydown = (event) => {
      if (event.key === "F2") rename();
    };
    const item = (...children) => h("li", { class: isCurrent ? "current" : "", dataset: { id: conversation.id }, style: `--depth:${depth}` }, children);
    if (this.#renamed === conversation.id) return item(this.#titleField(conversation));
    return item(
      h("button", { type: "button", class: "open", "aria-current": isCurrent ? "true" : null, onclick: select, ondblclick: rename, onkeydown },
        depth > 0 ? icon("fork") : null, h("span", { class: "title" }, title)),
      h("span", { class: "tools" },
        iconButton("rename", `Rename “${title}”`, rename),
        iconButton("trash", `Delete “${title}”`, () => {
          this.replies.stop(conversation.id);
          this.store.remove(conversation.id);
        })));
  }

  #rename({ id }) {
    this.#renamed = id;
    this.render();
    this.list.querySelector(".rename")?.select();
  }

  // Enter or leaving it keeps the title, Escape does not.
  #titleField(conversation) {
    const end = (title) => {
      if (this.#renamed !== conversation.id) return;
      this.#renamed = null;
      if (title) Object.assign(conversation, { title, isNewFork: false });
      this.store.changed(title ? conversation : null);
    };
    const field = h("input", {
      class: "rename", maxlength: "80", "aria-label": "Title", value: titleOf(conversation), onblur: () => end(field.value.trim()),
      onkeydown: (event) => {
        if (event.key !== "Enter" && event.key !== "Escape") return;
        event.stopPropagation();
        end(event.key === "Enter" ? field.value.trim() : "");
      },
    });
    return field;
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
