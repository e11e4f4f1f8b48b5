// SettingsDialog: system prompt, sampling, theme and keys.
import { h, iconButton } from "./dom.js";
import { DEFAULT_SETTINGS } from "./store.js";

const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1, "0 always takes the likeliest token"],
  ["top_p", "Top p", 0.05, 1, 0.05, "sample from the likeliest tokens of this total probability"],
  ["top_k", "Top k", 0, 1000, 1, "sample from so many tokens; 0: all"],
  ["min_p", "Min p", 0, 1, 0.05, "leave out tokens less likely than this share of the best"],
  ["repetition_penalty", "Repetition penalty", 1, 2, 0.05, "above 1: repeat less"],
  ["max_tokens", "Max tokens", 1, 32768, 1, "of an answer"],
];

export class SettingsDialog {
  constructor(store, api, { onKeys }) {
    Object.assign(this, { store, api, onKeys });
    this.dialog = h("dialog", { class: "settings", "aria-labelledby": "settings-title" });
    this.dialog.addEventListener("close", refocus);
    document.body.append(this.dialog);
    store.addEventListener("settings", () => applyTheme(store.settings.theme));
    applyTheme(store.settings.theme);
  }

  open(focus = "system") {
    const { settings, current } = this.store;
    const form = h("form", { method: "dialog", onsubmit: (event) => this.#save(event) },
      h("header", {}, h("h2", { id: "settings-title" }, "Settings"),
        iconButton("close", "Close without saving", () => this.dialog.close())),
      h("div", { class: "fields" }, field("system", "System prompt", h("textarea", { rows: "2" }, current.system), "of this conversation, and of new ones"),
      h("fieldset", {}, h("legend", {}, "Sampling"),
        NUMBERS.map(([name, label, min, max, step, note]) =>
          field(name, label, h("input", { type: "number", min: String(min), max: String(max), step: String(step), value: String(settings[name]) }), note)),
        field("seed", "Seed", h("input", { type: "number", step: "1", value: String(settings.seed) }), "empty: another one each time")),
      h("fieldset", {}, h("legend", {}, "This browser"),
        field("theme", "Colours", h("select", {}, ["auto", "light", "dark"].map((theme) =>
          h("option", { value: theme, selected: settings.theme === theme }, theme))), "auto: those of the system"),
        field("api-key", "API key", h("input", { type: "password", autocomplete: "off", value: this.api.key("api") }), "if the server asks for one"),
        field("admin-key", "Admin key", h("input", { type: "password", autocomplete: "off", value: this.api.key("admin") }), "for the memory map"))),
      h("footer", {},
        h("button", { type: "button", class: "quiet", onclick: () => this.#reset() }, "Reset"),
        h("button", { type: "submit", class: "primary" }, "Save")));
    this.dialog.replaceChildren(form);
    this.dialog.showModal();
    this.dialog.querySelector(`#set-${focus}`).focus();
  }

  #value(name) {
    return this.dialog.querySelector(`#set-${name}`).value;
  }

  #save(event) {
    event.preventDefault();
    const settings = { ...this.store.settings, system: this.#value("system"), theme: this.#value("theme"), seed: this.#value("seed") };
    for (const [name] of NUMBERS) settings[name] = Number(this.#value(name));
    this.api.setKey("api", this.#value("api-key"));
    this.api.setKey("admin", this.#value("admin-key"));
    this.store.current.system = settings.system;
    this.store.changed();
    this.store.saveSettings(settings);
    this.dialog.close();
    this.onKeys();
  }

  #reset() {
    for (const [name, value] of Object.entries(DEFAULT_SETTINGS)) {
      this.dialog.querySelector(`#set-${name}`).value = String(value);
    }
  }
}

// A closing dialog gives the focus back while the page is still inert: Chromium then shows a text field as
// focused, but places no caret, and what is typed is lost.
function refocus() {
  const focused = document.activeElement;
  focused.blur();
  focused.focus();
}

function field(name, label, input, note = "") {
  input.id = `set-${name}`;
  return h("div", { class: "setting" }, h("label", { for: input.id }, label), input,
    note ? h("small", {}, note) : null);
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}
