// The weights of a head, layer or model on one text: the attention that keys receive, and the weights of single tokens.

import { binStart } from "./numbers.js";

const MAX_CACHED = 96; // tokens whose weights are cached

export class TextWeights {
  /** `at`: indices {group, text, layer, head}, and `of`: "head", "layer" or "model". */
  constructor(source, curves, shape, at) {
    Object.assign(this, { source, curves, shape, at, cache: new Map() });
    this.group = source.page.groups[at.group];
    this.text = this.group.texts[at.text];
    this.queries = this.text.queries || this.text.keys;
    this.crossed = Boolean(this.text.queries) || this.text.n_queries !== this.text.n_keys || this.group.name === "cross"; // two texts
    this.weightless = shape.kind === "none" || shape.kind === "small"; // weights of single tokens are not available
  }

  static async of(source, at) {
    const { group, text, layer, head } = at;
    const [curves, shape] = await Promise.all([source.curves(group, text), source.map(group, text, layer, head)]);
    const weights = new TextWeights(source, curves, shape, at);
    weights.received = await weights.#received();
    return weights;
  }

  tokensOf(side) {
    return side === "key" ? this.text.keys : this.queries;
  }

  /** The share of all attention that each key receives. */
  async #received() {
    const { curves, at: { group, text, layer, head, of } } = this, n = this.text.n_keys;
    if (of === "model") return curves.mean.values;
    if (of === "layer") return curves.layers.values.subarray(layer * n, (layer + 1) * n);
    const bins = curves.received.shape[2], start = (layer * this.group.heads.length + head) * bins;
    if (bins === n) return curves.received.values.subarray(start, start + n);
    try {
      return (await this.source.profiles(group, text, layer, head)).received;
    } catch {
      const out = new Float32Array(n); // a profile without maps only has a binned curve
      for (let bin = 0; bin < bins; bin++) out.fill(curves.received.values[start + bin], binStart(bin, bins, n), binStart(bin + 1, bins, n));
      return out;
    }
  }

  /** The weights {to, from} of a token, or undefined while they are not loaded. */
  ofToken({ side, at }) {
    return this.cache.get(`${side}/${at}`);
  }

  /** Load the weights of a token into the cache. */
  async fetch({ side, at }, signal) {
    const name = `${side}/${at}`;
    if (this.cache.has(name) || this.weightless) return;
    const { group, text, layer, head, of } = this.at, place = [group, text, layer, of === "head" ? head : "mean"];
    const [to, from] = await Promise.all([
      !this.crossed || side === "query" ? this.source.rowWeights(...place, at, { signal }) : null,
      !this.crossed || side === "key" ? this.source.columnWeights(...place, at, { signal }) : null,
    ]);
    this.cache.set(name, { to, from });
    if (this.cache.size > MAX_CACHED) this.cache.delete(this.cache.keys().next().value);
  }

  /** The head or layer whose weights are shown, in words. */
  get whose() {
    const { layers, heads } = this.group, { layer, head, of } = this.at;
    return of === "head" ? `Layer ${layers[layer]}, head ${heads[head]}` : `Layer ${layers[layer]}, mean of ${heads.length} heads`;
  }

  /** The same for a file name. */
  get fileName() {
    const { layers, heads } = this.group, { layer, head, of } = this.at;
    return { head: `text-L${layers[layer]}-H${heads[head]}`, layer: `text-L${layers[layer]}`, model: "text-model" }[of];
  }
}
