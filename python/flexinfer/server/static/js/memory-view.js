// MemoryView: the live memory map. Every vTensor is a row of chunks; the same colour is the same physical memory.
import { formatBytes, formatCount, h, replaceChildren } from "./dom.js";
import { showDetail } from "./memory-detail.js";
import { guide } from "./memory-guide.js";
import { changesOf, chunksOf, rowsOf, sharing } from "./memory-model.js";
import { RowNames } from "./memory-names.js";
import { MemoryRows } from "./memory-rows.js";
import { arrange } from "./memory-tree.js";
import { ReplicaChoice } from "./replica-choice.js";

const FAST_MS = 200; // while something runs
const SLOW_MS = 1000;
const MAX_NEWS = 3;
const FIGURES = [
  ["saved", "Saved", "physical memory that the rows below would need more if they shared nothing"],
  ["shared", "Shared", "physical memory that stands in several of the rows below"],
  ["hits", "Cache hits", "prompt tokens whose KV was found, not computed, since the start"],
];
const MORE_FIGURES = [
  ["resident", "Resident", "physical memory"],
  ["mapped", "Mapped", "virtual addresses with memory behind them, of running requests"],
  ["reserved", "Reserved", "virtual addresses, no memory behind them yet"],
];

export class MemoryView {
  #last = null; // {rows, generations, stats} of the map that is drawn
  #selected = null; // {id, key, index}
  #timer = null;
  #isLooking = false; // one look at a time: an older map must not be drawn over a newer one
  #isAskedAgain = false;
  #namesOf = new Map(); // replica, or null -> RowNames

  // `onState({isOffline, isAsleep})` after each change of either.
  constructor(element, api, store, replies, { openSettings, onState }) {
    Object.assign(this, { element, api, store, replies, openSettings, onState });
    this.replica = new ReplicaChoice(api, () => this.refresh());
    this.figures = Object.fromEntries([...FIGURES, ...MORE_FIGURES].map(([name]) => [name, h("dd", {}, "–")]));
    this.bar = h("div", { class: "budget", role: "img", "aria-label": "Memory in use: not known yet" });
    this.barText = h("p", { class: "budget-text" });
    this.rowsView = new MemoryRows({
      labelOf: (row) => this.names.of(row),
      onSelect: (key, index) => this.#select(key, index),
      onClose: () => this.#close(),
    });
    const figures = (all) => h("dl", { class: "figures" }, all.map(([name, label, note]) =>
      h("div", { title: note, dataset: { figure: name } }, h("dt", {}, label), this.figures[name])));
    this.guide = guide((kind) => this.rowsView.point(kind), figures(MORE_FIGURES));
    this.detail = h("section", { class: "detail", "aria-label": "One chunk", "aria-live": "polite", hidden: true });
    this.ticker = h("ol", { class: "ticker", "aria-label": "What happened" });
    this.notice = h("p", { class: "notice", hidden: true });
    replaceChildren(
      element,
      h("header", { class: "bar" }, h("h2", {}, "Memory"), this.replica.element, h("span", { class: "activity" })),
      this.notice,
      figures(FIGURES), this.bar, this.barText, this.guide.element, this.rowsView.element, this.ticker, this.detail);
    replies.addEventListener("change", () => this.#soon());
    document.addEventListener("visibilitychange", () => this.refresh());
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
    if (this.#isLooking) {
      this.#isAskedAgain = true;
      return;
    }
    this.#isLooking = true;
    try {
      const map = await this.#look();
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
    const wait = document.hidden ? 10 * SLOW_MS : this.interval;
    this.#timer = setTimeout(() => this.#poll(), this.#isAskedAgain ? 0 : wait);
    this.#isLooking = this.#isAskedAgain = false;
  }

  async #look() {
    const { wanted } = this.replica;
    try {
      return await this.api.memory(wanted);
    } catch (error) {
      if (wanted === null || error.status !== 404) throw error;
      this.replica.forget();
      return this.api.memory();
    }
  }

  #tell({ isOffline, isAsleep, error }) {
    const state = [isOffline, isAsleep, error?.message].join();
    if (state === this.state) return;
    this.state = state;
    this.notice.hidden = !isAsleep && !error;
    replaceChildren(this.notice, ...this.#explain(isAsleep, error));
    this.onState({ isOffline, isAsleep });
  }

  #explain(isAsleep, error) {
    const button = (text, onclick) => h("button", { type: "button", class: "quiet", onclick }, text);
    if (isAsleep) {
      return ["The engine sleeps: its physical memory is given back, its addresses are kept. ", button("Wake it", () => this.#wake())];
    }
    if (error && !error.needsKey) return [error.message];
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
    if (this.replica.show(map)) {
      this.#last = null; // the difference to another replica's is no news
      this.#close();
    }
    this.names = this.#namesFor(map.replica ?? null);
    const generations = new Map(map.chunks.map(({ id, generation }) => [id, generation]));
    const found = rowsOf(map);
    this.names.learn(found, generations);
    const cached = arrange(found.filter(({ kind }) => kind === "cached"), map.row_tokens, (row) => this.names.isOwn(row));
    const rows = [...found.filter(({ kind }) => kind !== "cached"), ...cached] // each section picks its own
      .flatMap((row) => [row, ...row.lanes.map((lane) => ({ ...lane, depth: row.depth, isSmall: row.isSmall }))]);
    const chunks = chunksOf(rows);
    const now = { rows, generations, stats: map.stats };
    const changes = changesOf(this.#last, now);
    Object.assign(this, { map, rows, chunks });
    this.#showFigures(map);
    this.guide.describe(map);
    this.rowsView.show(rows, chunks, changes);
    this.#report(changes);
    this.#last = now;
    if (this.#selected !== null) this.#showDetail();
  }

  #namesFor(replica) {
    if (!this.#namesOf.has(replica)) this.#namesOf.set(replica, new RowNames(this.store, this.replies, replica));
    return this.#namesOf.get(replica);
  }

  #showFigures({ stats, engine }) {
    const bytes = { ...stats, ...sharing(this.chunks) };
    for (const name of Object.keys(this.figures)) {
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
    const text = `${formatBytes(used)} in use, ${formatBytes(stats.free_bytes)} kept ready, of ${formatBytes(stats.budget_bytes)}`;
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
    const id = this.rows.find((one) => one.key === key)?.chunks[index] ?? null;
    if (id === null) return;
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
    const holders = this.rows.filter((row) => chunk?.rows.includes(row.key)).map((row) => [this.names.of(row), row.kind]);
    const shown = JSON.stringify([id, index, holders, this.map.chunks.find((one) => one.id === id)]);
    if (shown === this.detail.dataset.shown) return; // or a screen reader would read it out at each poll
    this.detail.dataset.shown = shown;
    showDetail(this.detail, { id, index, map: this.map, holders, bytes: chunk?.bytes, isParked: !chunk, onClose: () => this.#close() });
  }
}
