// Markdown: the part of it that models write, as DOM nodes: paragraphs, headings, nested lists, tables, quotes, code, bold,
// italic, links. Nothing is ever parsed as HTML. A growing text is drawn anew from its first block that has changed.
import { h } from "./dom.js";
import { codeBlock } from "./code-block.js";

const FENCE = /^\s*(```|~~~)\s*(\S*)/;
const HEADING = /^(#{1,6}) +(.*)$/;
const ITEM = /^(\s*)([-*+]|\d+[.)]) +(.*)$/;
const QUOTE = /^\s*> ?/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const TABLE_LINE = /^\s*\|.*\|\s*$/;
const DIVIDER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;

export class Markdown {
  #sources = [];

  constructor(element) {
    this.element = element;
  }

  update(text) {
    const blocks = blocksOf(text.split("\n"));
    const sources = blocks.map((block) => `${block.kind} ${block.lines.join("\n")}`);
    let same = 0;
    while (same < sources.length && sources[same] === this.#sources[same]) same += 1;
    while (this.element.childElementCount > same) this.element.lastElementChild.remove();
    this.element.append(...blocks.slice(same).map(draw));
    this.#sources = sources;
  }
}

// [{kind, lines, ...}] of a text, the same blocks at its start whatever follows.
function blocksOf(lines) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    const block = blockAt(lines, i);
    if (block.kind !== "nothing") blocks.push(block);
    i += block.count;
  }
  return blocks;
}

function blockAt(lines, start) {
  const line = lines[start];
  const fence = FENCE.exec(line);
  if (line.trim() === "") return { kind: "nothing", count: 1 };
  if (fence) return code(lines, start, fence);
  if (HEADING.test(line)) return { kind: "heading", lines: [line], count: 1 };
  if (RULE.test(line)) return { kind: "rule", lines: [line], count: 1 };
  if (TABLE_LINE.test(line) && DIVIDER.test(lines[start + 1] ?? "")) return run("table", lines, start, (one) => TABLE_LINE.test(one));
  if (QUOTE.test(line)) return run("quote", lines, start, (one) => QUOTE.test(one));
  if (ITEM.test(line)) return run("list", lines, start, (one, next) => ITEM.test(one) || /^\s+\S/.test(one) || (one === "" && ITEM.test(next)));
  return run("text", lines, start, (one) => one.trim() !== "" && ![FENCE, HEADING, ITEM, QUOTE, RULE].some((other) => other.test(one)));
}

function run(kind, lines, start, belongs) {
  let end = start + 1;
  while (end < lines.length && belongs(lines[end], lines[end + 1] ?? "")) end += 1;
  return { kind, lines: lines.slice(start, end), count: end - start };
}

// To the closing fence, or to the end of what has come.
function code(lines, start, [, mark, language]) {
  let end = start + 1;
  while (end < lines.length && lines[end].trim() !== mark) end += 1;
  return { kind: `code ${language}`, language, lines: lines.slice(start + 1, end), count: end - start + 1 };
}

function draw({ kind, lines, language }) {
  if (kind === "heading") {
    const [, marks, text] = HEADING.exec(lines[0]);
    return h("p", { class: "heading", role: "heading", "aria-level": String(Math.min(6, marks.length + 2)) }, inline(text));
  }
  if (kind === "rule") return h("hr");
  if (kind === "table") return table(lines);
  if (kind === "quote") return h("blockquote", {}, blocksOf(lines.map((line) => line.replace(QUOTE, ""))).map(draw));
  if (kind === "list") return list(lines);
  if (kind === "text") return h("p", {}, inline(lines.join("\n")));
  return codeBlock(lines.join("\n"), language);
}

function table([head, , ...rows]) {
  const cells = (line) => line.trim().slice(1, -1).split("|").map((cell) => inline(cell.trim()));
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" }, h("table", {},
    h("thead", {}, h("tr", {}, cells(head).map((cell) => h("th", { scope: "col" }, cell)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, cell)))))));
}

// Items with what is indented below each, which may be a list again.
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length) items.push([item[3], []]);
    else items.at(-1)[1].push(line);
  }
  const isOrdered = /\d/.test(mark);
  return h(isOrdered ? "ol" : "ul", isOrdered ? { start: String(parseInt(mark, 10)) } : {}, items.map(([text, below]) =>
    h("li", {}, inline(text), blocksOf(dedent(below)).map(draw))));
}

function dedent(lines) {
  const depth = Math.min(...lines.filter((line) => line.trim() !== "").map((line) => /^\s*/.exec(line)[0].length));
  return lines.map((line) => line.slice(Number.isFinite(depth) ? depth : 0));
}

const SPANS = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\s][^*\n]*\*)|(\[[^\]\n]+\]\(https?:\/\/[^)\s]+\))/;

function inline(text) {
  const nodes = [];
  let rest = text;
  for (let match = SPANS.exec(rest); match !== null; match = SPANS.exec(rest)) {
    nodes.push(rest.slice(0, match.index), span(match));
    rest = rest.slice(match.index + match[0].length);
  }
  nodes.push(rest);
  return nodes;
}

function span([whole, isCode, isBold, isItalic]) {
  if (isCode) return h("code", {}, whole.slice(1, -1));
  if (isBold) return h("strong", {}, inline(whole.slice(2, -2)));
  if (isItalic) return h("em", {}, inline(whole.slice(1, -1)));
  const [, label, href] = /^\[([^\]]+)\]\((.+)\)$/.exec(whole);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer" }, label);
}
