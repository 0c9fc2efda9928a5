// Export of an alignment as SVG and CSV. `shown`: [layer, head], or null for the mean of all heads.

import { restOf, weightsOf } from "./align_weights.js";
import { css, inkOn, ramp } from "./colour.js";
import { svg } from "./dom.js";
import { csvOf, svgPicture, svgText } from "./export.js";

const SIZE = 44; // pixels of a cell
const LEFT = 100, TOP = 84; // margins for the words

export function alignSvg(answer, shown, name) {
  const { source, target, layers, heads } = answer, weights = weightsOf(answer, shown);
  const which = layers * heads === 1 ? "" : shown ? `, layer ${shown[0]}, head ${shown[1]}` : ", mean of all heads";
  const cells = target.flatMap((_, t) => source.map((__, s) => {
    const weight = weights[t][s], colour = ramp(weight), x = LEFT + s * SIZE, y = TOP + t * SIZE;
    return [
      svg("rect", { x, y, width: SIZE - 1.5, height: SIZE - 1.5, rx: 2, fill: css(colour) }),
      weight >= 0.045 ? svgText(x + SIZE / 2 - 0.75, y + SIZE / 2 + 4, Math.round(100 * weight), { "text-anchor": "middle", fill: inkOn(colour) }) : null,
    ];
  }));
  return svgPicture({
    width: Math.max(LEFT + source.length * SIZE + 40, 420), height: TOP + target.length * SIZE, title: `${source.join(" ")} → ${target.join(" ")}`,
    note: `Attention of ${name}${which}: the weight in % of each output word (rows) on each input word (columns).`,
    parts: [
      source.map((word, s) => svgText(0, 0, word, { transform: `translate(${LEFT + s * SIZE + SIZE / 2} ${TOP - 8}) rotate(-45)` })),
      target.map((word, t) => svgText(LEFT - 10, TOP + t * SIZE + SIZE / 2 + 4, word, { "text-anchor": "end" })), cells,
    ],
  });
}

/** One row per output word, one column per input word with its position, because a word may occur twice. */
export function alignCsv(answer, shown, rest) {
  const { source, target, probability } = answer, weights = weightsOf(answer, shown);
  return csvOf(["position", "target", "probability", ...source.map((word, s) => `${s} ${word}`), ...(rest ? ["earlier output"] : [])],
    target.map((word, t) => [t, word, probability[t], ...weights[t], ...(rest ? [restOf(weights[t])] : [])]));
}
