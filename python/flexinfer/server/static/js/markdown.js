// A small subset of Markdown as DOM nodes: paragraphs, headings, lists, code, bold, italic, links. Nothing is
// ever parsed as HTML.
import { h } from "./dom.js";

export function renderMarkdown(text) {
  const blocks = [];
  const lines = text.split("\n");
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (line.startsWith("```")) {
      const end = lines.findIndex((other, j) => j > i && other.startsWith("```"));
      const stop = end < 0 ? lines.length : end;
      blocks.push(h("pre", {}, h("code", {}, lines.slice(i + 1, stop).join("\n"))));
      i = stop + 1;
    } else if (/^#{1,4} /.test(line)) {
      blocks.push(h("p", { class: "heading" }, inline(line.replace(/^#+ /, ""))));
      i += 1;
    } else if (/^\s*([-*]|\d+\.) /.test(line)) {
      const ordered = /^\s*\d+\./.test(line);
      const items = [];
      while (i < lines.length && /^\s*([-*]|\d+\.) /.test(lines[i])) {
        items.push(h("li", {}, inline(lines[i].replace(/^\s*([-*]|\d+\.) /, ""))));
        i += 1;
      }
      blocks.push(h(ordered ? "ol" : "ul", {}, items));
    } else if (line.trim() === "") {
      i += 1;
    } else {
      const paragraph = [];
      while (i < lines.length && lines[i].trim() !== "" && !/^(```|#{1,4} |\s*([-*]|\d+\.) )/.test(lines[i])) {
        paragraph.push(lines[i]);
        i += 1;
      }
      blocks.push(h("p", {}, inline(paragraph.join("\n"))));
    }
  }
  return blocks;
}

const SPANS = /(`[^`\n]+`)|(\*\*[^*\n]+\*\*)|(\*[^*\n]+\*)|(\[[^\]\n]+\]\(https?:\/\/[^)\s]+\))/;

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

function span([whole, code, bold, italic]) {
  if (code) return h("code", {}, whole.slice(1, -1));
  if (bold) return h("strong", {}, inline(whole.slice(2, -2)));
  if (italic) return h("em", {}, inline(whole.slice(1, -1)));
  const [, label, href] = /^\[([^\]]+)\]\((.+)\)$/.exec(whole);
  return h("a", { href, target: "_blank", rel: "noopener noreferrer" }, label);
}
