// The tile pyramid of an attention map: which tiles a view needs, in what order they come, where they are kept.

export const TILE = 256; // pixels a side; the server's tiles are never larger
const AT_ONCE = 4; // requests under way
const KEPT = 320; // tiles: 256 kB of weights and as much of paint each
const RETRY = 3000; // milliseconds until a tile that failed is asked for again
const SETTLE = 60; // milliseconds that a zoom level has to last before its tiles are asked for

export const FIRST = { zoom: 0, i: 0, j: 0 }; // the tile that shows everything

/** Where tiles lie: zoom 0 is one tile, and each further zoom halves the tokens that a pixel covers. */
export class Pyramid {
  /** `shape`: what the server says of a map: {n_queries, n_keys, deepest, pixel_queries, pixel_keys}. */
  constructor(shape) {
    Object.assign(this, { queries: shape.n_queries, keys: shape.n_keys, deepest: shape.deepest });
    this.pixel = { down: shape.pixel_queries ?? 1, across: shape.pixel_keys ?? 1 }; // more than 1: only bins are known
  }

  /** Whether the deepest tiles hold the weight of every pair. */
  get exact() {
    return this.pixel.down === 1 && this.pixel.across === 1;
  }

  /** Queries and keys that a pixel of a zoom covers. */
  step(zoom) {
    const wide = 2 ** (this.deepest - zoom);
    return { down: wide * this.pixel.down, across: wide * this.pixel.across };
  }

  /** The zoom whose pixels are one to two of the screen's, of which a token has `pixels`. */
  zoomFor(pixels) {
    // Never less than one: a lone peak would be thinned away.
    const finest = pixels * Math.min(this.pixel.down, this.pixel.across);
    return Math.min(Math.max(Math.floor(this.deepest + Math.log2(Math.min(finest, 1)) + 0.02), 0), this.deepest);
  }

  /** What a tile shows: its first query and key, and how many tokens each of its pixels covers. */
  extent({ zoom, i, j }) {
    const { down, across } = this.step(zoom);
    return { top: i * TILE * down, left: j * TILE * across, down, across };
  }

  /** The bin of a zoom that holds a pair of tokens: its tile, its pixel there, and the first and last of its tokens. */
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

  /** The tiles of a zoom that a box of tokens touches, from its centre outwards. */
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

const keyOfTile = (pool, { zoom, i, j }) => `${pool}/${zoom}/${i}/${j}`;

/** Fetches tiles as they are wanted, a few at a time, and keeps the ones used last. */
export class TileStore {
  /** `load(pool, place, {signal})` promises {rows, columns, values} or null; the callbacks hear what came of it. */
  constructor(load, { onload, onerror }) {
    Object.assign(this, { load, onload, onerror });
    this.kept = new Map(); // in order of use
    this.flights = new Map(); // AbortControllers by key
    this.failed = new Map(); // when, by key
    this.wishes = [];
    this.level = null;
    this.settling = this.retrying = 0; // timers
  }

  /** A tile that is here, or undefined. One that the mask hides has no rows. */
  get(pool, place) {
    const key = keyOfTile(pool, place), tile = this.kept.get(key);
    if (tile) this.kept.delete(key), this.kept.set(key, tile);
    return tile;
  }

  /** How many of the wished tiles are still missing. */
  get missing() {
    return this.wishes.filter(({ key }) => !this.kept.has(key)).length;
  }

  /** From now on, these tiles and no others: [[pool, place], …], the most wanted first; `level`: the view's zoom. */
  want(wishes, level = this.level) {
    this.wishes = wishes.map(([pool, place]) => ({ key: keyOfTile(pool, place), pool, place }));
    const wanted = new Set(this.wishes.map(({ key }) => key));
    for (const [key, flight] of this.flights) if (!wanted.has(key)) flight.abort(), this.flights.delete(key);
    if (level !== this.level && this.level !== null) { // passing through; the next frame has others
      clearTimeout(this.settling);
      this.settling = setTimeout(() => { this.settling = 0; this.start(); }, SETTLE);
    } else if (!this.settling) this.start();
    this.level = level;
  }

  start() {
    const now = performance.now();
    for (const { key, pool, place } of this.wishes) {
      if (this.flights.size >= AT_ONCE) return;
      if (this.kept.has(key) || this.flights.has(key)) continue;
      const wait = (this.failed.get(key) ?? -Infinity) + RETRY - now;
      if (wait > 0) { // by a timer of its own: the others need not wait for it
        this.retrying ||= setTimeout(() => { this.retrying = 0; this.start(); }, wait + 10);
        continue;
      }
      this.fly(key, pool, place);
    }
  }

  async fly(key, pool, place) {
    const flight = new AbortController();
    this.flights.set(key, flight);
    try {
      const tile = (await this.load(pool, place, { signal: flight.signal })) || { rows: 0, columns: 0, values: new Float32Array(0) };
      if (flight.signal.aborted) return;
      this.failed.delete(key);
      this.kept.set(key, { ...tile, canvas: null, look: null });
      while (this.kept.size > KEPT) this.kept.delete(this.kept.keys().next().value);
      this.onload(pool, place);
    } catch (error) {
      if (flight.signal.aborted) return;
      this.failed.set(key, performance.now());
      this.onerror(error);
    } finally {
      if (this.flights.get(key) === flight) this.flights.delete(key), this.start();
    }
  }

  /** Stop all requests. */
  close() {
    clearTimeout(this.settling);
    clearTimeout(this.retrying);
    this.wishes = [];
    for (const flight of this.flights.values()) flight.abort();
    this.flights.clear();
  }
}

/**
 * Colours by weight. The table is indexed by the upper half of a float's bits (its exponent and seven bits of its
 * fraction), so that painting is one look-up for each pixel whatever the scale. Zero is left transparent.
 */
export class Look {
  /** `level(weight)` gives 0 to 1; `ramp` the colour of that. */
  constructor(level, ramp) {
    const bits = new Uint32Array(1), weight = new Float32Array(bits.buffer);
    const colours = Array.from({ length: 256 }, (_, at) => ramp(at / 255)).map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
    this.table = new Uint32Array(65536);
    for (let at = 1; at < 0x7f80; at++) {
      bits[0] = (at << 16) | 0x8000; // the middle of what shares these bits
      this.table[at] = colours[Math.round(255 * Math.min(Math.max(level(weight[0]), 0), 1))];
    }
  }
}

/** The tile as a canvas in a look; painted again only when the look is another. */
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
