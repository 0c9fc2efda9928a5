// Which head of a text does most nearly what another one does.

import { statisticsOf, rowOf } from "./heads.js";

/**
 * The head whose statistics are nearest to those of (layer, head): {layer, head}, or null if there is no other.
 * Distances between the columns of the table of heads, each divided by its spread over the heads.
 */
export function mostAlike(group, view, layer, head) {
  const at = rowOf(group, layer, head), count = group.heads.length;
  const columns = statisticsOf(view).map((name) => scaled(view.heads[name]));
  let best = null, nearest = Infinity;
  for (let other = 0; other < group.layers.length * count; other++) {
    if (other === at) continue;
    const apart = columns.reduce((sum, column) => sum + (column[other] - column[at]) ** 2, 0);
    if (apart < nearest) [best, nearest] = [other, apart];
  }
  return best === null ? null : { layer: Math.floor(best / count), head: best % count };
}

/** Values in units of their standard deviation; what a head lacks counts as the mean. */
function scaled(values) {
  const known = values.filter((x) => x !== null);
  const mean = known.reduce((sum, x) => sum + x, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, x) => sum + (x - mean) ** 2, 0) / known.length) || 1;
  return values.map((x) => ((x ?? mean) - mean) / spread);
}
