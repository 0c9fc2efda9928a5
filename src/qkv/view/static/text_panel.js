// Beside the text: one token's strongest ties both ways, and each head's strongest key.

import { h } from "./dom.js";
import { integer, named } from "./numbers.js";

/** A weight as a share, in two digits or three. */
export function shareWords(weight) {
  const share = 100 * weight;
  if (!share) return "0\u00a0%";
  if (share < 0.01) return "< 0.01\u00a0%";
  return `${share >= 99.95 ? share.toFixed(0) : share >= 10 ? share.toFixed(1) : Number(share.toPrecision(2))}\u00a0%`;
}

/** The k largest weights, [[position, weight], …], and the sum of the others. */
export function strongest(weights, k) {
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
export function tieList({ side, title, note, ties, tokens, ongo }) {
  const most = ties.top.length ? ties.top[0][1] : 1, others = tokens.length - ties.top.length;
  return h("section", { class: `text-ties ${side}` },
    h("h3", {}, h("i", {}), title),
    ties.top.length ? h("ol", {}, ties.top.map(([at, weight]) =>
      h("li", {}, h("button", { type: "button", "data-key": `${side}-${at}`, onclick: () => ongo(at), "aria-label": `${named(tokens[at])}, token ${at}, ${shareWords(weight)}; go there` },
        h("bdi", {}, named(tokens[at])), h("small", {}, integer(at)), h("b", {}, shareWords(weight)),
        h("s", { style: { width: `${(100 * weight) / most}%` } }))))) : h("p", { class: "text-note" }, "nobody"),
    others > 0 && ties.rest > 0 ? h("p", { class: "text-note" }, side === "to" ? `the other ${integer(others)}: ${shareWords(ties.rest)}` : `the other ${integer(others)}: ${shareWords(ties.rest / others)} each on average`) : null,
    note ? h("p", { class: "text-note" }, note) : null);
}

/**
 * Each head's strongest key of a query in a layer. `links`: [{head, position, weight}]; `heads`: their names;
 * `onfollow(head, position)`, null where there is no layer below; `ongo(position)`.
 */
export function linkList({ links, heads, tokens, onfollow, ongo }) {
  return h("ul", { class: "text-links" }, links.map(({ head, position, weight }) =>
    h("li", {}, h("span", {}, `H${heads[head]}`),
      h("button", { type: "button", class: "text-go", "data-key": `link-${head}`, onclick: () => ongo(position), "aria-label": `Head ${heads[head]}: ${named(tokens[position])}, token ${position}, ${shareWords(weight)}; go there` },
        h("bdi", {}, named(tokens[position])), h("small", {}, integer(position))),
      h("b", {}, shareWords(weight)),
      onfollow ? h("button", { type: "button", class: "text-follow", "data-key": `follow-${head}`, "aria-label": `Follow head ${heads[head]} to ${named(tokens[position])} one layer down`, title: "Follow: one layer down, at this token", onclick: () => onfollow(head, position) }, "follow ↓") : h("span", {}))));
}
