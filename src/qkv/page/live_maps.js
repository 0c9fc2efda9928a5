// A head of a live model: its maps, the tokens that the last query attends to, and the export of both.

import { CellMap, legend, paint } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { h } from "./dom.js";
import { csvOf } from "./export.js";
import { headAt, longName, quoted } from "./live_words.js";
import { named, percent, visible, written } from "./numbers.js";

/** Two maps that share a crosshair, and the statistics beside them. */
export function liveMaps(answer) {
  const { tokens, maps, at, edited } = answer, n = tokens.length, [layer, head] = headAt(at);
  const top = Math.max(...maps.map((map) => map.reduce((most, weight) => Math.max(most, weight), 0)), 1e-9);
  const readout = h("output", { class: "readout", "aria-live": "polite" }, "Point at a cell, or focus a map and use the arrow keys.");
  const boxes = [];
  const onmove = (query, key) => {
    for (const box of boxes) box.mark([query, key]);
    const [before, after] = maps.map((map) => map[query * n + key]);
    readout.replaceChildren(`query ${query} `, h("b", {}, quoted(tokens[query])), ` → key ${key} `, h("b", {}, quoted(tokens[key])),
      key > query && !before && !after ? ": masked" : `: ${percent(before)}${edited ? ` → ${percent(after)}` : ""}`);
  };
  const figure = (title, map) => {
    const box = new CellMap({ name: "live-map", rows: n, columns: n, label: `${title}: ${longName(at)}, ${n} queries by ${n} keys`, onmove });
    paint(box.canvas, n, n, (row, column) => Math.sqrt(map[row * n + column] / top));
    boxes.push(box);
    return h("figure", {}, h("figcaption", {}, h("span", {}, title)), box.element);
  };
  const change = (name, unit) => [...new Set(["before", "after"].slice(0, edited ? 2 : 1).map((when) => written(answer[when][name][layer][head], unit)))].join(" → ");
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return [
    figure("As trained", maps[0]),
    figure(edited ? "With the edits" : "With edits (none yet)", maps[1]),
    h("div", { class: "live-aside" }, h("h2", {}, longName(at)),
      h("dl", {}, fact(["Mean weight on the first token, ", quoted(tokens[0])], n > 1 ? change("sink", "%") : "–"), fact("Mean entropy of a row", change("entropy", "nats"))),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }), h("small", {}, "Rows are queries, columns are keys."), readout),
  ];
}

// The tokens of a live text, shaded by the attention weights of the last query.

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
      // The space before a word and the break after it are outside of its box, which would otherwise reach into another line.
      const [, space, word, end] = /^( *)(.*?)(\n?)$/s.exec(lines(token));
      return [word ? space : "", h("span", {
        class: `live-token${sampled ? " live-made" : ""}${i === tokens.length - 1 ? " live-query" : ""}`, style: { background: css(colour), color: inkOn(colour) },
        "data-tip": `${named(token)}\nweight ${percent(row[i])}${sampled ? `\nsampled with probability ${percent(sampled.probability)}` : ""}`,
      }, word || space), end];
    }).flat();
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

// Export of the live page as CSV.

/** Probabilities, head statistics and weights before and after the edits. */
export function liveCsv(answer) {
  const { divergence, before, after, tokens, maps, at } = answer, n = tokens.length;
  const perHead = (name, words) => before[name].flatMap((layer, l) => layer.map((value, head) => [words, longName(`${l}.${head}`), value, after[name][l][head]]));
  return csvOf(["what", "name", "before", "after"], [
    ["KL divergence of the next token (nats)", "", 0, divergence],
    ...before.next.map(({ token, probability }, i) => ["probability of the next token", token, probability, after.next[i].probability]),
    ...perHead("sink", "mean weight on the first token"), ...perHead("entropy", "mean entropy (nats)"),
    ...tokens.flatMap((query, i) => tokens.slice(0, i + 1).map((key, j) => [`weight in ${longName(at)}`, `${i} ${query} → ${j} ${key}`, ...maps.map((map) => map[i * n + j])])),
  ]);
}

/** A name for exported files. */
export const liveFileName = (answer, live) => `live-${live.model}-layer${headAt(answer.at).join("-head")}`;
