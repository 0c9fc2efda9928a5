// The tile pyramid of an attention map: geometry of tiles, loading in order of importance, an LRU cache, and painting.

import { cancel, counted, later } from "./state.js";

export const TILE = 256; // maximal side of a tile in pixels, as on the server
const MAX_REQUESTS = 4; // at a time
const MAX_CACHED = 320; // tiles: 256 kB of weights each, and as much for their pixels
const RETRY = 3000; // milliseconds before a failed tile is requested again
const SETTLE = 60; // milliseconds that a zoom level has to last before its tiles are requested

export const FIRST = { zoom: 0, i: 0, j: 0 }; // the tile that shows the whole map

/** The geometry of the tiles: zoom 0 is one tile, and each further zoom halves the number of tokens per pixel. */
export class Pyramid {
  /** `shape`: the server's description of a map, {n_queries, n_keys, deepest, pixel_queries, pixel_keys}. */
  constructor(shape) {
    Object.assign(this, { queries: shape.n_queries, keys: shape.n_keys, deepest: shape.deepest });
    this.pixel = { down: shape.pixel_queries ?? 1, across: shape.pixel_keys ?? 1 }; // more than 1 if only bins are stored
  }

  /** Whether the deepest tiles hold the weight of every pair. */
  get exact() {
    return this.pixel.down === 1 && this.pixel.across === 1;
  }

  /** The numbers of queries and keys per pixel at a zoom. */
  step(zoom) {
    const wide = 2 ** (this.deepest - zoom);
    return { down: wide * this.pixel.down, across: wide * this.pixel.across };
  }

  /** The zoom whose pixels cover one to two screen pixels, if a token covers `pixels`. */
  zoomFor(pixels) {
    // Never less than one, because downscaling would drop single peaks.
    const finest = pixels * Math.min(this.pixel.down, this.pixel.across);
    return Math.min(Math.max(Math.floor(this.deepest + Math.log2(Math.min(finest, 1)) + 0.02), 0), this.deepest);
  }

  /** The extent of a tile: its first query and key, and the number of tokens per pixel. */
  extent({ zoom, i, j }) {
    const { down, across } = this.step(zoom);
    return { top: i * TILE * down, left: j * TILE * across, down, across };
  }

  /** The bin at a zoom that contains a pair of tokens: its tile, its pixel in the tile, and its first and last tokens. */
  bin(zoom, query, key) {
    const { down, across } = this.step(zoom), row = Math.floor(query / down), column = Math.floor(key / across);
    return {
      place: { zoom, i: Math.floor(row / TILE), j: Math.floor(column / TILE) },
      row: row % TILE,
      column: column % TILE,
      queries: [row * down, Math.min((row + 1) * down, this.queries) - 1],
      keys: [column * across, Math.min((column + 1) * across, this.keys) - 1],
    };
  }

  /** The tiles of a zoom that intersect a box of tokens, from its centre outwards. */
  within(zoom, { top, left, bottom, right }) {
    const { down, across } = this.step(zoom), found = [];
    const tile = (at, n, side) => Math.floor(Math.min(Math.max(at, 0), n - 1) / side);
    const high = TILE * down, wide = TILE * across;
    for (let i = tile(top, this.queries, high); i <= tile(bottom, this.queries, high); i++)
      for (let j = tile(left, this.keys, wide); j <= tile(right, this.keys, wide); j++) found.push({ zoom, i, j });
    const far = ({ i, j }) => Math.hypot((i + 0.5) * high - (top + bottom) / 2, (j + 0.5) * wide - (left + right) / 2);
    return found.sort((a, b) => far(a) - far(b));
  }
}

/**
 * A part of a map at a zoom, assembled from its tiles: {top, left, rows, columns, values}, in pixels of the zoom; masked tiles are
 * zero. `box`: the first and last tokens, as for `Pyramid.within`; `tileOf(place)` is a promise of a tile.
 */
export async function assembled(pyramid, zoom, box, tileOf) {
  const { down, across } = pyramid.step(zoom), [top, bottom] = [box.top, box.bottom].map((at) => Math.floor(at / down)), [left, right] = [box.left, box.right].map((at) => Math.floor(at / across));
  const rows = bottom - top + 1, columns = right - left + 1, values = new Float32Array(rows * columns);
  for (const place of pyramid.within(zoom, box)) { // one after another: the server has other work, too
    const tile = await tileOf(place), from = Math.max(left - place.j * TILE, 0);
    for (let row = 0; row < (tile?.rows ?? 0); row++) {
      const at = place.i * TILE + row - top, to = Math.min(right + 1 - place.j * TILE, tile.columns);
      if (at >= 0 && at < rows) values.set(tile.values.subarray(row * tile.columns + from, row * tile.columns + to), at * columns + place.j * TILE + from - left);
    }
  }
  return { top, left, rows, columns, values };
}

const keyOfTile = (pool, { zoom, i, j }) => `${pool}/${zoom}/${i}/${j}`;

/** Loads wanted tiles, a few at a time, into an LRU cache. */
export class TileStore {
  /** `load(pool, place, {signal})` returns a promise of {rows, columns, values} or null; the callbacks report the outcome. */
  constructor(load, { onload, onerror }) {
    Object.assign(this, { load, onload, onerror });
    this.cache = new Map(); // key → tile, least recently used first
    this.requests = new Map(); // key → AbortController
    this.failed = new Map(); // key → time of the failure
    this.wanted = []; // the most important first
    this.level = null;
    this.settling = null;
    this.retrying = 0; // timer
  }

  /** A cached tile, or undefined. A masked tile has no rows. */
  get(pool, place) {
    const key = keyOfTile(pool, place), tile = this.cache.get(key);
    if (tile) this.cache.delete(key), this.cache.set(key, tile);
    return tile;
  }

  /** The number of wanted tiles that are not loaded yet. */
  get missing() {
    return this.wanted.filter(({ key }) => !this.cache.has(key)).length;
  }

  /** Set the wanted tiles, [[pool, place], …] with the most important first, and cancel others; `level`: the view's zoom. */
  want(tiles, level = this.level) {
    this.wanted = tiles.map(([pool, place]) => ({ key: keyOfTile(pool, place), pool, place }));
    const keys = new Set(this.wanted.map(({ key }) => key));
    for (const [key, request] of this.requests) if (!keys.has(key)) request.abort(), this.requests.delete(key);
    if (level !== this.level && this.level !== null) { // the zoom is still changing
      cancel(this.settling);
      this.settling = later(() => { this.settling = null; this.start(); }, SETTLE);
    } else if (!this.settling) this.start();
    this.level = level;
  }

  start() {
    const now = performance.now();
    for (const { key, pool, place } of this.wanted) {
      if (this.requests.size >= MAX_REQUESTS) return;
      if (this.cache.has(key) || this.requests.has(key)) continue;
      const wait = (this.failed.get(key) ?? -Infinity) + RETRY - now;
      if (wait > 0) { // a separate timer, so that other tiles need not wait
        this.retrying ||= setTimeout(() => { this.retrying = 0; this.start(); }, wait + 10);
        continue;
      }
      this.request(key, pool, place);
    }
  }

  async request(key, pool, place) {
    const request = new AbortController();
    this.requests.set(key, request);
    try {
      const tile = (await counted(this.load(pool, place, { signal: request.signal }))) || { rows: 0, columns: 0, values: new Float32Array(0) };
      if (request.signal.aborted) return;
      this.failed.delete(key);
      this.cache.set(key, { ...tile, canvas: null, look: null });
      while (this.cache.size > MAX_CACHED) this.cache.delete(this.cache.keys().next().value);
      this.onload(pool, place);
    } catch (error) {
      if (request.signal.aborted) return;
      this.failed.set(key, performance.now());
      this.onerror(error);
    } finally {
      if (this.requests.get(key) === request) this.requests.delete(key), this.start();
    }
  }

  /** Cancel all requests. */
  close() {
    cancel(this.settling);
    clearTimeout(this.retrying);
    this.wanted = [];
    for (const request of this.requests.values()) request.abort();
    this.requests.clear();
  }
}

/**
 * The colours of weights, in a table that is indexed by the upper 16 bits of a float32 (sign, exponent and 7 bits of the
 * fraction), so that painting needs one look-up per pixel for any scale. Zero is transparent.
 */
export class Look {
  /** `level(weight)` is from 0 to 1; `ramp(level)` is its colour. */
  constructor(level, ramp) {
    const bits = new Uint32Array(1), weight = new Float32Array(bits.buffer);
    const colours = Array.from({ length: 256 }, (_, at) => ramp(at / 255)).map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
    this.table = new Uint32Array(65536);
    for (let at = 1; at < 0x7f80; at++) {
      bits[0] = (at << 16) | 0x8000; // the middle of the floats with these upper bits
      this.table[at] = colours[Math.round(255 * Math.min(Math.max(level(weight[0]), 0), 1))];
    }
  }
}

/** The canvas of a tile in a look; painted again only if the look has changed. */
export function painted(tile, look) {
  if (tile.look === look) return tile.canvas;
  const canvas = tile.canvas || document.createElement("canvas");
  if (!tile.canvas) Object.assign(canvas, { width: tile.columns, height: tile.rows });
  const context = canvas.getContext("2d"), image = context.createImageData(tile.columns, tile.rows);
  const out = new Uint32Array(image.data.buffer), { values } = tile;
  const bits = new Uint32Array(values.buffer, values.byteOffset, values.length);
  for (let at = 0; at < out.length; at++) out[at] = look.table[bits[at] >>> 16];
  context.putImageData(image, 0, 0);
  Object.assign(tile, { canvas, look });
  return canvas;
}
