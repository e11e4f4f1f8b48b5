// How to read the map: one sentence, and what each kind of square means. It can be folded away, and stays so.
import { formatBytes, h, replaceChildren } from "./dom.js";

const FOLDED = "flexinfer.guide.folded";
const KINDS = [
  ["own", "in this row only"],
  ["shared", "in several rows, kept once"],
  ["new", "just mapped"],
  ["copied", "was shared, copied to be written"],
  ["evicted", "taken back for others"],
  ["parked", "left mapped for the next request"],
  ["reserved", "addresses, no memory yet"],
];

// `onPoint(kind or null)`: the pointer rests on a kind.
export function guide(onPoint) {
  const what = h("p", {});
  const element = h("details", { class: "guide", open: !isFolded(), ontoggle: () => fold(!element.open) },
    h("summary", {}, "How to read this map"), what,
    h("ul", { class: "legend", "aria-label": "Legend" }, KINDS.map(([kind, note]) =>
      h("li", { onpointerenter: () => onPoint(kind), onpointerleave: () => onPoint(null) },
        h("i", { class: `chunk ${kind}`, "aria-hidden": "true" }), h("b", {}, kind), ` ${note}`))));
  let shown = "";
  const describe = (map) => {
    const key = [map.chunk_bytes, map.num_planes, map.row_tokens].join();
    if (key !== shown) replaceChildren(what, ...sentences(map));
    shown = key;
  };
  return { element, describe };
}

function sentences({ chunk_bytes: chunkBytes, num_planes: numPlanes, row_tokens: rowTokens }) {
  const planes = numPlanes > 1 ? `, one chunk in each of ${numPlanes} planes (groups of layers)` : "";
  return ["A row is one contiguous range of addresses. A square is the physical memory behind " +
    `${Number(rowTokens.toFixed(1))} of its tokens: ${formatBytes(chunkBytes * numPlanes)}${planes}. `,
    h("strong", {}, "Same colour, same memory.")];
}

function isFolded() {
  try {
    return localStorage.getItem(FOLDED) !== null;
  } catch {
    return false;
  }
}

function fold(folded) {
  try {
    if (folded) localStorage.setItem(FOLDED, "1");
    else localStorage.removeItem(FOLDED);
  } catch {
    // it is open the next time, too
  }
}
