// MemoryView: the live memory map. Every vTensor is a row of chunks; the same colour is the same physical memory.
import { formatBytes, formatCount, h, replaceChildren } from "./dom.js";
import { showDetail } from "./memory-detail.js";
import { guide } from "./memory-guide.js";
import { changesOf, chunksOf, overlap, rowsOf, sharing } from "./memory-model.js";
import { MemoryRows } from "./memory-rows.js";
import { titleOf } from "./store.js";

const FAST_MS = 200; // while something runs
const SLOW_MS = 1000;
const MAX_NEWS = 6;
const FIGURES = [
  ["saved", "Saved", "physical memory that the rows below would need more if they shared nothing"],
  ["shared", "Shared", "physical memory that stands in several of the rows below"],
  ["hits", "Cache hits", "prompt tokens whose KV was found, not computed, since the start"],
  ["resident", "Resident", "physical memory"],
  ["mapped", "Mapped", "virtual addresses with memory behind them, of running requests"],
  ["reserved", "Reserved", "virtual addresses, no memory behind them yet"],
];

export class MemoryView {
  #last = null; // {rows, stats} of the map that is drawn
  #lastChunks = new Map(); // conversation id -> chunks of its newest live row
  #titles = new Map(); // row key -> conversation id
  #selected = null; // {id, key, index}
  #timer = null;

  // `onState({isOffline, isAsleep})` after each change of either.
  constructor(element, api, store, replies, { openSettings, onState }) {
    Object.assign(this, { element, api, store, replies, openSettings, onState });
    this.figures = Object.fromEntries(FIGURES.map(([name]) => [name, h("dd", {}, "–")]));
    this.bar = h("div", { class: "budget", role: "img", "aria-label": "Memory in use: not known yet" });
    this.barText = h("p", { class: "budget-text" });
    this.rowsView = new MemoryRows({
      labelOf: (row) => this.#label(row),
      onSelect: (key, index) => this.#select(key, index),
      onClose: () => this.#close(),
    });
    this.guide = guide((kind) => this.rowsView.point(kind));
    this.detail = h("section", { class: "detail", "aria-label": "One chunk", "aria-live": "polite", hidden: true });
    this.ticker = h("ol", { class: "ticker", "aria-label": "What happened" });
    this.notice = h("p", { class: "notice", hidden: true });
    replaceChildren(
      element,
      h("header", { class: "bar" }, h("h2", {}, "Memory"), h("span", { class: "activity" })),
      this.notice,
      h("dl", { class: "figures" }, FIGURES.map(([name, label, note]) =>
        h("div", { title: note, dataset: { figure: name } }, h("dt", {}, label), this.figures[name]))),
      this.bar, this.barText, this.guide.element, this.rowsView.element,
      h("h3", { class: "news" }, "Just now"), this.ticker, this.detail);
    replies.addEventListener("change", () => this.#soon());
    document.addEventListener("visibilitychange", () => this.#soon());
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
      if (map !== null) {
        this.#show(map);
        this.isAsleep = map.engine.is_sleeping;
      }
      this.#tell({ isOffline: false, isAsleep: this.isAsleep });
    } catch (error) {
      this.#tell({ isOffline: error.status === 0, isAsleep: false, error });
      this.#last = null; // what happens meanwhile is no news
    }
    this.interval = this.replies.count > 0 ? FAST_MS : SLOW_MS;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#poll(), document.hidden ? 10 * SLOW_MS : this.interval);
  }

  #tell({ isOffline, isAsleep, error }) {
    const state = [isOffline, isAsleep, error?.message].join();
    if (state === this.state) return;
    this.state = state;
    this.notice.hidden = !isAsleep && !error;
    replaceChildren(this.notice, ...this.#explain(isOffline, isAsleep, error));
    this.onState({ isOffline, isAsleep });
  }

  #explain(isOffline, isAsleep, error) {
    const button = (text, onclick) => h("button", { type: "button", class: "quiet", onclick }, text);
    if (isAsleep) {
      return ["The engine sleeps: its physical memory is given back, its addresses are kept. ", button("Wake it", () => this.#wake())];
    }
    if (isOffline) return [error.message];
    return error ? [`The memory map is not open to this page: ${error.message} `, button("Enter the admin key", () => this.openSettings("admin-key"))] : [];
  }

  async #wake() {
    try {
      await this.api.wake();
    } catch (error) {
      this.notice.append(` ${error.message}`);
    }
    this.refresh();
  }

  #show(map) {
    const rows = rowsOf(map);
    const chunks = chunksOf(rows);
    const changes = changesOf(this.#last, rows, map.stats);
    Object.assign(this, { map, rows, chunks });
    this.#name(rows);
    this.#showFigures(map);
    this.guide.describe(map);
    this.rowsView.show(rows, chunks, changes);
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
    for (const [name] of FIGURES) {
      if (name !== "hits") this.figures[name].textContent = formatBytes(bytes[`${name}_bytes`]);
    }
    const hits = stats.prefix_query_tokens ? Math.round((100 * stats.prefix_hit_tokens) / stats.prefix_query_tokens) : 0;
    this.figures.hits.textContent = `${hits} %`;
    this.element.querySelector(".activity").textContent = engine.is_sleeping
      ? "asleep"
      : `${engine.num_running} running · ${engine.num_waiting} waiting`;
    const used = stats.resident_bytes - stats.free_bytes;
    const parts = [["used", used], ["free", stats.free_bytes]];
    const scale = stats.resident_bytes / stats.budget_bytes > 0.02 ? stats.budget_bytes : stats.resident_bytes * 4 || 1;
    this.bar.replaceChildren(...parts.map(([kind, size]) =>
      h("span", { class: kind, style: `width:${Math.min(100, (100 * size) / scale)}%` })));
    const text = `${formatBytes(used)} in use, ${formatBytes(stats.free_bytes)} kept ready, of a budget of ${formatBytes(stats.budget_bytes)}`;
    this.bar.setAttribute("aria-label", text);
    this.barText.textContent = text;
  }

  #report({ mapped, shared, copied, evicted }) {
    const parts = [
      [mapped, "mapped"], [shared, "shared instead of computed"], [copied, "copied to be written"], [evicted, "evicted"],
    ].filter(([count]) => count > 0).map(([count, text]) => `${formatCount(count, "chunk")} ${text}`);
    if (parts.length === 0) return;
    const time = new Date().toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
    this.ticker.prepend(h("li", {}, h("time", {}, time), parts.join(", ")));
    while (this.ticker.children.length > MAX_NEWS) this.ticker.lastElementChild.remove();
  }

  #select(key, index) {
    const id = this.rows.find((one) => one.key === key)?.chunks[index];
    if (id === undefined) return;
    this.#selected = this.#selected?.id === id ? null : { id, key, index };
    this.#showSelection();
  }

  #close() {
    this.#selected = null;
    this.#showSelection();
  }

  #showSelection() {
    this.rowsView.mark(this.#selected?.id ?? null);
    this.#showDetail();
  }

  #showDetail() {
    this.detail.hidden = this.#selected === null;
    if (this.#selected === null) return;
    const { id, index } = this.#selected;
    const chunk = this.chunks.get(id);
    const holders = this.rows.filter((row) => chunk?.rows.includes(row.key)).map((row) => [this.#label(row), row.kind]);
    const shown = JSON.stringify([id, index, holders, this.map.chunks.find((one) => one.id === id)]);
    if (shown === this.detail.dataset.shown) return; // or a screen reader would read it out at each poll
    this.detail.dataset.shown = shown;
    showDetail(this.detail, { id, index, map: this.map, holders, isParked: !chunk, onClose: () => this.#close() });
  }
}
