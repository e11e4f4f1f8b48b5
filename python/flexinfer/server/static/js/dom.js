// Elements without templates: h("p", {class: "note"}, "text", child). Text is always a text node, so that nothing
// a model writes can become markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "dataset") Object.assign(element.dataset, value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  append(element, children);
  return element;
}

export function append(element, children) {
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

export function replaceChildren(element, ...children) {
  element.replaceChildren();
  append(element, children);
}

const ICONS = {
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  fork: "M6 4v16M6 12c8 0 12-2 12-8M15 7l3-3 3 3",
  redo: "M20 11a8 8 0 1 0-2.3 6M20 4v7h-7",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  done: "M5 13l4 4L19 7",
  search: "M10.5 17a6.5 6.5 0 1 1 0-13 6.5 6.5 0 0 1 0 13zM15.5 15.5L20 20",
  rename: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  close: "M6 6l12 12M18 6L6 18",
  chat: "M4 5h16v11H9l-5 4z",
  list: "M4 6h16M4 12h16M4 18h10",
  map: "M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4zM14 14h6v6h-6z",
};

// A line drawing of 24 by 24, hidden from screen readers: the button around it has the name.
export function icon(name) {
  const ns = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(ns, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes },
    icon(name));
}

// `draw`, but once for all calls before the next picture; a tab that nobody sees draws, too, though seldom.
export function soon(draw) {
  let isAsked = false;
  const run = () => {
    isAsked = false;
    draw();
  };
  return () => {
    if (isAsked) return;
    isAsked = true;
    if (document.hidden) setTimeout(run, 250);
    else requestAnimationFrame(run);
  };
}

export function formatBytes(bytes) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (bytes >= size) return `${(bytes / size).toFixed(bytes >= 100 * size ? 0 : 1)} ${unit}`;
  }
  return `${Math.round(bytes)} B`;
}

export function formatCount(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}
