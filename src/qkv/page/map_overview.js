// Around the map page: a small overview of the whole map, and the export.

import { h } from "./dom.js";
import { csvOf } from "./export.js";
import { assembled, FIRST, painted } from "./tiles.js";

const MAX_SIZE = { w: 216, h: 150 }; // pixels

/** A small overview of the whole map that marks the visible part; a click or a drag moves the view. */
export class MapOverview {
  constructor(map) {
    this.map = map;
    this.element = h("canvas", { class: "map-overview", role: "img", "aria-label": "Overview of the whole map, with the visible part marked" });
    this.element.addEventListener("pointerdown", (event) => { this.element.setPointerCapture(event.pointerId); this.go(event); });
    this.element.addEventListener("pointermove", (event) => { if (event.buttons) this.go(event); });
  }

  go(event) {
    if (!this.map.content) return;
    const box = this.element.getBoundingClientRect(), { queries, keys } = this.map.content.pyramid;
    this.map.look({ ...this.map.view, x: ((event.clientX - box.left) / box.width) * keys, y: ((event.clientY - box.top) / box.height) * queries });
  }

  /** Size the canvas to the proportions of the map. */
  fit() {
    const { queries, keys } = this.map.content.pyramid, scale = Math.min(MAX_SIZE.w / keys, MAX_SIZE.h / queries), ratio = devicePixelRatio || 1;
    const width = Math.max(keys * scale, 8), height = Math.max(queries * scale, 8);
    Object.assign(this.element.style, { width: `${Math.round(width)}px`, height: `${Math.round(height)}px` });
    Object.assign(this.element, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
  }

  clear() {
    this.element.getContext("2d").clearRect(0, 0, this.element.width, this.element.height);
  }

  draw() {
    const { store, pyramid, pool, colours, lookOf } = this.map.content, context = this.element.getContext("2d"), { width, height } = this.element;
    context.fillStyle = colours.empty;
    context.fillRect(0, 0, width, height);
    const tile = store?.get(pool, FIRST);
    if (tile?.rows) {
      const { down, across } = pyramid.extent(FIRST);
      context.imageSmoothingEnabled = tile.columns > width / 2;
      context.drawImage(painted(tile, lookOf(0)), 0, 0, (width * tile.columns * across) / pyramid.keys, (height * tile.rows * down) / pyramid.queries);
    }
    if (this.map.whole) return;
    const { origin, frame, scale } = this.map.layout, ratio = devicePixelRatio || 1;
    const x = (frame.x - origin.x) / scale / pyramid.keys * width, y = (frame.y - origin.y) / scale / pyramid.queries * height;
    const w = Math.max(frame.w / scale / pyramid.keys * width, 5 * ratio), k = Math.max(frame.h / scale / pyramid.queries * height, 5 * ratio);
    context.strokeStyle = colours.ink;
    context.lineWidth = 2 * ratio;
    context.strokeRect(Math.min(x, width - w), Math.min(y, height - k), w, k);
  }
}

// Export of the visible part of a map as CSV.

const MAX_ROWS = 250_000;

/**
 * The view as a table: one row per pair of tokens, or per bin if these would be too many. `tileOf(pool, place)` returns a
 * promise of a tile.
 */
export async function mapCsv(map, tileOf) {
  const { pyramid, pool, tokens } = map.content, { rows: [top, bottom], columns: [left, right] } = map.layout;
  const sizeAt = (zoom) => {
    const { down, across } = pyramid.step(zoom);
    return (Math.floor(bottom / down) - Math.floor(top / down) + 1) * (Math.floor(right / across) - Math.floor(left / across) + 1);
  };
  const exact = pyramid.exact && sizeAt(pyramid.deepest) <= MAX_ROWS;
  let zoom = exact ? pyramid.deepest : map.level;
  while (!exact && zoom > 0 && sizeAt(zoom) > MAX_ROWS) zoom--;
  const { down, across } = pyramid.step(zoom), part = await assembled(pyramid, zoom, { top, left, bottom, right }, (place) => tileOf(exact ? "max" : pool, place));
  const lines = Array.from(part.values, (weight, at) => {
    const row = part.top + Math.floor(at / part.columns), column = part.left + (at % part.columns);
    return exact
      ? [row, tokens.queries[row], column, tokens.keys[column], weight]
      : [row * down, Math.min((row + 1) * down, pyramid.queries) - 1, column * across, Math.min((column + 1) * across, pyramid.keys) - 1, weight];
  });
  const columns = exact ? ["query", "query_token", "key", "key_token", "weight"] : ["first_query", "last_query", "first_key", "last_key", `${pool}_weight`];
  return csvOf(columns, lines);
}
