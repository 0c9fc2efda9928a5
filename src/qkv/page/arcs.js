// Attention between the words of a short text: its tokens on a line, and an arc for every weight that is not small.

import { Drawn } from "./charts.js";
import { h, svg } from "./dom.js";
import { named, percent, truncated } from "./numbers.js";
import { partOf } from "./token_flow.js";

const ARC_TOKENS = 60; // tokens of a text whose arcs can be told apart
const ARC_WEIGHT = 0.05; // the smallest weight that has an arc
const ARC_TALL = 190, ARC_NAMES = 84; // pixels of the highest arc, and of the names of the tokens

/** Whether the weights on the first token are left out at first: if some head has a sink there. */
export const hasSink = (view) => Boolean(view.heads.sink?.some((share) => share > 0.3));

/** A switch that leaves out the first token. */
export const leaveSwitch = (on, onchange) => h("label", { class: "leave" },
  h("input", { type: "checkbox", "data-key": "leave", checked: on, onchange: ({ target }) => onchange(target.checked) }), " leave out the first token");

/** The query whose weights are shown first: in causal attention the last one, from which the next token is predicted. */
export function firstQuery({ causal }, { n_queries }, received) {
  if (causal) return n_queries - 1;
  return received.reduce((best, share, at) => (at && at < n_queries && share > received[best] ? at : best), Math.min(1, n_queries - 1));
}

export class Arcs {
  /** onchoose(position): a token was clicked. */
  constructor({ onchoose }) {
    this.onchoose = onchoose;
    this.chart = new Drawn(h("div", {}), (width) => this.shown && [this.drawing(width)]);
    this.element = h("figure", { class: "arcs", hidden: true }, h("figcaption", {}, h("span", {}, "Who attends to whom"), h("small", {}, `an arc for every weight of at least ${percent(ARC_WEIGHT)}, the thicker the larger`)), this.chart.element);
  }

  /** Show the weights `values` (row by row, a query each) between `tokens`, those of the token `pinned` in full colour; nothing of a long text. */
  show(shown) {
    this.shown = shown && shown.tokens.length <= ARC_TOKENS ? shown : null;
    this.element.hidden = !this.shown;
    this.chart.draw();
  }

  drawing(width) {
    const { tokens, turns, values, pinned, leave } = this.shown, n = tokens.length, left = 44, step = (width - left - 8) / n, x = (at) => left + step * (at + 0.5), part = (at) => partOf(turns, tokens[at], at);
    const pairs = [], highOf = ({ query, key }) => ARC_TALL * (Math.abs(query - key) / n) ** 0.6;
    for (let query = 0; query < n; query++)
      for (let key = leave ? 1 : 0; key < n; key++) if (key !== query && values[query * n + key] >= ARC_WEIGHT) pairs.push({ query, key, weight: values[query * n + key] });
    pairs.sort((a, b) => a.weight - b.weight);
    const floor = Math.max(40, ...pairs.map(highOf)) + 8;
    const arc = ({ query, key, weight }) => {
      const [from, to] = [x(Math.min(query, key)), x(Math.max(query, key))], high = highOf({ query, key }), own = query === pinned, other = key === pinned;
      return svg("path", { d: `M${from} ${floor}C${from} ${floor - 1.3 * high} ${to} ${floor - 1.3 * high} ${to} ${floor}`, fill: "none", stroke: other ? "var(--second)" : "var(--accent)",
        "stroke-width": 0.6 + 4 * weight, "stroke-opacity": (own || other || pinned === null ? 0.25 + 0.7 * weight : 0.06 + 0.12 * weight) },
      svg("title", {}, `“${named(tokens[query])}” → “${named(tokens[key])}” ${percent(weight)}`));
    };
    const shownFirst = ({ query, key }) => query === pinned || key === pinned;
    const said = pairs.slice(-4).reverse().map(({ query, key, weight }) => `${named(tokens[query])} to ${named(tokens[key])} ${percent(weight)}`).join(", ");
    return svg("svg", { width, height: floor + ARC_NAMES, viewBox: `0 0 ${width} ${floor + ARC_NAMES}`, role: "img", "aria-label": `Arcs between tokens. The largest weights: ${said || "none"}` },
      pairs.filter((pair) => !shownFirst(pair)).map(arc), pairs.filter(shownFirst).map(arc),
      tokens.map((token, at) => (part(at) === "template" && step < 13 && at !== pinned ? null : svg("text", { transform: `translate(${x(at) + 4} ${floor + 8}) rotate(-60)`, "text-anchor": "end", "font-size": part(at) === "template" ? 9.5 : Math.min(12, Math.max(step, 8.5)), "font-weight": at === pinned || part(at) === "role" ? 700 : 400, fill: at === pinned ? "var(--ink)" : "var(--soft)", style: { cursor: "pointer" }, onclick: () => this.onchoose(at) }, truncated(named(token), 12)))));
  }

  close() {
    this.chart.close();
  }
}
