// Beside the text: the panel of a token, the links of its heads, and the search.

import { choice } from "./charts.js";
import { h, replace } from "./dom.js";
import { integer, named, shareWords } from "./numbers.js";

const LISTED = 8, SPOKEN = 3; // number of weights

/** The k largest weights, [[position, weight], …], the sum of all weights and that of the others. */
function largestWeights(weights, k) {
  const top = [];
  let total = 0;
  for (let at = 0; at < weights.length; at++) {
    const weight = weights[at];
    total += weight;
    if (weight <= 0 || (top.length === k && weight <= top[k - 1][1])) continue;
    let place = top.length;
    while (place > 0 && top[place - 1][1] < weight) place--;
    top.splice(place, 0, [at, weight]);
    if (top.length > k) top.pop();
  }
  return { top, total, rest: Math.max(total - top.reduce((sum, [, weight]) => sum + weight, 0), 0) };
}

/** A list of weights: `side` is "to" or "from", `largest` of largestWeights(), `tokens` those at the other end. */
function weightList({ side, title, note, largest, tokens, ongo }) {
  const most = largest.top.length ? largest.top[0][1] : 1, others = tokens.length - largest.top.length;
  return h("section", { class: `text-ties ${side}` },
    h("h3", {}, h("i", {}), title),
    largest.top.length ? h("ol", {}, largest.top.map(([at, weight]) =>
      h("li", {}, h("button", { type: "button", "data-key": `${side}-${at}`, onclick: () => ongo(at), "aria-label": `${named(tokens[at])}, token ${at}, ${shareWords(weight)}; go there` },
        h("bdi", {}, named(tokens[at])), h("small", {}, integer(at)), h("b", {}, shareWords(weight)),
        h("s", { style: { width: `${(100 * weight) / most}%` } }))))) : h("p", { class: "text-note" }, "no token"),
    others > 0 && largest.rest > 0 ? h("p", { class: "text-note" }, side === "to" ? `the other ${integer(others)}: ${shareWords(largest.rest)}` : `the other ${integer(others)}: ${shareWords(largest.rest / others)} each on average`) : null,
    note ? h("p", { class: "text-note" }, note) : null);
}

/** The panel of a token {side, at}. `weights`: TextWeights; `ongo(side, position)` scrolls to a token. */
export function tokenPanel(token, weights, ongo) {
  const { crossed, weightless, text, queries, received } = weights, tokens = weights.tokensOf(token.side), own = weights.ofToken(token);
  const receives = !crossed || token.side === "key" ? ` · receives ${shareWords(received[token.at])}` : "";
  const head = h("header", { class: "text-token" }, h("h2", {}, h("bdi", {}, `“${named(tokens[token.at])}”`)),
    h("p", {}, `${crossed ? token.side : "token"} ${integer(token.at)} of ${integer(tokens.length)}${receives}`));
  if (!own) return [head, h("p", { class: "text-note" }, weightless ? text.map.why : "…")];
  const lists = [];
  if (own.to) {
    const largest = largestWeights(own.to, LISTED);
    lists.push(weightList({ side: "to", title: "attends to", largest, tokens: text.keys, ongo: (at) => ongo("key", at), note: largest.total < 0.99 ? `on no token: ${shareWords(1 - largest.total)}` : null }));
  }
  if (own.from) lists.push(weightList({ side: "from", title: "attended by", largest: largestWeights(own.from, LISTED), tokens: queries, ongo: (at) => ongo("query", at) }));
  return [head, h("div", { class: "text-both" }, lists)];
}

/** The panel as one sentence for screen readers; empty while weights are loading. */
export function tokenSentence(token, weights) {
  const own = weights.ofToken(token), name = `${named(weights.tokensOf(token.side)[token.at])}, token ${token.at}`;
  if (!own) return weights.weightless ? name : "";
  const list = (values, tokens) => largestWeights(values, SPOKEN).top.map(([at, weight]) => `${named(tokens[at])} ${shareWords(weight)}`).join(", ");
  return [name, own.to && `attends to ${list(own.to, weights.text.keys)}`, own.from && `attended by ${list(own.from, weights.queries)}`].filter(Boolean).join("; ");
}

/**
 * The key with the largest weight of a query in each head of a layer. `links`: {keys, weights}; `heads`: the numbers of the
 * heads; `onfollow(head, position)` is null if there is no layer below; `ongo(position)` scrolls to a key.
 */
function linkList({ links, heads, tokens, onfollow, ongo }) {
  return h("ul", { class: "text-links" }, links.keys.map((position, head) => [position, head, links.weights[head]]).map(([position, head, weight]) =>
    h("li", {}, h("span", {}, `H${heads[head]}`),
      h("button", { type: "button", class: "text-go", "data-key": `link-${head}`, onclick: () => ongo(position), "aria-label": `Head ${heads[head]}: ${named(tokens[position])}, token ${position}, ${shareWords(weight)}; go there` },
        h("bdi", {}, named(tokens[position])), h("small", {}, integer(position))),
      h("b", {}, shareWords(weight)),
      onfollow ? h("button", { type: "button", class: "text-follow", "data-key": `follow-${head}`, "aria-label": `Follow head ${heads[head]} to ${named(tokens[position])} one layer down`, title: "Follow: one layer down, at this token", onclick: () => onfollow(head, position) }, "follow ↓") : null)));
}

// The key with the largest weight of the pinned token, for each head of its layer or a neighbouring one.

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
      links = await source.links(at.group, at.text, layer, query);
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

// Searching a text for a string that may span several tokens.

const MAX_HITS = 10_000;

/** A search field. `flows()` returns {side: TokenFlow}; `onfound(hit)` is called with {side, at, last} or null. */
export class TextFind {
  constructor(flows, onfound) {
    Object.assign(this, { flows, onfound, hit: null, hits: [], of: "", at: 0 });
    this.field = h("input", {
      type: "search", class: "text-find", placeholder: "Find in the text", "aria-label": "Find in the text; Enter goes to the next match",
      oninput: () => this.search(0), onkeydown: (event) => { if (event.key === "Enter") event.preventDefault(), this.search(event.shiftKey ? -1 : 1); },
    });
    this.found = h("span", { class: "text-found", "aria-live": "polite" });
    this.element = h("div", { class: "text-search" }, this.field, this.found);
  }

  /** Clear the search, after a change of the text. */
  clear() {
    this.field.value = this.of = "";
    this.search(0);
  }

  /** Go to the next match (1), the previous one (-1), or the first one from the current position (0). */
  search(direction) {
    const wanted = this.field.value.toLowerCase(), flows = this.flows();
    if (wanted !== this.of) {
      this.of = wanted;
      this.hits = wanted ? Object.entries(flows).flatMap(([side, flow]) => matchesOf(flow.tokens, wanted).map(([at, last]) => ({ side, at, last }))) : [];
      const firstVisible = Object.values(flows)[0]?.view[0] ?? 0;
      this.at = Math.max(this.hits.findIndex(({ at }) => at >= firstVisible), 0);
      direction = 0;
    }
    const count = this.hits.length;
    this.at = count ? (this.at + direction + count) % count : 0;
    this.hit = this.hits[this.at] ?? null;
    this.found.textContent = count ? `${integer(this.at + 1)} of ${integer(count)}` : wanted ? "not found" : "";
    this.onfound(this.hit);
  }
}

/** Occurrences of a lower-case string in the joined tokens: [[first token, last token], …]. */
function matchesOf(tokens, wanted) {
  const lower = tokens.map((token) => token.toLowerCase()), starts = new Uint32Array(tokens.length + 1);
  for (let at = 0; at < lower.length; at++) starts[at + 1] = starts[at] + lower[at].length;
  const joined = lower.join(""), found = [];
  let token = 0;
  for (let at = joined.indexOf(wanted); at >= 0 && found.length < MAX_HITS; at = joined.indexOf(wanted, at + wanted.length)) {
    while (starts[token + 1] <= at) token++;
    let last = token;
    while (starts[last + 1] < at + wanted.length) last++;
    found.push([token, last]);
  }
  return found;
}
