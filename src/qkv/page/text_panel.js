// Beside the text: one token, its strongest ties both ways, and each head's strongest key.

import { h } from "./dom.js";
import { integer, named, weightWords } from "./numbers.js";

const LISTED = 8, SPOKEN = 3; // ties

/** The k largest weights, [[position, weight], …], and the sum of the others. */
function strongest(weights, k) {
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

/** A list of ties: `side` "to" or "from", `ties` of strongest(), `tokens` at the other end. */
function tieList({ side, title, note, ties, tokens, ongo }) {
  const most = ties.top.length ? ties.top[0][1] : 1, others = tokens.length - ties.top.length;
  return h("section", { class: `text-ties ${side}` },
    h("h3", {}, h("i", {}), title),
    ties.top.length ? h("ol", {}, ties.top.map(([at, weight]) =>
      h("li", {}, h("button", { type: "button", "data-key": `${side}-${at}`, onclick: () => ongo(at), "aria-label": `${named(tokens[at])}, token ${at}, ${weightWords(weight)}; go there` },
        h("bdi", {}, named(tokens[at])), h("small", {}, integer(at)), h("b", {}, weightWords(weight)),
        h("s", { style: { width: `${(100 * weight) / most}%` } }))))) : h("p", { class: "text-note" }, "nobody"),
    others > 0 && ties.rest > 0 ? h("p", { class: "text-note" }, side === "to" ? `the other ${integer(others)}: ${weightWords(ties.rest)}` : `the other ${integer(others)}: ${weightWords(ties.rest / others)} each on average`) : null,
    note ? h("p", { class: "text-note" }, note) : null);
}

/** All that is known of a token {side, at}: `weights` of TextWeights, `ongo(side, position)`. */
export function tokenPanel(token, weights, ongo) {
  const { crossed, weightless, shape, text, queries, received } = weights, tokens = weights.tokensOf(token.side), tie = weights.tie(token);
  const receives = !crossed || token.side === "key" ? ` · receives ${weightWords(received[token.at])}` : "";
  const head = h("header", { class: "text-token" }, h("h2", {}, h("bdi", {}, `“${named(tokens[token.at])}”`)),
    h("p", {}, `${crossed ? token.side : "token"} ${integer(token.at)} of ${integer(tokens.length)}${receives}`));
  if (!tie) return [head, h("p", { class: "text-note" }, weightless ? shape.why : "…")];
  const lists = [];
  if (tie.to) {
    const ties = strongest(tie.to, LISTED);
    lists.push(tieList({ side: "to", title: "attends to", ties, tokens: text.keys, ongo: (at) => ongo("key", at), note: ties.total < 0.99 ? `on no token: ${weightWords(1 - ties.total)}` : null }));
  }
  if (tie.from) lists.push(tieList({ side: "from", title: "attended by", ties: strongest(tie.from, LISTED), tokens: queries, ongo: (at) => ongo("query", at) }));
  return [head, h("div", { class: "text-both" }, lists)];
}

/** The panel in one sentence, for those who hear it; empty while weights are still to come. */
export function tokenSentence(token, weights) {
  const tie = weights.tie(token), name = `${named(weights.tokensOf(token.side)[token.at])}, token ${token.at}`;
  if (!tie) return weights.weightless ? name : "";
  const list = (values, tokens) => strongest(values, SPOKEN).top.map(([at, weight]) => `${named(tokens[at])} ${weightWords(weight)}`).join(", ");
  return [name, tie.to && `attends to ${list(tie.to, weights.text.keys)}`, tie.from && `attended by ${list(tie.from, weights.queries)}`].filter(Boolean).join("; ");
}

/**
 * Each head's strongest key of a query in a layer. `links`: [{head, position, weight}]; `heads`: their names;
 * `onfollow(head, position)`, null where there is no layer below; `ongo(position)`.
 */
export function linkList({ links, heads, tokens, onfollow, ongo }) {
  return h("ul", { class: "text-links" }, links.map(({ head, position, weight }) =>
    h("li", {}, h("span", {}, `H${heads[head]}`),
      h("button", { type: "button", class: "text-go", "data-key": `link-${head}`, onclick: () => ongo(position), "aria-label": `Head ${heads[head]}: ${named(tokens[position])}, token ${position}, ${weightWords(weight)}; go there` },
        h("bdi", {}, named(tokens[position])), h("small", {}, integer(position))),
      h("b", {}, weightWords(weight)),
      onfollow ? h("button", { type: "button", class: "text-follow", "data-key": `follow-${head}`, "aria-label": `Follow head ${heads[head]} to ${named(tokens[position])} one layer down`, title: "Follow: one layer down, at this token", onclick: () => onfollow(head, position) }, "follow ↓") : h("span", {}))));
}
