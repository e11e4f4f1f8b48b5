// Recorded prefixes as a tree: which row goes on from which, in what order they stand, and which are folded away.

const MAX_OTHERS = 8; // rows that are shown beside those of this browser's conversations
const NAME_CHARS = 24; // a shorter start goes on with what follows it

// Rows of kind "cached" with `path`, their nodes from the root: sorted, and each gets `above` (the row with which it shares
// the most, if that is a whole square at least, or null), `depth` (how often that is so), `branch` (the tokens that the
// two have in common), `text` (its first words of its own) and `isSmall`: folded away. First those of the reader's own
// conversations, the last used on top; then the others, the largest on top.
export function arrange(rows, rowTokens, isOwn) {
  const ranked = rows.map((row) => ({ row, own: isOwn(row) })).sort((a, b) => b.own - a.own
    || (a.own ? b.row.lastUsed - a.row.lastUsed : b.row.chunks.length - a.row.chunks.length || b.row.lastUsed - a.row.lastUsed));
  const ownerOf = new Map(); // node -> the first row that goes through it
  const below = new Map([[null, []]]); // row -> those that leave it
  let numOthers = 0;
  for (const { row, own } of ranked) {
    const taken = row.path.findLastIndex((node) => ownerOf.has(node));
    for (const node of row.path.slice(taken + 1)) ownerOf.set(node, row);
    const shared = row.path[taken + 1].start_tokens;
    const above = shared < rowTokens ? null : ownerOf.get(row.path[taken]);
    Object.assign(row, { above, depth: above ? above.depth + 1 : 0, branch: above ? shared : 0 });
    row.text = wordsOf(above ? row.path.slice(taken + 1) : row.path);
    row.isSmall = !own && (numOthers += 1) > MAX_OTHERS;
    below.get(above).push(row);
    below.set(row, []);
  }
  tellApart(below.get(null));
  const inOrder = (row) => [row, ...below.get(row).sort((a, b) => b.branch - a.branch).flatMap(inOrder)];
  return below.get(null).flatMap(inOrder);
}

// Rows that begin alike, though for less than a square, as under one system prompt: called after where they part.
function tellApart(rows) {
  const alike = new Map();
  for (const row of rows) alike.set(row.text, [...(alike.get(row.text) ?? []), row]);
  for (const [text, found] of alike) {
    if (text === "" || found.length < 2) continue;
    const isCommon = (_, i) => found.every(({ path }) => path[i] === found[0].path[i]);
    const parting = found[0].path.findIndex((...place) => !isCommon(...place));
    for (const row of found) {
      const rest = parting < 0 ? "" : wordsOf(row.path.slice(parting));
      if (rest) row.text = `… ${rest}`;
    }
  }
}

function wordsOf(nodes) {
  let words = "";
  for (const { text } of nodes) {
    if (words.length < NAME_CHARS) words += text;
  }
  return words.trim();
}
