// The key with the largest weight of the pinned token, for each head of its layer or a neighbouring one.

import { choice } from "./charts.js";
import { h, replace } from "./dom.js";
import { named } from "./numbers.js";
import { linkList } from "./text_panel.js";

export class TextLinks {
  /** `ongo(position)` scrolls to a key; `onfollow(layer, head, query, key)` follows a link to the layer below. */
  constructor({ ongo, onfollow, ontrouble }) {
    Object.assign(this, { ongo, onfollow, ontrouble, layer: null, shown: "" });
    this.element = h("div", { class: "text-linked" });
  }

  /** Show no links, or a hint instead. */
  clear(hint = null) {
    this.shown = "";
    this.element.replaceChildren(...(hint ? [h("p", { class: "text-note" }, hint)] : []));
  }

  /** Show the links of a query; `weights`: TextWeights. */
  async show(weights, query) {
    const { source, group, at } = weights, { layers, heads } = group, here = at.layer;
    const layer = Math.abs((this.layer ?? here) - here) <= 1 ? this.layer ?? here : here;
    const key = [source.id, at.group, at.text, here, query, layer].join("/");
    if (this.shown === key) return;
    this.shown = key;
    let links;
    try {
      ({ heads: links } = await source.links(at.group, at.text, layer, query));
    } catch (error) {
      if (this.shown === key) this.clear(), this.ontrouble(error);
      return;
    }
    if (this.shown !== key) return;
    const options = [[here - 1, `below (L${layers[here - 1]})`], [here, `L${layers[here]}`], [here + 1, `above (L${layers[here + 1]})`]].filter(([other]) => other >= 0 && other < layers.length);
    replace(this.element, h("h3", {}, "Each head’s strongest key of ", h("bdi", {}, `“${named(weights.queries[query])}”`)),
      choice("In layer", options, layer, (other) => { this.layer = Number(other); this.shown = ""; this.show(weights, query); }),
      linkList({ links, heads, tokens: weights.text.keys, ongo: this.ongo, onfollow: layer > 0 && !weights.crossed ? (head, to) => this.onfollow(layer, head, query, to) : null }));
  }
}
