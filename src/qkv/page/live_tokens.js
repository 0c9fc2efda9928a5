// The tokens of the text that a model reads, shaded by the weights of its last query.

import { legend } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { h } from "./dom.js";
import { longName } from "./live_edits.js";
import { quoted } from "./live_next.js";
import { named, percent, visible } from "./numbers.js";

export class LiveTokens {
  constructor() {
    this.title = h("figcaption", {});
    this.box = h("div", { class: "live-tokens", role: "group", "aria-label": "Tokens of the text" });
    this.element = h("figure", { class: "live-figure" }, this.title, this.box);
  }

  /**
   * `tokens` and the weight on each of them, `row`, in the head `at`; `made`: {token, probability} of those that the
   * model wrote, the last ones; `step`: {token, probability} of one that it has just written and not read yet, or null.
   */
  draw({ tokens, row, at, made, step }) {
    const top = Math.max(...row, 1e-9), first = tokens.length - made.length + (step ? 1 : 0); // of those it wrote, if the cuts are the same
    const chips = tokens.map((token, i) => {
      const wrote = i >= first ? made[i - first] : null, colour = ramp(Math.sqrt(row[i] / top));
      return h("span", {
        class: `live-token${wrote ? " live-made" : ""}${i === tokens.length - 1 ? " live-query" : ""}`, style: { background: css(colour), color: inkOn(colour) },
        "data-tip": `${named(token)}\nweight ${percent(row[i])}${wrote ? `\ncame with probability ${percent(wrote.probability)}` : ""}`,
      }, lines(token));
    });
    if (step) chips.push(h("span", { class: "live-token live-new", "data-tip": `${named(step.token)}\nprobability ${percent(step.probability)}` }, lines(step.token), h("sub", {}, percent(step.probability))));
    const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 8;
    this.box.replaceChildren(...chips);
    if (step || atEnd) this.box.scrollTop = this.box.scrollHeight;
    this.title.replaceChildren(
      h("span", {}, `${longName(at)}: where `, quoted(tokens.at(-1)), " looks", step ? [" to say ", quoted(step.token)] : null),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }));
  }
}

/** A token as it stands in a text: a line break is marked, and breaks the line. */
const lines = (token) => token.split("\n").map(visible).join("⏎\n");
