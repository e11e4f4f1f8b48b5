// MemoryView: the live memory map. Every vTensor is a row of chunks; the same colour is the same physical memory.
import { formatBytes, formatCount, h, iconButton, replaceChildren } from "./dom.js";
import { changesOf, chunksOf, overlap, rowsOf, sharing } from "./memory-model.js";
import { titleOf } from "./store.js";

const FAST_MS = 200; // while something runs
const SLOW_MS = 1000;
const GONE_MS = 1200; // how long an evicted chunk is still seen
const GHOST_CHUNKS = 6; // drawn after a live row: reserved addresses without memory behind them
const FIGURES = [
  ["reserved", "Reserved", "virtual addresses, no memory behind them yet"],
  ["mapped", "Mapped", "virtual addresses with memory behind them, of running requests"],
  ["resident", "Resident", "physical memory"],
  ["shared", "Shared", "physical memory that stands in several of the ranges below"],
  ["saved", "Saved", "physical memory that the ranges below would need more if they shared nothing"],
];

export class MemoryView {
  #last = null; // {rows, stats} of the map that is drawn
  #rowElements = new Map();
  #lastChunks = new Map(); // conversation id -> chunks of its newest live row
  #titles = new Map(); // row key -> conversation id
  #selected = null;
  #timer = null;

  constructor(element, api, store, replies, { openSettings }) {
    Object.assign(this, { element, api, store, replies });
    this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, h("dd", {}, "–")]));
    this.bar = h("div", { class: "budget", role: "img" });
    this.barText = h("p", { class: "budget-text" });
    this.grid = h("div", { class: "grid", role: "grid", "aria-label": "vTensors and their chunks", onkeydown: (e) => this.#onKey(e) });
    this.detail = h("section", { class: "detail", "aria-live": "polite", hidden: true });
    this.ticker = h("ol", { class: "ticker", "aria-label": "What happened" });
    this.notice = h("p", { class: "notice", hidden: true });
    this.openSettings = openSettings;
    replaceChildren(
      element,
      h("header", { class: "bar" }, h("h2", {}, "Memory"), h("span", { class: "activity" })),
      this.notice,
      h("dl", { class: "figures" }, FIGURES.map(([name, label, note]) =>
        h("div", { title: note, dataset: { figure: name } }, h("dt", {}, label), this.figures[name]))),
      this.bar, this.barText, this.grid, this.detail,
      h("ul", { class: "legend", "aria-label": "Legend" },
        ["own", "shared", "new", "copied", "parked", "evicted", "reserved"].map((name) => h("li", {}, h("i", { class: `chunk ${name}` }), name))),
      h("h3", {}, "Just now"), this.ticker);
    replies.addEventListener("change", () => this.#soon());
    document.addEventListener("visibilitychange", () => this.#soon());
  }

  start() {
    this.#poll();
  }

  // Ask again at once, as after a change of keys.
  async refresh() {
    clearTimeout(this.#timer);
    await this.#poll();
  }

  #soon() {
    if (this.replies.count > 0 ? this.interval !== FAST_MS : this.interval === FAST_MS) this.refresh();
  }

  async #poll() {
    try {
      const map = await this.api.memory();
      this.notice.hidden = true;
      if (map !== null) this.#show(map);
    } catch (error) {
      this.#explain(error);
    }
    this.interval = this.replies.count > 0 ? FAST_MS : SLOW_MS;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), document.hidden ? 10 * SLOW_MS : this.interval);
  }

  #explain(error) {
    const isOffline = error.status === 0;
    const text = isOffline ? error.message : `The memory map is not open to this page: ${error.message}`;
    if (!this.notice.hidden && this.notice.dataset.text === text) return;
    this.notice.dataset.text = text;
    this.notice.hidden = false;
    replaceChildren(this.notice, text, " ",
      isOffline ? null : h("button", { type: "button", class: "quiet", onclick: () => this.openSettings("admin-key") }, "Enter the admin key"));
  }

  #show(map) {
    const rows = rowsOf(map);
    const chunks = chunksOf(rows);
    const changes = changesOf(this.#last, rows, map.stats);
    this.map = map;
    this.rows = rows;
    this.chunks = chunks;
    this.#name(rows);
    this.#showFigures(map);
    this.#showRows(rows, chunks, changes);
    this.#report(changes);
    this.#last = { rows, stats: map.stats };
    if (this.#selected !== null) this.#showDetail();
  }

  // Which conversation a row belongs to: by request id while it is live, afterwards by its chunks.
  #name(rows) {
    this.#titles.clear();
    for (const row of rows.filter((one) => one.kind === "live")) {
      const id = this.replies.conversationOf(row.requestId);
      if (id === null) continue;
      this.#titles.set(row.key, id);
      this.#lastChunks.set(id, row.chunks);
    }
    const cached = rows.filter((one) => one.kind === "cached");
    const finished = this.replies.takeFinishedAlone();
    if (finished !== null && cached.length > 0) {
      const newest = cached.reduce((a, b) => (b.lastUsed > a.lastUsed ? b : a));
      this.#lastChunks.set(finished, newest.chunks);
    }
    for (const row of cached) {
      let best = null;
      let most = row.chunks.length / 2; // another conversation's if less than half is the same
      for (const [id, chunks] of this.#lastChunks) {
        const common = overlap(chunks, row.chunks);
        if (common > most) [best, most] = [id, common];
      }
      if (best !== null) this.#titles.set(row.key, best);
    }
  }

  #label(row) {
    const conversation = this.store.find(this.#titles.get(row.key));
    if (conversation) return titleOf(conversation);
    if (row.kind === "parked") return `slot ${row.key.slice(1)}`;
    if (row.kind === "cached") return "prefix";
    return row.requestId ? row.requestId.slice(-8) : `vTensor ${row.key.slice(1)}`;
  }

  #showFigures({ stats, engine }) {
    const bytes = { ...stats, ...sharing(this.chunks, this.map.chunk_bytes * this.map.num_planes) };
    for (const [name] of FIGURES) this.figures[name].textContent = formatBytes(bytes[`${name}_bytes`]);
    this.element.querySelector(".activity").textContent = engine.is_sleeping
      ? "asleep"
      : `${engine.num_running} running · ${engine.num_waiting} waiting`;
    const used = stats.resident_bytes - stats.free_bytes;
    const parts = [["used", used], ["free", stats.free_bytes]];
    const scale = stats.resident_bytes / stats.budget_bytes > 0.02 ? stats.budget_bytes : stats.resident_bytes * 4 || 1;
    this.bar.replaceChildren(...parts.map(([kind, bytes]) =>
      h("span", { class: kind, style: `width:${Math.min(100, (100 * bytes) / scale)}%` })));
    const text = `${formatBytes(used)} in use, ${formatBytes(stats.free_bytes)} kept ready, of a budget of ${formatBytes(stats.budget_bytes)}`;
    this.bar.setAttribute("aria-label", text);
    const hits = stats.prefix_query_tokens ? Math.round((100 * stats.prefix_hit_tokens) / stats.prefix_query_tokens) : 0;
    this.barText.textContent = `${text} · ${hits} % of prompt tokens came from the cache`;
  }

  #showRows(rows, chunks, { events, gone }) {
    const kept = new Set();
    let anchor = null;
    for (const row of rows) {
      kept.add(row.key);
      const entry = this.#rowElements.get(row.key) ?? this.#newRow(row);
      this.#fill(entry, row, chunks, events);
      const place = anchor === null ? this.grid.firstElementChild : anchor.nextElementSibling;
      if (place !== entry.element) this.grid.insertBefore(entry.element, place);
      anchor = entry.element;
    }
    for (const [key, entry] of this.#rowElements) {
      if (kept.has(key)) continue;
      this.#rowElements.delete(key);
      if (gone.has(key)) this.#leave(entry, gone.get(key).length);
      else entry.element.remove();
    }
    for (const [key, chunks] of gone) {
      const entry = this.#rowElements.get(key);
      if (entry) this.#showEvicted(entry.cells, chunks.length);
    }
    this.grid.classList.toggle("empty", rows.length === 0);
    if (!this.grid.querySelector('[tabindex="0"]')) this.grid.querySelector("button.chunk")?.setAttribute("tabindex", "0");
  }

  #newRow(row) {
    const label = h("span", { class: "label", role: "rowheader" });
    const cells = h("div", { class: "cells", role: "presentation" });
    const entry = { element: h("div", { class: "row", role: "row", dataset: { key: row.key } }, label, cells), label, cells };
    this.#rowElements.set(row.key, entry);
    return entry;
  }

  #fill({ element, label, cells }, row, chunks, events) {
    element.className = `row ${row.kind}`;
    const size = row.tokens ? `${row.tokens} tokens` : row.state;
    replaceChildren(label, h("b", {}, this.#label(row)), h("small", {}, row.kind === "cached" ? `cached · ${size}` : size));
    const buttons = [...cells.querySelectorAll("button")];
    row.chunks.forEach((id, i) => {
      let button = buttons[i];
      if (!button) {
        button = h("button", { type: "button", role: "gridcell", tabindex: "-1", onclick: () => this.#select(row.key, i, button) });
        cells.insertBefore(button, cells.querySelector(".reserved"));
      }
      this.#paint(button, row, id, i, chunks.get(id), events.get(`${row.key}/${i}`));
    });
    for (const button of buttons.slice(row.chunks.length)) button.remove();
    this.#showReserved(cells, row);
  }

  // A row of which nothing is left: it is seen to go.
  #leave({ element, cells }, numChunks) {
    element.classList.add("leaving");
    element.setAttribute("aria-hidden", "true");
    cells.replaceChildren();
    this.#showEvicted(cells, numChunks);
    setTimeout(() => element.remove(), GONE_MS);
  }

  #showEvicted(cells, numChunks) {
    for (let i = 0; i < numChunks; i += 1) {
      const chunk = h("i", { class: "chunk evicted", "aria-hidden": "true" });
      cells.append(chunk);
      setTimeout(() => chunk.remove(), GONE_MS);
    }
  }

  #showReserved(cells, row) {
    const wanted = row.kind === "live" ? GHOST_CHUNKS : 0;
    const ghosts = cells.querySelectorAll(".reserved");
    for (let i = ghosts.length; i < wanted; i += 1) cells.append(h("i", { class: "chunk reserved", "aria-hidden": "true" }));
    for (const ghost of [...ghosts].slice(wanted)) ghost.remove();
  }

  #paint(button, row, id, i, chunk, event) {
    const hue = chunk?.hue ?? null;
    const kind = row.kind === "parked" ? "parked" : hue === null ? "own" : "shared";
    const isSelected = this.#selected?.id === id;
    const name = `chunk ${kind}${event ? ` ${event}` : ""}${isSelected ? " selected" : ""}`;
    const holders = chunk?.rows.length ?? 0;
    const text = `chunk ${id}${holders > 1 ? `, in ${holders} ranges` : ""}`;
    if (button.dataset.id !== String(id)) button.dataset.id = id;
    if (event || !isRecent(button)) setClass(button, name);
    if (event) button.dataset.until = String(performance.now() + 900);
    if (button.dataset.hue !== String(hue)) {
      button.dataset.hue = String(hue);
      button.style.setProperty("--hue", hue ?? 0);
    }
    if (button.title !== text) {
      button.title = text;
      button.setAttribute("aria-label", `${this.#label(row)}, ${text}`);
    }
  }

  #report({ mapped, shared, copied, evicted }) {
    const parts = [
      [mapped, "mapped"], [shared, "shared instead of computed"], [copied, "copied to be written"], [evicted, "evicted"],
    ].filter(([count]) => count > 0).map(([count, text]) => `${formatCount(count, "chunk")} ${text}`);
    if (parts.length === 0) return;
    const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
    this.ticker.prepend(h("li", {}, h("time", {}, time), parts.join(", ")));
    while (this.ticker.children.length > 6) this.ticker.lastElementChild.remove();
  }

  // ---- one chunk

  #select(key, index, button) {
    const row = this.rows.find((one) => one.key === key);
    const id = row?.chunks[index];
    if (id === undefined) return;
    this.#moveTo(button);
    this.#selected = this.#selected?.id === id ? null : { id, key, index };
    this.#mark();
    this.#showDetail();
  }

  #mark() {
    for (const button of this.grid.querySelectorAll("button.chunk")) {
      button.classList.toggle("selected", button.dataset.id === String(this.#selected?.id));
    }
    this.grid.classList.toggle("has-selection", this.#selected !== null);
  }

  #close() {
    this.#selected = null;
    this.#mark();
    this.#showDetail();
  }

  #showDetail() {
    const chunk = this.#selected && this.chunks.get(this.#selected.id);
    const isParked = this.#selected && !chunk;
    this.detail.hidden = this.#selected === null;
    if (this.#selected === null) return;
    const { id, index } = this.#selected;
    const info = this.map.chunks.find((one) => one.id === id);
    const holders = this.rows.filter((row) => chunk?.rows.includes(row.key));
    const first = Math.round(index * this.map.row_tokens);
    const last = Math.round((index + 1) * this.map.row_tokens) - 1;
    replaceChildren(this.detail,
      h("header", {}, h("h3", {}, `Chunk ${id}`), iconButton("close", "Close the details", () => this.#close())),
      h("p", {}, `${formatBytes(this.map.chunk_bytes * this.map.num_planes)} of physical memory, tokens ${first} to ${last}.`),
      holders.length > 0 ? h("p", {}, holders.length > 1 ? `Shared by ${holders.length} ranges:` : "In one range:") : null,
      h("ul", {}, holders.map((row) => h("li", {}, h("b", {}, this.#label(row)), ` ${row.kind}`))),
      h("p", { class: "why" }, isParked ? "Left behind a slot that is parked: the next request may get it as it is." : whyKept(info)));
  }

  // ---- keyboard: one tab stop, arrows inside

  #moveTo(button) {
    for (const other of this.grid.querySelectorAll('button[tabindex="0"]')) other.setAttribute("tabindex", "-1");
    button.setAttribute("tabindex", "0");
  }

  #onKey(event) {
    const button = event.target.closest("button.chunk");
    if (!button) return;
    if (event.key === "Escape") {
      this.#close();
      event.stopPropagation();
      return;
    }
    const target = neighbour(button, event.key);
    if (!target) return;
    event.preventDefault();
    this.#moveTo(target);
    target.focus();
  }
}

function neighbour(button, key) {
  const buttons = [...button.parentElement.querySelectorAll("button")];
  const index = buttons.indexOf(button);
  if (key === "ArrowRight") return buttons[index + 1];
  if (key === "ArrowLeft") return buttons[index - 1];
  if (key === "Home") return buttons[0];
  if (key === "End") return buttons.at(-1);
  const row = button.closest(".row");
  const other = key === "ArrowDown" ? row.nextElementSibling : key === "ArrowUp" ? row.previousElementSibling : null;
  const below = other ? [...other.querySelectorAll("button")] : [];
  return below[Math.min(index, below.length - 1)];
}

function isRecent(button) {
  return Number(button.dataset.until ?? 0) > performance.now();
}

function setClass(button, name) {
  if (button.className !== name) button.className = name;
}

function whyKept(info) {
  if (!info) return "";
  if (info.pinned) return "A pinned prefix holds it: it is not evicted until the pin ends.";
  const sharers = info.sharers.length;
  if (sharers > 0) return `${formatCount(sharers, "running request")} ${sharers === 1 ? "maps" : "map"} it: it can not be freed now.`;
  if (info.recorded) return "Only the prefix cache holds it: it is evicted when memory is short.";
  return "";
}

