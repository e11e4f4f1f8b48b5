// How to read the map: one sentence, and what each kind of square means. It is folded away until somebody asks, and stays
// as it was left.
import { formatBytes, formatCount, h } from "./dom.js";

const OPEN = "flexinfer.guide.open";
const KINDS = [
  ["own", "in this row only"],
  ["shared", "in several rows, kept once"],
  ["new", "just mapped"],
  ["copied", "was shared, copied to be written"],
  ["evicted", "taken back for others"],
  ["parked", "left mapped for the next request"],
  ["reserved", "addresses, no memory yet"],
  ["given-back", "a window has left it: addresses, no memory any more"],
];

// `onPoint(kind or null)`: the pointer rests on a kind. `more`: further figures.
export function guide(onPoint, more) {
  const what = h("p", {});
  const element = h("details", { class: "guide", open: isOpen(), ontoggle: () => keep(element.open) },
    h("summary", {}, h("strong", {}, "Same colour, same memory."), " How to read this map"), what,
    h("ul", { class: "legend", "aria-label": "Legend" }, KINDS.map(([kind, note]) =>
      h("li", { onpointerenter: () => onPoint(kind), onpointerleave: () => onPoint(null) },
        h("i", { class: `chunk ${kind}`, "aria-hidden": "true" }), h("b", {}, kind.replace("-", " ")), ` ${note}`))), more);
  const describe = (map) => {
    const text = sentence(map);
    if (what.textContent !== text) what.textContent = text;
  };
  return { element, describe };
}

function sentence({ chunk_bytes: chunkBytes, num_planes: numPlanes, row_tokens: rowTokens, groups = [] }) {
  const rowBytes = groups[0]?.row_bytes ?? chunkBytes * numPlanes;
  const planes = rowBytes > chunkBytes ? `, one chunk in each of ${rowBytes / chunkBytes} planes (groups of layers)` : "";
  return "A row is one contiguous range of addresses. A square is the physical memory behind " +
    `${Number(rowTokens.toFixed(1))} of its tokens: ${formatBytes(rowBytes)}${planes}.${windows(groups)}`;
}

function windows(groups) {
  if (groups.length < 2) return "";
  const parts = groups.map(({ window, num_layers: count }) =>
    `${formatCount(count, "layer")} ${count === 1 ? "keeps" : "keep"} ${window === null ? "all tokens" : `the last ${window}`}`);
  return ` Layers with a window have a row of their own: ${parts.join(", ")}.`;
}

function isOpen() {
  try {
    return localStorage.getItem(OPEN) !== null;
  } catch {
    return false;
  }
}

function keep(open) {
  try {
    if (open) localStorage.setItem(OPEN, "1");
    else localStorage.removeItem(OPEN);
  } catch {
    // it is folded the next time, too
  }
}
