// ReplicaChoice: whose memory is shown where several replicas serve. Hidden where one server does.
import { h, replaceChildren } from "./dom.js";

export class ReplicaChoice {
  #chosen = ""; // "": the one that has answered this browser last
  #shown = null;

  constructor(api, onChange) {
    this.api = api;
    this.select = h("select", {
      onchange: () => {
        this.#chosen = this.select.value;
        onChange();
      },
    });
    const note = "whose memory is shown; auto: of the replica that has answered this browser last";
    this.element = h("label", { class: "replica", title: note, hidden: true }, "Replica ", this.select);
  }

  // Whose map to ask for; null: anybody's.
  get wanted() {
    return this.#chosen || this.api.answeredBy || this.#shown;
  }

  // The one that was asked for has gone.
  forget() {
    this.#chosen = "";
    this.#shown = this.api.answeredBy = null;
  }

  // Returns whether this map is of another replica than the one before.
  show({ replica = null, replicas = [] }) {
    const isOther = replica !== this.#shown;
    this.#shown = replica;
    this.element.hidden = replicas.length < 2;
    const options = [["", `auto: ${replica}`], ...replicas.map((name) => [name, name])];
    const described = JSON.stringify([options, this.#chosen]);
    if (described !== this.select.dataset.described) { // an open list would close at each poll
      this.select.dataset.described = described;
      replaceChildren(this.select, ...options.map(([value, text]) => h("option", { value, selected: value === this.#chosen }, text)));
    }
    return isOther;
  }
}
