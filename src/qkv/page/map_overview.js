// Around the map page: a small overview of the whole map, and the export.

import { Miniature } from "./charts.js";
import { csvOf } from "./export.js";
import { assembled, FIRST, painted } from "./tiles.js";

const MAX_SIZE = { w: 216, h: 150 }; // pixels

/** A small overview of the whole map that marks the visible part; a click or a drag moves the view. */
export class MapOverview extends Miniature {
  constructor(map) {
    super({
      name: "map-overview", label: "Overview of the whole map, with the visible part marked",
      ongo: (x, y) => { if (map.content) map.look({ ...map.view, x: x * map.size.keys, y: y * map.size.queries }); },
    });
    this.map = map;
  }

  draw() {
    const { map } = this, { store, pyramid, pool, lookOf } = map.content, { queries, keys } = pyramid, scale = Math.min(MAX_SIZE.w / keys, MAX_SIZE.h / queries);
    const width = Math.max(Math.round(keys * scale), 8), height = Math.max(Math.round(queries * scale), 8);
    Object.assign(this.element.style, { width: `${width}px`, height: `${height}px` });
    const tile = store?.get(pool, FIRST), canvas = tile?.rows ? painted(tile, lookOf(0)) : null;
    if (canvas) { // the last bins may reach beyond the map
      const { down, across } = pyramid.extent(FIRST);
      Object.assign(canvas.style, { width: `${(width * tile.columns * across) / keys}px`, height: `${(height * tile.rows * down) / queries}px`, "image-rendering": tile.columns > width / 2 ? "auto" : "pixelated" });
    }
    if (canvas !== this.pictures.firstChild) this.show(...(canvas ? [canvas] : []));
    const { origin, frame } = map.layout, share = (at, from, n) => (at - from) / map.layout.scale / n;
    this.mark({
      left: share(frame.x, origin.x, keys), right: share(frame.x + frame.w, origin.x, keys),
      top: share(frame.y, origin.y, queries), bottom: share(frame.y + frame.h, origin.y, queries),
    });
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
