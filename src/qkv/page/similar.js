// Find the head with the most similar statistics.

import { statisticsOf, rowOf } from "./heads.js";

/**
 * The head whose statistics are nearest to those of (layer, head): {layer, head}, or null if it is the only head.
 * The distance is Euclidean over the columns of the table of heads, each divided by its standard deviation.
 */
export function mostSimilarHead(group, view, layer, head) {
  const at = rowOf(group, layer, head), count = group.heads.length, all = Array.from({ length: group.layers.length * count }, (_, other) => other);
  const best = nearestOf(distancesOf(view), at, all.filter((other) => other !== at));
  return best === null ? null : { layer: Math.floor(best / count), head: best % count };
}

/** The heads `rows` as a path: from head `at`, always to the nearest of those that are left. */
export function similarTo(group, view, at, rows) {
  const distance = distancesOf(view), left = new Set(rows), path = [];
  for (let here = left.has(at) ? at : rows[0]; here !== null && here !== undefined; here = nearestOf(distance, here, [...left])) {
    path.push(here);
    left.delete(here);
  }
  return path;
}

/** The squared distance of two heads. */
function distancesOf(view) {
  const columns = statisticsOf(view).map((name) => scaled(view.heads[name]));
  return (a, b) => columns.reduce((sum, column) => sum + (column[a] - column[b]) ** 2, 0);
}

function nearestOf(distance, at, others) {
  let best = null, nearest = Infinity;
  for (const other of others) {
    const far = distance(at, other);
    if (far < nearest) [best, nearest] = [other, far];
  }
  return best;
}

/** Values standardized to mean 0 and standard deviation 1; missing values count as the mean. */
function scaled(values) {
  const known = values.filter((x) => x !== null);
  const mean = known.reduce((sum, x) => sum + x, 0) / known.length;
  const spread = Math.sqrt(known.reduce((sum, x) => sum + (x - mean) ** 2, 0) / known.length) || 1;
  return values.map((x) => ((x ?? mean) - mean) / spread);
}
