// Export of the visible part of a map as SVG, with its pixels embedded, and as CSV.

import { css, ramp } from "./colour.js";
import { csvOf, svgImage, svgPicture, svgRamp } from "./export.js";
import { shapesAsSvg } from "./map_scene.js";
import { TILE } from "./tiles.js";

const MAX_ROWS = 250_000;
const SHARP = 2; // pixels of the embedded picture per pixel of the stage

/** The view as an SVG file: the map as an embedded PNG, all else as vectors; `low` and `high` label the colour scale. */
export function mapSvg(map, { title, note, low, high }) {
  const { layout } = map, { frame, width, height } = layout, { store } = map.content;
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: Math.round(frame.w * SHARP), height: Math.round(frame.h * SHARP) });
  const shifted = { ...layout, frame: { ...frame, x: 0, y: 0 }, origin: { x: layout.origin.x - frame.x, y: layout.origin.y - frame.y } };
  if (store) map.tiles(canvas.getContext("2d"), shifted, SHARP);
  const colours = Array.from({ length: 32 }, (_, at) => css(ramp(at / 31)));
  return svgPicture({ width, height: height + 26, title, note, parts: [
    svgImage(canvas, { x: frame.x, y: frame.y, width: frame.w, height: frame.h }),
    shapesAsSvg(map.shapes(layout)),
    svgRamp(frame.x, height + 20, colours, low, high),
  ] });
}

/**
 * The view as a table: one row per pair of tokens, or per bin if these would be too many. `tileOf(pool, place)` returns a
 * promise of a tile.
 */
export async function mapCsv(map, tileOf) {
  const { pyramid, pool, tokens } = map.content, { rows: [top, bottom], columns: [left, right] } = map.layout;
  const pairs = (bottom - top + 1) * (right - left + 1);
  const bins = (zoom) => {
    const { down, across } = pyramid.step(zoom);
    return (Math.floor(bottom / down) - Math.floor(top / down) + 1) * (Math.floor(right / across) - Math.floor(left / across) + 1);
  };
  const exact = pyramid.exact && pairs <= MAX_ROWS;
  let zoom = exact ? pyramid.deepest : map.level;
  while (!exact && zoom > 0 && bins(zoom) > MAX_ROWS) zoom--;
  const { down, across } = pyramid.step(zoom);
  const columns = exact ? ["query", "query_token", "key", "key_token", "weight"] : ["first_query", "last_query", "first_key", "last_key", `${pool}_weight`];
  const lines = [];
  const reach = { i: [Math.floor(top / down / TILE), Math.floor(bottom / down / TILE)], j: [Math.floor(left / across / TILE), Math.floor(right / across / TILE)] };
  for (let i = reach.i[0]; i <= reach.i[1]; i++) {
    const strip = [];
    for (let j = reach.j[0]; j <= reach.j[1]; j++) strip.push(await tileOf(exact ? "max" : pool, { zoom, i, j }));
    const until = Math.min((i + 1) * TILE, Math.floor(bottom / down) + 1);
    for (let row = Math.max(i * TILE, Math.floor(top / down)); row < until; row++)
      for (let column = Math.floor(left / across); column <= Math.floor(right / across); column++) {
        const tile = strip[Math.floor(column / TILE) - reach.j[0]];
        const weight = tile ? tile.values[(row - i * TILE) * tile.columns + (column % TILE)] : 0; // no tile: masked
        lines.push(exact
          ? [row, tokens.queries[row], column, tokens.keys[column], weight]
          : [row * down, Math.min((row + 1) * down, pyramid.queries) - 1, column * across, Math.min((column + 1) * across, pyramid.keys) - 1, weight]);
      }
  }
  return csvOf(columns, lines);
}
