// The models of the page, and weights of an alignment as [target][source], of one head or averaged over all heads.

import { csvOf } from "./export.js";

/** The models with their vocabularies, and the captioner. */
export const alignment = (app) => app.session.pages.find(({ id }) => id === "align").data;

/** `shown`: [layer, head], or null for the mean of all heads. */
export function weightsOf({ weights }, shown) {
  if (shown) return weights[shown[0]][shown[1]];
  const all = weights.flat();
  return all[0].map((row, t) => row.map((_, s) => all.reduce((sum, one) => sum + one[t][s], 0) / all.length));
}

/** The rest of a row's weight: a decoder also attends to its own earlier output. */
export const restOf = (row) => Math.max(1 - row.reduce((sum, weight) => sum + weight, 0), 0);

/** Index of the largest weight of a row. */
export const strongest = (row) => row.indexOf(Math.max(...row));

/** An alignment as CSV: one row per output word, one column per input word with its position, because a word may occur twice. */
export function alignCsv(answer, shown, rest) {
  const { source, target, probability } = answer, weights = weightsOf(answer, shown);
  return csvOf(["position", "target", "probability", ...source.map((word, s) => `${s} ${word}`), ...(rest ? ["earlier output"] : [])],
    target.map((word, t) => [t, word, probability[t], ...weights[t], ...(rest ? [restOf(weights[t])] : [])]));
}
