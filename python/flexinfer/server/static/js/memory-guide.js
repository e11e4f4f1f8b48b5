// How to read the map: one sentence, and what each kind of square means. It is folded away until somebody asks, and stays
// as it was left.
import { formatBytes, h } from "./dom.js";

const OPEN = "flexinfer.guide.open";
const KINDS = [
  ["own", "in this row only"],
  ["shared", "in several rows, kept once"],
  ["new", "just mapped"],
  ["copied", "was shared, copied to be written"],
  ["evicted", "taken back for others"],
  ["parked", "left mapped for the next request"],
  ["reserved", "addresses, no memory yet"],
];

// `onPoint(kind or null)`: the pointer rests on a kind. `more`: further figures.
export function guide(onPoint, more) {
  const what = h("p", {});
  const element = h("details", { class: "guide", open: isOpen(), ontoggle: () => keep(element.open) },
    h("summary", {}, h("strong", {}, "Same colour, same memory."), " How to read this map"), what,
    h("ul", { class: "legend", "aria-label": "Legend" }, KINDS.map(([kind, note]) =>
      h("li", { onpointerenter: () => onPoint(kind), onpointerleave: () => onPoint(null) },
        h("i", { class: `chunk ${kind}`, "aria-hidden": "true" }), h("b", {}, kind), ` ${note}`))), more);
  const describe = (map) => {
    const text = sentence(map);
    if (what.textContent !== text) what.textContent = text;
  };
  return { element, describe };
}

function sentence({ chunk_bytes: chunkBytes, num_planes: numPlanes, row_tokens: rowTokens }) {
  const planes = numPlanes > 1 ? `, one chunk in each of ${numPlanes} planes (groups of layers)` : "";
  return "A row is one contiguous range of addresses. A square is the physical memory behind " +
    `${Number(rowTokens.toFixed(1))} of its tokens: ${formatBytes(chunkBytes * numPlanes)}${planes}.`;
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
