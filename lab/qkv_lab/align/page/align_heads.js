// Small matrices of all heads of an alignment, as buttons that select a head.

import { strongest, weightsOf } from "./align_weights.js";
import { paint } from "./charts.js";
import { h, replace } from "./dom.js";

/** `shown`: the selected head, [layer, head] or null for the mean; `onchoose` is called with "layer.head" or null. */
export function drawHeads(container, answer, shown, onchoose) {
  const { weights, layers, heads, source, target } = answer, columns = { style: { "grid-template-columns": `repeat(${heads}, minmax(0, 1fr))` } };
  const mirrored = (rows) => rows.filter((row, t) => strongest(row) === target.length - 1 - t).length;
  const button = (key, label, rows, chosen) => {
    const canvas = h("canvas", {});
    paint(canvas, target.length, source.length, (t, s) => rows[t][s]);
    return h("button", { type: "button", class: "align-head", "aria-pressed": chosen ? "true" : "false", "data-key": `head-${key}`, onclick: () => onchoose(key === "mean" ? null : key) },
      canvas, h("span", {}, label), h("small", {}, `${mirrored(rows)} of ${target.length}`));
  };
  replace(container, h("h2", {}, "Heads"),
    h("div", { class: "align-mean", ...columns }, button("mean", "Mean", weightsOf(answer, null), !shown),
      h("p", { class: "note" }, `Below each matrix: the number of rows whose largest weight is on the mirrored position. ${source.at(-1)} is the separator token after the symbols.`)),
    h("div", { class: "align-multiples", ...columns },
      Array.from({ length: layers }, (_, l) => Array.from({ length: heads }, (_, i) => button(`${l}.${i}`, `L${l} · H${i}`, weights[l][i], shown?.[0] === l && shown[1] === i)))));
}
