// A block of code with its language and a button that copies it.
import { h, icon, iconButton } from "./dom.js";

const COPIED_MS = 1500;

export function codeBlock(text, language) {
  return h("figure", { class: "code" },
    h("figcaption", {}, h("span", {}, language || "code"), copyButton("Copy the code", () => text)),
    h("pre", { tabindex: "0", role: "group", "aria-label": language ? `Code in ${language}` : "Code" }, h("code", {}, text)));
}

// Says for a moment that it did.
export function copyButton(label, textOf) {
  const button = iconButton("copy", label, async () => {
    await copy(textOf());
    button.replaceChildren(icon("done"));
    button.setAttribute("aria-label", "Copied");
    setTimeout(() => {
      button.replaceChildren(icon("copy"));
      button.setAttribute("aria-label", label);
    }, COPIED_MS);
  });
  return button;
}

// The clipboard's own interface exists only on https and localhost.
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "offscreen", "aria-hidden": "true" }, text);
    const focused = document.activeElement;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    focused?.focus();
  }
}
