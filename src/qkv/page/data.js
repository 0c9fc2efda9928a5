// Decoding of the arrays in a page's data.

/** The bytes of a base64 string. */
export const bytesOf = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

/** Decode base64 and decompress (deflate). */
export async function inflated(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
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
