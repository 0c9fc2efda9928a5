// Find the head with the most similar statistics.

import { statisticsOf, rowOf } from "./heads.js";

/**
 * The head whose statistics are nearest to those of (layer, head): {layer, head}, or null if it is the only head.
 * The distance is Euclidean over the columns of the table of heads, each divided by its standard deviation.
 */
export function mostSimilarHead(group, view, layer, head) {
  const at = rowOf(group, layer, head), count = group.heads.length;
  const columns = statisticsOf(view).map((name) => scaled(view.heads[name]));
  let best = null, nearest = Infinity;
  for (let other = 0; other < group.layers.length * count; other++) {
    if (other === at) continue;
    const distance = columns.reduce((sum, column) => sum + (column[other] - column[at]) ** 2, 0);
    if (distance < nearest) [best, nearest] = [other, distance];
  }
  return best === null ? null : { layer: Math.floor(best / count), head: best % count };
}

/** Values standardized to mean 0 and standard deviation 1; missing values count as the mean. */
function scaled(values) {
  const known = values.filter((x) => x !== null);
  const mean = known.reduce((sum, x) => sum + x, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, x) => sum + (x - mean) ** 2, 0) / known.length) || 1;
  return values.map((x) => ((x ?? mean) - mean) / spread);
}
