// MemoryRows: the rows of the map and their squares. Only what has changed is drawn anew, and a map of thousands of chunks
// shows smaller squares, and only the first ones of long rows.
import { formatCount, h } from "./dom.js";
import { givenBack } from "./memory-model.js";

const GONE_MS = 1200; // how long an evicted chunk is still seen
const EVENT_MS = 900;
const GHOST_CHUNKS = 6; // at most, as far as the line goes: reserved addresses without memory behind them
const LARGE = 1200; // squares
const MAX_SQUARES = 6000;
const MIN_A_ROW = 16;
const MAX_DEPTH = 3; // of a tree of prefixes: labels go in no further
const MAX_PARKED = 48; // squares of a parked row: nobody reads them
const SECTIONS = [
  ["live", "Running", "requests that are being answered", "Nothing runs. Send a message."],
  ["cached", "Cached", "starts that the next request finds ready", ""],
  ["parked", "Parked", "slots of ended requests, still mapped", ""],
];

export class MemoryRows {
  #rows = new Map(); // row key -> {element, label, cells, more, signature}
  #sections = {};
  #shown = null;
  #selectedId = null;

  // `labelOf(row)`; `onSelect(row key, index)`; `onClose()`.
  constructor({ labelOf, onSelect, onClose }) {
    Object.assign(this, { labelOf, onSelect, onClose });
    this.element = h("div", {
      class: "grid", onkeydown: (event) => this.#onKey(event),
      onpointerover: (event) => this.#showTwins(event.target), onpointerleave: () => this.#showTwins(null),
    });
    for (const [kind, title, note, idle] of SECTIONS) {
      const count = h("span", { class: "count" });
      const rows = h("div", { class: "rows", role: "list", "aria-label": `${title}: ${note}` });
      const nothing = idle ? h("p", { class: "idle" }, idle) : null;
      const fold = h("button", { type: "button", class: "fold", hidden: true, "aria-expanded": "false", onclick: () => this.#unfold(kind) });
      const section = h("section", { class: "kind", hidden: !idle, dataset: { kind } },
        h("h3", {}, title, " ", count, h("small", {}, note)), nothing, rows, fold);
      this.#sections[kind] = { section, count, rows, nothing, fold, isOpen: false };
      this.element.append(section);
    }
  }

  #unfold(kind) {
    this.#sections[kind].isOpen = !this.#sections[kind].isOpen;
    this.show(...this.#shown);
  }

  show(rows, chunks, { events, gone }) {
    this.#shown = [rows, chunks, { events: new Map(), gone: new Map() }];
    const numSquares = rows.reduce((sum, row) => sum + row.chunks.length, 0);
    const limit = numSquares <= LARGE ? Infinity : Math.max(MIN_A_ROW, Math.floor(MAX_SQUARES / rows.length));
    this.element.classList.toggle("large", numSquares > LARGE);
    const kept = SECTIONS.flatMap(([kind]) => this.#showSection(kind, rows.filter((row) => row.kind === kind), chunks, events, limit));
    this.#removeOthers(new Set(kept), gone);
    if (!this.element.querySelector('[tabindex="0"]')) this.element.querySelector("button.chunk")?.setAttribute("tabindex", "0");
  }

  // Let only one kind of square stand out; null: all.
  point(kind) {
    if (kind === null) delete this.element.dataset.only;
    else this.element.dataset.only = kind;
  }

  mark(id) {
    this.#selectedId = id;
    for (const button of this.element.querySelectorAll("button.chunk")) {
      button.classList.toggle("selected", button.dataset.id === String(id));
    }
    this.element.classList.toggle("has-selection", id !== null);
  }

  #showSection(kind, rows, chunks, events, limit) {
    const { section, count, rows: parent, nothing, fold, isOpen } = this.#sections[kind];
    const folded = rows.filter((row) => row.isSmall || kind === "parked");
    if (nothing) nothing.hidden = rows.length > 0;
    else section.hidden = rows.length === 0;
    setText(count, rows.filter((row) => !row.isLane).length || "");
    fold.hidden = folded.length === 0;
    fold.setAttribute("aria-expanded", String(isOpen));
    setText(fold, isOpen ? "Show fewer" : foldedText(kind, folded.filter((row) => !row.isLane)));
    const shown = isOpen ? rows : rows.filter((row) => !folded.includes(row));
    const most = kind === "parked" ? Math.min(limit, MAX_PARKED) : limit;
    let anchor = null;
    for (const row of shown) {
      const entry = this.#rows.get(row.key) ?? this.#newRow(row);
      this.#fill(entry, row, chunks, events, most);
      const place = anchor === null ? parent.firstElementChild : anchor.nextElementSibling;
      if (place !== entry.element) parent.insertBefore(entry.element, place);
      anchor = entry.element;
    }
    return shown.map((row) => row.key);
  }

  #removeOthers(kept, gone) {
    for (const [key, entry] of this.#rows) {
      if (kept.has(key)) continue;
      this.#rows.delete(key);
      if (gone.has(key)) this.#leave(entry, gone.get(key).length);
      else entry.element.remove();
    }
    for (const [key, chunks] of gone) {
      const entry = this.#rows.get(key);
      if (entry) this.#showEvicted(entry, chunks.length);
    }
  }

  #newRow(row) {
    const name = h("b", {});
    const size = h("small", {});
    const cells = h("div", { class: "cells", role: "toolbar" });
    const more = h("span", { class: "more", hidden: true });
    const element = h("div", { class: "row", role: "listitem", dataset: { key: row.key } }, h("span", { class: "label" }, name, size), cells);
    cells.append(more);
    const entry = { element, name, size, cells, more, signature: null };
    this.#rows.set(row.key, entry);
    return entry;
  }

  #fill(entry, row, chunks, events, limit) {
    const { element, name, size, cells, more } = entry;
    const label = this.labelOf(row);
    setText(name, label);
    setText(size, sizeOf(row));
    element.style.setProperty("--depth", Math.min(row.depth ?? 0, MAX_DEPTH));
    const first = firstShown(row, limit);
    const shown = row.chunks.slice(first, first + limit);
    const eventOf = (i) => events.get(`${row.key}/${first + i}`);
    const signature = [label, limit, row.kind, row.depth, first, row.chunks.length, ...shown.map((id) => `${id}:${chunks.get(id)?.hue}`)].join();
    const hasEvent = shown.some((_, i) => eventOf(i));
    if (signature === entry.signature && !hasEvent && !entry.isFresh) return;
    entry.signature = signature;
    entry.isFresh = hasEvent; // once more, to take the marks away
    element.className = `row ${row.kind}${row.isLane ? " lane" : row.depth > 0 ? " branch" : ""}`;
    cells.setAttribute("aria-label", `Chunks of ${label}`);
    const squares = [...cells.querySelectorAll("button.chunk, i.given-back")];
    shown.forEach((id, i) => {
      const square = this.#squareFor(id, row, squares[i], cells, more);
      if (id === null) return;
      square.dataset.index = first + i;
      this.#paint(square, row, label, id, chunks.get(id), eventOf(i));
      if (isRecent(square)) entry.isFresh = true;
    });
    for (const square of squares.slice(shown.length)) square.remove();
    const numLeft = row.chunks.length - first - shown.length;
    more.hidden = numLeft === 0;
    more.textContent = numLeft > 0 ? `+ ${numLeft.toLocaleString("en")}` : "";
    this.#showReserved(cells, numLeft === 0 && row.kind === "live" && !row.isLane ? GHOST_CHUNKS : 0);
  }

  // The one that stands there already, if it is of the right kind; null: a place without memory.
  #squareFor(id, row, square, cells, more) {
    if (square && (square.localName === "i") === (id === null)) return square;
    const fresh = id === null
      ? h("i", { class: "chunk given-back", "aria-hidden": "true", title: "given back: the window has left it" })
      : this.#newSquare(row);
    if (square) square.replaceWith(fresh);
    else cells.insertBefore(fresh, more);
    return fresh;
  }

  #newSquare(row) {
    const button = h("button", {
      type: "button", tabindex: "-1",
      onclick: () => {
        this.#moveTo(button);
        this.onSelect(row.key, Number(button.dataset.index));
      },
    });
    return button;
  }

  #paint(button, row, label, id, chunk, event) {
    const hue = chunk?.hue ?? null;
    const kind = row.kind === "parked" ? "parked" : hue === null ? "own" : "shared";
    const holders = chunk?.rows.length ?? 0;
    const text = `${label}, chunk ${id}${holders > 1 ? `, in ${holders} rows` : ""}`;
    if (button.dataset.id !== String(id)) button.dataset.id = id;
    const marks = `${this.#selectedId === id ? " selected" : ""}${this.twinsOf === String(id) ? " twin" : ""}`;
    if (event || !isRecent(button)) setClass(button, `chunk ${kind}${event ? ` ${event}` : ""}${marks}`);
    if (event) button.dataset.until = String(performance.now() + EVENT_MS);
    if (button.dataset.hue !== String(hue)) {
      button.dataset.hue = String(hue);
      button.style.setProperty("--hue", hue ?? 0);
    }
    if (button.title !== text) {
      button.title = text;
      button.setAttribute("aria-label", text);
    }
  }

  // A row of which nothing is left: it is seen to go.
  #leave(entry, numChunks) {
    const { element, cells, more } = entry;
    element.classList.add("leaving");
    element.setAttribute("aria-hidden", "true");
    cells.replaceChildren(more);
    this.#showEvicted(entry, numChunks);
    setTimeout(() => element.remove(), GONE_MS);
  }

  #showEvicted({ cells, more }, numChunks) {
    for (let i = 0; i < Math.min(numChunks, MAX_PARKED); i += 1) {
      const chunk = h("i", { class: "chunk evicted", "aria-hidden": "true" });
      cells.insertBefore(chunk, more);
      setTimeout(() => chunk.remove(), GONE_MS);
    }
  }

  #showReserved(cells, wanted) {
    const ghosts = cells.querySelector(".ghosts");
    if (wanted === 0) ghosts?.remove();
    else if (!ghosts) cells.append(h("span", { class: "ghosts", "aria-hidden": "true" }, Array.from({ length: wanted }, () => h("i", { class: "chunk reserved" }))));
  }

  // The same chunk in the other rows.
  #showTwins(target) {
    const id = target?.closest?.("button.chunk")?.dataset.id;
    if (id === this.twinsOf) return;
    this.twinsOf = id;
    for (const button of this.element.querySelectorAll(".twin")) button.classList.remove("twin");
    if (id === undefined) return;
    for (const button of this.element.querySelectorAll(`button.chunk[data-id="${id}"]`)) button.classList.add("twin");
  }

  // ---- keyboard: one tab stop, arrows inside

  #moveTo(button) {
    for (const other of this.element.querySelectorAll('button[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    button.setAttribute("tabindex", "0");
  }

  #onKey(event) {
    const button = event.target.closest("button.chunk");
    if (!button) return;
    if (event.key === "Escape") {
      this.onClose();
      event.stopPropagation();
      return;
    }
    const target = this.#neighbour(button, event.key);
    if (!target) return;
    event.preventDefault();
    this.#moveTo(target);
    target.focus();
  }

  #neighbour(button, key) {
    const buttons = [...button.parentElement.querySelectorAll("button")];
    const index = buttons.indexOf(button);
    if (key === "ArrowRight") return buttons[index + 1];
    if (key === "ArrowLeft") return buttons[index - 1];
    if (key === "Home") return buttons[0];
    if (key === "End") return buttons.at(-1);
    const step = { ArrowDown: 1, ArrowUp: -1 }[key];
    if (!step) return undefined;
    const rows = [...this.element.querySelectorAll(".row:not(.leaving)")];
    const other = rows[rows.indexOf(button.closest(".row")) + step];
    const below = other ? [...other.querySelectorAll("button")] : [];
    return below[Math.min(index, below.length - 1)];
  }
}

// Of a row that is cut, what has memory is shown, and little of what was given back before it.
function firstShown(row, limit) {
  if (row.chunks.length <= limit) return 0;
  const numBack = row.chunks.findIndex((id) => id !== null);
  return Math.max(0, (numBack < 0 ? row.chunks.length : numBack) - MIN_A_ROW);
}

function sizeOf(row) {
  const numBack = givenBack(row);
  if (row.isLane) return `${formatCount(row.chunks.length - numBack, "square")}, ${numBack.toLocaleString("en")} given back`;
  if (row.kind === "parked") return formatCount(row.chunks.length, "chunk");
  const cached = row.kind === "live" && row.cachedTokens ? `, ${row.cachedTokens} from the cache` : "";
  const back = numBack > 0 ? `, ${numBack.toLocaleString("en")} squares given back` : "";
  return `${formatCount(row.tokens, "token")}${cached}${back}`;
}

function isRecent(button) {
  return Number(button.dataset.until ?? 0) > performance.now();
}

function foldedText(kind, folded) {
  if (kind === "parked") return `Show ${formatCount(folded.length, "slot")}`;
  return `${folded.length} more, ${formatCount(folded.reduce((sum, row) => sum + row.tokens - row.branch, 0), "token")}`;
}

function setText(element, text) {
  if (element.textContent !== String(text)) element.textContent = text;
}

function setClass(button, name) {
  if (button.className !== name) button.className = name;
}
