// The panel beside the text: a token with its largest weights in both directions, and the links of its heads.

import { h } from "./dom.js";
import { integer, named, weightWords } from "./numbers.js";

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
      h("li", {}, h("button", { type: "button", "data-key": `${side}-${at}`, onclick: () => ongo(at), "aria-label": `${named(tokens[at])}, token ${at}, ${weightWords(weight)}; go there` },
        h("bdi", {}, named(tokens[at])), h("small", {}, integer(at)), h("b", {}, weightWords(weight)),
        h("s", { style: { width: `${(100 * weight) / most}%` } }))))) : h("p", { class: "text-note" }, "no token"),
    others > 0 && largest.rest > 0 ? h("p", { class: "text-note" }, side === "to" ? `the other ${integer(others)}: ${weightWords(largest.rest)}` : `the other ${integer(others)}: ${weightWords(largest.rest / others)} each on average`) : null,
    note ? h("p", { class: "text-note" }, note) : null);
}

/** The panel of a token {side, at}. `weights`: TextWeights; `ongo(side, position)` scrolls to a token. */
export function tokenPanel(token, weights, ongo) {
  const { crossed, weightless, shape, text, queries, received } = weights, tokens = weights.tokensOf(token.side), own = weights.ofToken(token);
  const receives = !crossed || token.side === "key" ? ` · receives ${weightWords(received[token.at])}` : "";
  const head = h("header", { class: "text-token" }, h("h2", {}, h("bdi", {}, `“${named(tokens[token.at])}”`)),
    h("p", {}, `${crossed ? token.side : "token"} ${integer(token.at)} of ${integer(tokens.length)}${receives}`));
  if (!own) return [head, h("p", { class: "text-note" }, weightless ? shape.why : "…")];
  const lists = [];
  if (own.to) {
    const largest = largestWeights(own.to, LISTED);
    lists.push(weightList({ side: "to", title: "attends to", largest, tokens: text.keys, ongo: (at) => ongo("key", at), note: largest.total < 0.99 ? `on no token: ${weightWords(1 - largest.total)}` : null }));
  }
  if (own.from) lists.push(weightList({ side: "from", title: "attended by", largest: largestWeights(own.from, LISTED), tokens: queries, ongo: (at) => ongo("query", at) }));
  return [head, h("div", { class: "text-both" }, lists)];
}

/** The panel as one sentence for screen readers; empty while weights are loading. */
export function tokenSentence(token, weights) {
  const own = weights.ofToken(token), name = `${named(weights.tokensOf(token.side)[token.at])}, token ${token.at}`;
  if (!own) return weights.weightless ? name : "";
  const list = (values, tokens) => largestWeights(values, SPOKEN).top.map(([at, weight]) => `${named(tokens[at])} ${weightWords(weight)}`).join(", ");
  return [name, own.to && `attends to ${list(own.to, weights.text.keys)}`, own.from && `attended by ${list(own.from, weights.queries)}`].filter(Boolean).join("; ");
}

/**
 * The key with the largest weight of a query in each head of a layer. `links`: [{head, position, weight}]; `heads`: their
 * numbers; `onfollow(head, position)` is null if there is no layer below; `ongo(position)` scrolls to a key.
 */
export function linkList({ links, heads, tokens, onfollow, ongo }) {
  return h("ul", { class: "text-links" }, links.map(({ head, position, weight }) =>
    h("li", {}, h("span", {}, `H${heads[head]}`),
      h("button", { type: "button", class: "text-go", "data-key": `link-${head}`, onclick: () => ongo(position), "aria-label": `Head ${heads[head]}: ${named(tokens[position])}, token ${position}, ${weightWords(weight)}; go there` },
        h("bdi", {}, named(tokens[position])), h("small", {}, integer(position))),
      h("b", {}, weightWords(weight)),
      onfollow ? h("button", { type: "button", class: "text-follow", "data-key": `follow-${head}`, "aria-label": `Follow head ${heads[head]} to ${named(tokens[position])} one layer down`, title: "Follow: one layer down, at this token", onclick: () => onfollow(head, position) }, "follow ↓") : h("span", {}))));
}
