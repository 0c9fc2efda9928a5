// The weights of a text, and their export.

import { rowOfCurve } from "./data.js";
import { csvOf } from "./export.js";

const MAX_CACHED = 96; // tokens whose weights are cached

export class TextWeights {
  /** `at`: indices {group, text, layer, head}, and `of`: "head", "layer" or "model". */
  constructor(source, curves, at) {
    Object.assign(this, { source, curves, at, cache: new Map() });
    this.group = source.page.groups[at.group];
    this.text = this.group.texts[at.text];
    this.queries = this.text.queries || this.text.keys;
    this.crossed = Boolean(this.text.queries) || this.text.n_queries !== this.text.n_keys || this.group.name === "cross"; // two texts
    this.weightless = ["none", "small"].includes(this.text.map.kind); // weights of single tokens are not available
  }

  static async of(source, at) {
    const weights = new TextWeights(source, await source.curves(at.group, at.text), at);
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
    if (of === "layer") return rowOfCurve(curves.layers, layer);
    const binned = rowOfCurve(curves.received, layer * this.group.heads.length + head);
    return binned.length === n ? binned : (await this.source.profiles(group, text, layer, head)).received;
  }

  /** The weights {to, from} of a token, or undefined while they are not loaded. */
  ofToken({ side, at }) {
    return this.cache.get(`${side}/${at}`);
  }

  /** Load the weights of a token into the cache. */
  async fetch({ side, at }, signal) {
    const name = `${side}/${at}`;
    if (this.cache.has(name) || this.weightless) return;
    const { group, text, layer, of } = this.at, head = of === "head" ? this.at.head : undefined;
    const [to, from] = await Promise.all(["query", "key"].map((one) =>
      (!this.crossed || side === one ? this.source.weights(group, text, layer, { head, [one]: at }, { signal }) : null)));
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

// Export of the text page as CSV.

/** One row per token; for two texts, first the queries and then the keys. */
export function textCsv({ keys, queries, crossed, received, weights }) {
  const weight = (name, at) => weights?.[name]?.weights[at] ?? null;
  if (!crossed)
    return csvOf(["position", "token", "received", "attended_to", "attends"], keys.map((token, at) => [at, token, received[at], weight("to", at), weight("from", at)]));
  return csvOf(["side", "position", "token", "received", "attended_to", "attends"], [
    ...queries.map((token, at) => ["query", at, token, null, null, weight("from", at)]),
    ...keys.map((token, at) => ["key", at, token, received[at], weight("to", at), null]),
  ]);
}
