// Weights of an alignment, [target][source]: of one head, or the mean of all.

/** `look`: [layer, head], or null for the mean of all heads. */
export function weightsOf({ weights }, look) {
  if (look) return weights[look[0]][look[1]];
  const all = weights.flat();
  return all[0].map((row, t) => row.map((_, s) => all.reduce((sum, one) => sum + one[t][s], 0) / all.length));
}

/** The weight of a row on no source word: on what a decoder has said itself. */
export const restOf = (row) => Math.max(1 - row.reduce((sum, weight) => sum + weight, 0), 0);

/** Where a row has most weight. */
export const strongest = (row) => row.indexOf(Math.max(...row));
