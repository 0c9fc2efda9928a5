// The whole attention map of a head as one matrix, assembled from tiles.

/** Up to this many tokens a side, a map is loaded at full resolution, otherwise as one pooled tile. */
export const MAX_EXACT = 512;

/**
 * The map of a head: {rows, columns, values, step, n_queries, n_keys, exact, why}; values row by row, or null if the
 * profile has no map. `exact`: one cell per weight. Otherwise a cell holds the largest weight of a block of step.down
 * queries × step.across keys; the last blocks may be smaller.
 */
export async function matrixOf(source, { group, text, layer, head }, { signal }) {
  const shape = await source.map(group, text, layer, head);
  const { kind, n_queries, n_keys, tile, deepest, why } = shape;
  if (kind === "none") return { values: null, n_queries, n_keys, exact: false, why };
  const pixel = { down: shape.pixel_queries ?? 1, across: shape.pixel_keys ?? 1 }; // more than 1 if only bins are stored
  const exact = kind !== "small" && Math.max(n_queries, n_keys) <= MAX_EXACT;
  const zoom = exact ? deepest : 0;
  const block = 2 ** (deepest - zoom), step = { down: block * pixel.down, across: block * pixel.across };
  const across = exact ? Math.ceil(n_keys / tile) : 1, down = exact ? Math.ceil(n_queries / tile) : 1;
  const places = Array.from({ length: down * across }, (_, at) => [Math.floor(at / across), at % across]);
  const tiles = await Promise.all(places.map(([i, j]) => source.tile(group, text, layer, head, "max", zoom, i, j, { signal })));
  const rows = exact ? n_queries : (tiles[0]?.rows ?? Math.ceil(n_queries / step.down));
  const columns = exact ? n_keys : (tiles[0]?.columns ?? Math.ceil(n_keys / step.across));
  const values = new Float32Array(rows * columns); // masked tiles stay zero
  tiles.forEach((part, at) => {
    if (!part) return;
    const [i, j] = places[at];
    for (let row = 0; row < part.rows; row++)
      values.set(part.values.subarray(row * part.columns, (row + 1) * part.columns), (i * tile + row) * columns + j * tile);
  });
  return { rows, columns, values, step, n_queries, n_keys, exact, why };
}

/** The total variation distance of each query: half the sum of |left − right| over the keys. */
export function totalVariation(left, right) {
  return Float32Array.from({ length: left.rows }, (_, row) => {
    let difference = 0, missing = 0; // rows may sum to less than 1, for instance with a learned sink
    for (let at = row * left.columns; at < (row + 1) * left.columns; at++) {
      difference += Math.abs(left.values[at] - right.values[at]);
      missing += left.values[at] - right.values[at];
    }
    return (difference + Math.abs(missing)) / 2;
  });
}
