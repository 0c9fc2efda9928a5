// Arrays that were sent as bytes: curves, and pooled maps.

import { counted } from "./state.js";

/** The bytes of a base64 string. */
export const bytesOf = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

/** Decode base64 and decompress (deflate). */
export async function inflated(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await counted(new Response(stream).arrayBuffer()));
}

/** Decode the curves of a text, {name: {values, shape}}, from 16-bit codes; `index` describes where and how each is stored. */
export function decodedArrays(index, planes) {
  const length = planes.length / 2;
  const arrays = {};
  for (const [name, { shape, start, scale, low, step }] of Object.entries(index)) {
    const size = shape.reduce((product, dim) => product * dim, 1);
    const values = new Float32Array(size);
    for (let i = 0; i < size; i++) {
      const code = planes[start + i] + 256 * planes[length + start + i];
      const number = low + (code - 1) * step;
      values[i] = code === 65535 ? NaN : scale === "log" ? (code === 0 ? 0 : Math.exp(number)) : number;
    }
    arrays[name] = { values, shape };
  }
  return arrays;
}

/** One row of an array: the curve of a head, by its row in the table of heads, or that of a layer. */
export const rowOfCurve = ({ values, shape }, row) => values.subarray(row * shape.at(-1), (row + 1) * shape.at(-1));

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
