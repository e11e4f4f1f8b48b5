// One chunk: what it holds, who shares it, and why it cannot be freed.
import { formatBytes, formatCount, h, iconButton, replaceChildren } from "./dom.js";

// `holders`: the rows that show the chunk, each with its label.
export function showDetail(element, { id, index, map, holders, bytes, isParked, onClose }) {
  const info = map.chunks.find((one) => one.id === id);
  const first = Math.round(index * map.row_tokens);
  const last = Math.round((index + 1) * map.row_tokens) - 1;
  const rowBytes = bytes ?? map.chunk_bytes * map.num_planes;
  const numPlanes = rowBytes / map.chunk_bytes;
  const planes = numPlanes > 1 ? ` in ${numPlanes} planes` : "";
  replaceChildren(element,
    h("header", {}, h("h3", {}, `Chunk ${id}`), iconButton("close", "Close the details", onClose)),
    h("p", {}, `${formatBytes(rowBytes)} of physical memory${planes}, tokens ${first} to ${last}.`),
    holders.length > 0 ? h("p", {}, holders.length > 1 ? `Shared by ${holders.length} rows:` : "In one row:") : null,
    h("ul", {}, holders.map(([label, kind]) => h("li", {}, h("b", {}, label), ` ${kind}`))),
    h("p", { class: "why" }, isParked ? "Left behind a slot that is parked: the next request may get it as it is." : whyKept(info)));
}

function whyKept(info) {
  if (!info) return "";
  if (info.pinned) return "A pinned prefix holds it: it is not evicted until the pin ends.";
  const sharers = info.sharers.length;
  if (sharers > 0) return `${formatCount(sharers, "running request")} ${sharers === 1 ? "maps" : "map"} it: it cannot be freed now.`;
  if (info.recorded) return "Only the prefix cache holds it: it is evicted when memory is short.";
  return "";
}
