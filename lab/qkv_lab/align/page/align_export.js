// Export of an alignment as CSV. `shown`: [layer, head], or null for the mean of all heads.

import { restOf, weightsOf } from "./align_weights.js";
import { csvOf } from "./export.js";

/** One row per output word, one column per input word with its position, because a word may occur twice. */
export function alignCsv(answer, shown, rest) {
  const { source, target, probability } = answer, weights = weightsOf(answer, shown);
  return csvOf(["position", "target", "probability", ...source.map((word, s) => `${s} ${word}`), ...(rest ? ["earlier output"] : [])],
    target.map((word, t) => [t, word, probability[t], ...weights[t], ...(rest ? [restOf(weights[t])] : [])]));
}
