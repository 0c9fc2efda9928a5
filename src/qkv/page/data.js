// What a page holds of its texts: curves along them and maps of their heads, decoded when they are needed.

import { integer } from "./numbers.js";
import { counted, Loads } from "./state.js";
import { TILE } from "./tiles.js";

/** The bytes of a base64 string. */
export const bytesOf = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));

/** Decode base64 and decompress (deflate). */
export async function inflated(base64) {
  const stream = new Blob([bytesOf(base64)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await counted(new Response(stream).arrayBuffer()));
}

const FROM_SCALE = { linear: (number) => number, log: Math.exp, root: (number) => number ** 2 };

/** The number that a code stands for, as described in qkv.report.payload; 0 for code 0. */
const numberOf = ({ scale, low, step }, code) => (code ? FROM_SCALE[scale](low + (code - 1) * step) : 0);

/** Decode the curves of a text, {name: {values, shape}}, from 16-bit codes; `index` describes where and how each is stored. */
export function decodedArrays(index, planes) {
  const length = planes.length / 2;
  return Object.fromEntries(Object.entries(index).map(([name, about]) => {
    const { shape, start } = about, values = new Float32Array(shape.reduce((product, dim) => product * dim, 1));
    for (let i = 0; i < values.length; i++) {
      const code = planes[start + i] + 256 * planes[length + start + i];
      values[i] = code === 65535 ? NaN : numberOf(about, code);
    }
    return [name, { values, shape }];
  }));
}

/** The row of a head in the table of heads. */
export const rowOf = (group, layer, head) => layer * group.heads.length + head;

/** One row of an array: the curve of a head, by its row in the table of heads, or that of a layer. */
export const rowOfCurve = ({ values, shape }, row) => values.subarray(row * shape.at(-1), (row + 1) * shape.at(-1));

const DECADES = 3; // of weights that the colours span

/** The colour level of a weight, 0 to 1, on a logarithmic scale below `high`. */
export const levelOf = (weight, high) => (weight > 0 ? Math.max(0.02, 1 + Math.log10(weight / high) / DECADES) : 0);

/** What a page (see qkv.report.payload) holds of its texts; `blob(id)`: its packed parts by name, or promises of them. */
export class PageData {
  constructor(page, blob) {
    Object.assign(this, { page, blob, cache: new Loads() });
  }

  /** A promise of the curves of a text: {name: {values, shape}}. */
  curves(g, t) {
    return this.cache.once(`curves-${g}-${t}`, async (id) => decodedArrays(this.page.groups[g].texts[t].arrays, await inflated(await this.blob(id))));
  }

  /** The StoredMaps of a text, or null if there are none. */
  maps(g, t) {
    const view = this.page.groups[g].texts[t], packed = async (id) => JSON.parse(await this.blob(id));
    if (!view.maps.length) return null;
    const bytes = (kind, row) => this.cache.once(`${kind}-${g}-${t}/${row}`, async () => inflated((await this.cache.once(`${kind}-${g}-${t}`, packed))[row]));
    return this.cache.once(`stored-${g}-${t}`, () => new StoredMaps(view, bytes));
  }

  /** A head of a text, for the parts of a page that show it: {page, group, view, maps, layer, head, row}. */
  at(g, t, layer, head) {
    const group = this.page.groups[g];
    return { page: this.page, group, view: group.texts[t], maps: this.maps(g, t), layer, head, row: rowOf(group, layer, head) };
  }

  /** A promise of the same with the `curves` of the text. */
  async head(g, t, layer, head) {
    return { ...this.at(g, t, layer, head), curves: await this.curves(g, t) };
  }
}

export class StoredMaps {
  /**
   * The maps of a view (`groups[g].texts[t]` of a page), of which `finest` and `smallest` may be one. bytes(kind, row): a promise
   * of the codes of a head. `exact`: whether the page has all weights.
   */
  constructor(view, bytes) {
    Object.assign(this, { view, bytes, finest: view.maps[0], smallest: view.maps.at(-1), exact: view.maps[0].kind === "weights" });
    const { n_queries, n_keys } = view, { rows, columns, bin_queries, bin_keys } = this.finest;
    this.shape = { n_queries, n_keys, pixel_queries: bin_queries, pixel_keys: bin_keys, deepest: Math.max(Math.ceil(Math.log2(Math.max(rows, columns) / TILE)), 0) };
  }

  /** A map of a head: {rows, columns, largest, average}, by bin; `average` is null if they are equal, or not known. */
  async of(row, about = this.finest) {
    const { rows, columns, kind } = about, codes = await this.bytes(kind, row), size = rows * columns;
    const table = Float32Array.from({ length: 256 }, (_, code) => numberOf(about, code));
    const [largest, average] = [codes.subarray(0, size), codes.subarray(size)].map((part) => Float32Array.from(part, (code) => table[code]));
    return { rows, columns, largest, average: average.length ? average : null };
  }

  /** The weights of a query on all keys, in an exact map. */
  async line(row, query) {
    const { columns, largest } = await this.of(row);
    return largest.subarray(query * columns, (query + 1) * columns);
  }

  /** A tile as in `Pyramid` (tiles.js), pooled by "max" or "mean": {rows, columns, values}. */
  async tile(row, pool, { zoom, i, j }) {
    const { rows, columns, largest, average } = await this.of(row), values = pool === "max" ? largest : (average ?? largest);
    const step = 2 ** (this.shape.deepest - zoom), { n_queries, n_keys, pixel_queries: down, pixel_keys: across } = this.shape;
    const top = i * TILE * step, left = j * TILE * step, bottom = Math.min(top + TILE * step, rows), right = Math.min(left + TILE * step, columns);
    const tile = { rows: Math.ceil((bottom - top) / step), columns: Math.ceil((right - left) / step) };
    const size = tile.rows * tile.columns, out = new Float32Array(size), pairs = new Float32Array(size);
    for (let q = top; q < bottom; q++)
      for (let k = left; k < right; k++) {
        const at = Math.floor((q - top) / step) * tile.columns + Math.floor((k - left) / step), value = values[q * columns + k];
        const count = Math.min(down, n_queries - q * down) * Math.min(across, n_keys - k * across); // the last bins may be smaller
        pairs[at] += count;
        out[at] = pool === "max" ? Math.max(out[at], value) : out[at] + value * count;
      }
    return { ...tile, values: pool === "max" ? out : out.map((sum, at) => sum / pairs[at]) };
  }

  /** How exactly the large map is kept, in words. */
  get precision() {
    const { low, step } = this.finest;
    return this.exact ? "The weights of the large map are kept in 8 bits on a square-root scale: right to 0.4 percentage points."
      : `The bins of the large map are kept in 8 bits on a logarithmic scale down to ${(100 * Math.exp(low)).toPrecision(1)}\u00a0%: right to ${(50 * step).toFixed(1)}\u00a0% of the value.`;
  }

  /** What a cell of the large map is, in words. */
  get note() {
    if (this.exact) return "A cell is one query and one key.";
    const { bin_queries, bin_keys, coarser } = this.finest;
    return `A cell is ${integer(bin_queries)} × ${integer(bin_keys)} weights. ` +
      (this.view.has_weights ? "The profile has all weights, too many for this page: profile.plot.map(layer, head) draws them."
        : coarser ? "The profile has a finer map, too large for this page: profile.plot.map(layer, head) draws it." : "For any part of this map, exact at any zoom, use qkv map or qkv view.");
  }
}
