// What the memory map shows, from the server's JSON (docs/server.md), without any drawing.
//
// A row is a contiguous range of virtual addresses: of a live vTensor, of a parked slot, or, for what only the prefix
// cache holds, the range that a request with this prefix would get. A row lists physical chunks in the order
// of its tokens; a chunk that stands in several rows is shared, and chunks shared by the same rows have one colour.
// Where layers have windows, a row is that of the layers that keep most, and has `lanes`: a row for each window, with
// null where the window has left a place and its memory was given back.

const GOLDEN_ANGLE = 137.508;

// [{key, kind, chunks, lanes, ...}] of one map. kind: "live", "parked", "cached".
export function rowsOf(map) {
  const rows = [];
  for (const vtensor of map.vtensors) {
    if (vtensor.chunks.length === 0) continue;
    const isLive = vtensor.id !== 0 && vtensor.state === "live";
    rows.push(withLanes(map, {
      key: isLive ? `v${vtensor.id}` : `s${vtensor.slot}`,
      kind: isLive ? "live" : "parked",
      requestId: vtensor.request_id,
      isState: Boolean(vtensor.state_of),
      tokens: isLive ? vtensor.num_tokens : 0,
      cachedTokens: vtensor.num_cached_tokens,
    }, vtensor.groups ?? [vtensor.chunks]));
  }
  const live = rows.filter(({ kind }) => kind === "live");
  // What a running request has recorded of itself is its own row already.
  const isRunning = ({ chunks }) => live.some((row) => chunks.every((id, i) => id === null || row.chunks[i] === id));
  const cached = cachedRows(map).filter((row) => !isRunning(row));
  return [...live, ...cached, ...rows.filter(({ kind }) => kind === "parked")];
}

// One row for each leaf of the radix tree: its whole path. A leaf keeps its key when a hit splits a node above it.
function cachedRows(map) {
  const { prefixes } = map;
  const isParent = new Set(prefixes.map((prefix) => prefix.parent));
  const rows = [];
  prefixes.forEach((leaf, index) => {
    if (isParent.has(index)) return;
    const path = [];
    for (let i = index; i >= 0; i = prefixes[i].parent) path.unshift(prefixes[i]);
    const groups = (leaf.groups ?? [leaf.chunks]).map((_, group) => pathChunks(path, group, map.row_tokens));
    rows.push(withLanes(map, {
      key: `p${leaf.chunks.at(-1)}`,
      kind: "cached",
      tokens: leaf.start_tokens + leaf.num_tokens,
      lastUsed: leaf.last_used,
      path,
    }, groups));
  });
  return rows;
}

// The row of the first group of layers, and below it one for each other group.
function withLanes(map, row, groups) {
  const bytes = (group) => map.groups?.[group]?.row_bytes ?? map.chunk_bytes * map.num_planes;
  const window = (group) => map.groups?.[group]?.window ?? null;
  const lanes = groups.slice(1).map((chunks, i) => (
    { key: `${row.key}.${i + 1}`, kind: row.kind, chunks, rowBytes: bytes(i + 1), window: window(i + 1), isLane: true }));
  return { ...row, chunks: groups[0], rowBytes: bytes(0), window: window(0), lanes };
}

// How many places of a row have no memory any more, because a window has left them.
export function givenBack({ chunks }) {
  return chunks.filter((id) => id === null).length;
}

// A node that starts inside a row names that row again, and its own chunk holds everything up to there.
function pathChunks(path, group, rowTokens) {
  let chunks = [];
  for (const node of path) {
    const firstRow = Math.floor(node.start_tokens / rowTokens + 1e-9);
    chunks = [...chunks.slice(0, firstRow), ...(node.groups?.[group] ?? node.chunks)];
  }
  return chunks;
}

// chunk id -> {id, rows: [row keys], hue or null}; a hue for chunks in several rows, the same for the same set of rows.
export function chunksOf(rows) {
  const chunks = new Map();
  for (const row of rows) {
    if (row.kind === "parked") continue; // leftovers of requests that have ended: nobody reads them
    for (const id of row.chunks) {
      if (id === null) continue;
      if (!chunks.has(id)) chunks.set(id, { id, rows: [], hue: null, bytes: row.rowBytes });
      const holders = chunks.get(id).rows;
      if (holders.at(-1) !== row.key) holders.push(row.key);
    }
  }
  const first = new Map(); // set of rows -> smallest chunk id: a hue that stays while requests come and go
  for (const chunk of chunks.values()) {
    if (chunk.rows.length < 2) continue;
    const group = chunk.rows.join(" ");
    first.set(group, Math.min(first.get(group) ?? Infinity, chunk.id));
  }
  for (const chunk of chunks.values()) {
    if (chunk.rows.length > 1) chunk.hue = (first.get(chunk.rows.join(" ")) * GOLDEN_ANGLE + 160) % 360;
  }
  return chunks;
}

// What sharing does in all rows, live and cached; the server's own figures count running requests only.
export function sharing(chunks) {
  const shared = [...chunks.values()].filter((chunk) => chunk.rows.length > 1);
  const sum = (timesOf) => shared.reduce((total, chunk) => total + timesOf(chunk) * chunk.bytes, 0);
  return { shared_bytes: sum(() => 1), saved_bytes: sum((chunk) => chunk.rows.length - 1) };
}

// What happened between two maps, {rows, generations, stats} each: per row the events of its chunks, and the totals.
//   new: mapped and filled for the first time; shared: mapped, though it existed before (aliased);
//   copied: took the place of another chunk (copy-on-write). `gone`: per cached row the chunks that stood in it and now
//   stand nowhere: evicted, or forgotten with the whole prefix cache. A chunk of another generation is another chunk,
//   though it has the same id.
export function changesOf(before, now) {
  const changes = { events: new Map(), gone: new Map(), mapped: 0, shared: 0, copied: 0, evicted: 0 };
  if (before === null) return changes;
  const known = new Set(before.rows.flatMap((row) => row.chunks));
  const rowsBefore = new Map(before.rows.map((row) => [row.key, row]));
  const isSame = (id) => before.generations.get(id) === now.generations.get(id);
  for (const row of now.rows) {
    if (row.kind !== "live") continue;
    const old = rowsBefore.get(row.key)?.chunks ?? [];
    row.chunks.forEach((id, i) => {
      if (id === null || old[i] === id) return;
      const event = (old[i] ?? null) !== null ? "copied" : known.has(id) && isSame(id) ? "shared" : "new";
      changes.events.set(`${row.key}/${i}`, event);
    });
    changes.mapped += Math.max(0, row.chunks.length - old.length);
  }
  const kept = new Set(now.rows.flatMap((row) => (row.kind === "parked" ? [] : row.chunks)));
  for (const row of before.rows.filter(({ kind }) => kind === "cached")) {
    const gone = row.chunks.filter((id) => id !== null && (!kept.has(id) || !isSame(id)));
    if (gone.length > 0) changes.gone.set(row.key, gone);
  }
  for (const name of ["aliased", "copied", "evicted"]) {
    const count = now.stats[`chunks_${name}`] - before.stats[`chunks_${name}`];
    changes[name === "aliased" ? "shared" : name] = Math.max(0, count);
  }
  return changes;
}

// How many of `chunks` are among the others.
export function overlap(chunks, others) {
  const set = new Set(others);
  return chunks.filter((id) => set.has(id)).length;
}
