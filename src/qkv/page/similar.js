// The heads whose attention maps are most like that of a head.

import { rowOf } from "./heads.js";

/** How similarities are defined, in words; `maps` as in the answer of the server. */
export const similarityMeaning = (maps) =>
  `1 − the mean Jensen-Shannon divergence of the rows, in bits: 1 for equal maps, 0 for maps without a common key${maps === "pooled" ? "; of the pooled maps" : ""}`;

/** The other heads that are most similar to (layer, head), the nearest first: [{layer, head, value}]. */
export function mostSimilar(group, { layer, head }, values, most) {
  const at = rowOf(group, layer, head), count = group.heads.length;
  return bySimilarity(values.map((_, other) => other).filter((other) => other !== at && values[other] !== null), values).slice(0, most)
    .map((other) => ({ layer: Math.floor(other / count), head: other % count, value: values[other] }));
}

/** Rows of the table of heads, the most similar first; those without a value last. */
export const bySimilarity = (rows, values) => rows.toSorted((a, b) => (values[b] ?? -1) - (values[a] ?? -1) || a - b);
