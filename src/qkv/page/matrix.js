// A head's whole map as one matrix, put together from tiles.

/** Up to so many tokens a side a map is read weight by weight, beyond it as one pooled picture. */
export const WHOLE = 512;

/**
 * The map of a head: {rows, columns, values, step, n_queries, n_keys, exact, why}; values row by row. `exact`: one cell
 * for each weight; else cells hold the largest weight of a block of step.down queries × step.across keys, the last ones
 * of what is left. null values where the profile has no map.
 */
export async function matrixOf(source, { group, text, layer, head }, { signal }) {
  const shape = await source.map(group, text, layer, head);
  const { kind, n_queries, n_keys, tile, deepest, why } = shape;
  if (kind === "none") return { values: null, n_queries, n_keys, exact: false, why };
  const pixel = { down: shape.pixel_queries ?? 1, across: shape.pixel_keys ?? 1 }; // more than 1: only bins are known
  const exact = kind !== "small" && Math.max(n_queries, n_keys) <= WHOLE;
  const zoom = exact ? deepest : 0;
  const block = 2 ** (deepest - zoom), step = { down: block * pixel.down, across: block * pixel.across };
  const across = exact ? Math.ceil(n_keys / tile) : 1, down = exact ? Math.ceil(n_queries / tile) : 1;
  const places = Array.from({ length: down * across }, (_, at) => [Math.floor(at / across), at % across]);
  const tiles = await Promise.all(places.map(([i, j]) => source.tile(group, text, layer, head, "max", zoom, i, j, { signal })));
  const rows = exact ? n_queries : (tiles[0]?.rows ?? Math.ceil(n_queries / step.down));
  const columns = exact ? n_keys : (tiles[0]?.columns ?? Math.ceil(n_keys / step.across));
  const values = new Float32Array(rows * columns); // a tile that the mask hides stays zero
  tiles.forEach((part, at) => {
    if (!part) return;
    const [i, j] = places[at];
    for (let row = 0; row < part.rows; row++)
      values.set(part.values.subarray(row * part.columns, (row + 1) * part.columns), (i * tile + row) * columns + j * tile);
  });
  return { rows, columns, values, step, n_queries, n_keys, exact, why };
}

/** Of each query half the sum of |left − right| over the keys: how much of its weight would have to move. */
export function totalVariation(left, right) {
  return Float32Array.from({ length: left.rows }, (_, row) => {
    let apart = 0, missing = 0; // a learned sink takes weight that no key shows
    for (let at = row * left.columns; at < (row + 1) * left.columns; at++) {
      apart += Math.abs(left.values[at] - right.values[at]);
      missing += left.values[at] - right.values[at];
    }
    return (apart + Math.abs(missing)) / 2;
  });
}
