// The tokens of a live text, shaded by the attention weights of the last query.

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
   * `row`: the weight on each of the `tokens` in the head `at`; `generated`: {token, probability} of the last tokens, if
   * the model generated them; `step`: {token, probability} of a token that was just sampled and not yet read, or null.
   */
  draw({ tokens, row, at, generated, step }) {
    const top = Math.max(...row, 1e-9), first = tokens.length - generated.length + (step ? 1 : 0); // the first generated token, if tokenization is unchanged
    const chips = tokens.map((token, i) => {
      const sampled = i >= first ? generated[i - first] : null, colour = ramp(Math.sqrt(row[i] / top));
      return h("span", {
        class: `live-token${sampled ? " live-made" : ""}${i === tokens.length - 1 ? " live-query" : ""}`, style: { background: css(colour), color: inkOn(colour) },
        "data-tip": `${named(token)}\nweight ${percent(row[i])}${sampled ? `\nsampled with probability ${percent(sampled.probability)}` : ""}`,
      }, lines(token));
    });
    if (step) chips.push(h("span", { class: "live-token live-new", "data-tip": `${named(step.token)}\nprobability ${percent(step.probability)}` }, lines(step.token), h("sub", {}, percent(step.probability))));
    const atEnd = this.box.scrollTop + this.box.clientHeight >= this.box.scrollHeight - 8;
    this.box.replaceChildren(...chips);
    if (step || atEnd) this.box.scrollTop = this.box.scrollHeight;
    this.title.replaceChildren(
      h("span", {}, `${longName(at)}: weights of the query `, quoted(tokens.at(-1)), step ? [", which predicts ", quoted(step.token)] : null),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }));
  }
}

/** A token in the text: a line break is marked and breaks the line. */
const lines = (token) => token.split("\n").map(visible).join("⏎\n");
