// The pooled map of a head: for each bin of queries × keys its largest and its average weight.

/** Decode the codes of a head. `about`: the description of the pooled maps of a text, see qkv.report.payload. */
export function pooledMap(about, codes) {
  const { rows, columns, low, high } = about, size = rows * columns;
  const table = Float32Array.from({ length: 256 }, (_, c) => (c ? low * (high / low) ** ((c - 1) / 254) : 0));
  const decoded = (from) => Float32Array.from({ length: size }, (_, at) => table[codes[from + at]]);
  return { ...about, largest: decoded(0), average: codes.length > size ? decoded(size) : null };
}

const DECADES = 3; // of weights that the colours span

/** The colour level of a weight, 0 to 1, on a logarithmic scale below `high`. */
export const levelOf = (weight, high) => (weight > 0 ? Math.max(0.02, 1 + Math.log10(weight / high) / DECADES) : 0);
