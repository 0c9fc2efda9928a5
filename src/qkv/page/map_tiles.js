// Painting the tiles of a map onto a canvas. A missing tile is replaced by tiles of other zooms while it loads.

import { painted, TILE } from "./tiles.js";

/**
 * Paint tiles into `layout.frame` of a canvas with `ratio` pixels per pixel of the stage. `content` as in MapView;
 * `places`: the visible tiles of `zoom`.
 */
export function paintTiles(context, { layout, content, ratio, zoom, places }) {
  const { frame, origin, scale } = layout, { pyramid, store, pool, lookOf, colours } = content;
  const edge = (at) => Math.round(at * ratio);
  context.save();
  context.beginPath();
  context.rect(edge(frame.x), edge(frame.y), edge(frame.x + frame.w) - edge(frame.x), edge(frame.y + frame.h) - edge(frame.y));
  context.clip();
  context.fillStyle = colours.empty;
  context.fillRect(edge(frame.x), edge(frame.y), edge(frame.w) + 1, edge(frame.h) + 1);
  const pixel = pyramid.step(pyramid.deepest);
  context.imageSmoothingEnabled = scale * Math.max(pixel.down, pixel.across) < 2;
  context.imageSmoothingQuality = "low";

  // `only`: the area of a missing tile, in tokens, that a tile of another zoom replaces.
  const put = (place, tile, only = null) => {
    const { top, left, down, across } = pyramid.extent(place);
    const from = { x: Math.max(only?.left ?? -Infinity, layout.columns[0]), y: Math.max(only?.top ?? -Infinity, layout.rows[0]) };
    const to = { x: Math.min(only?.right ?? Infinity, layout.columns[1] + 1), y: Math.min(only?.bottom ?? Infinity, layout.rows[1] + 1) };
    const part = only ? (at) => at : null; // a replacement is cut exactly at the missing tile, other tiles at whole pixels
    const sx = Math.max((part ?? Math.floor)((from.x - left) / across), 0), sy = Math.max((part ?? Math.floor)((from.y - top) / down), 0);
    const ex = Math.min((part ?? Math.ceil)((to.x - left) / across), tile.columns), ey = Math.min((part ?? Math.ceil)((to.y - top) / down), tile.rows);
    if (ex <= sx || ey <= sy) return;
    const dx = edge(origin.x + (left + sx * across) * scale), dy = edge(origin.y + (top + sy * down) * scale);
    const dw = edge(origin.x + (left + ex * across) * scale) - dx, dh = edge(origin.y + (top + ey * down) * scale) - dy;
    if (dw > 0 && dh > 0) context.drawImage(painted(tile, lookOf(place.zoom)), sx, sy, ex - sx, ey - sy, dx, dy, dw, dh);
  };
  const ready = [];
  for (const place of places) {
    const tile = store.get(pool, place);
    if (tile) ready.push([place, tile]);
    else paintReplacement(place);
  }
  for (const [place, tile] of ready) if (tile.rows) put(place, tile);
  context.restore();

  function paintReplacement(place) {
    const { top, left, down, across } = pyramid.extent(place);
    for (let up = 1; up <= zoom; up++) {
      const above = { zoom: zoom - up, i: place.i >> up, j: place.j >> up }, tile = store.get(pool, above);
      if (!tile) continue;
      if (tile.rows) put(above, tile, { top, left, bottom: top + TILE * down, right: left + TILE * across });
      break;
    }
    if (zoom === pyramid.deepest) return;
    for (let child = 0; child < 4; child++) {
      const below = { zoom: zoom + 1, i: 2 * place.i + (child >> 1), j: 2 * place.j + (child & 1) }, tile = store.get(pool, below);
      if (tile?.rows) put(below, tile);
    }
  }
}
