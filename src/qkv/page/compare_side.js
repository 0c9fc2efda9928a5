// The sides of a comparison, their weights and curves, the difference of their maps, and the export of both.

import { paint } from "./charts.js";
import { colourOf, rgbOf } from "./colour.js";
import { rowOfCurve } from "./data.js";
import { csvOf } from "./export.js";
import { headName } from "./heads.js";
import { assembled, Pyramid } from "./tiles.js";

/** One side of a comparison, "A" or "B": a head, its map as of `matrixOf`, and its curves, once they are loaded. */
export class Side {
  constructor(name, source, at) {
    Object.assign(this, { name, source, at, ...source.at(at.group, at.text, at.layer, at.head), matrix: null, curves: null });
    this.headName = headName(this.group, at.layer, at.head);
    this.goesTo = this.view.heads.goes_to[this.row];
    this.colour = `var(${name === "A" ? "--accent" : "--second"})`;
  }

  /** Load the map and the curves concurrently. */
  async load(signal) {
    [this.matrix, this.curves] = await Promise.all([matrixOf(this.source, this.at, { signal }), this.source.curves(this.at.group, this.at.text)]);
  }

  /** The curve of this name, or null. */
  curve(name) {
    return this.curves[name] ? rowOfCurve(this.curves[name], this.row) : null;
  }
}

// The difference of two maps: its diverging colours and its drawing.

/** A diverging colour from that of A (−1) over the background (0) to that of B (1), as [r, g, b]. */
export function signedColour(x) {
  const from = rgbOf(colourOf("--paper")), to = rgbOf(colourOf(x < 0 ? "--accent" : "--second"));
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * Math.min(Math.abs(x), 1)));
}

/**
 * Fill a canvas with right − left of two maps of the same shape, and return the end of its scale. Cells whose difference is
 * no more than rounding stay transparent; the scale ends at ten times rounding or later.
 */
export function paintDifference(canvas, left, right) {
  const difference = Float32Array.from(left.values, (value, at) => right.values[at] - value);
  const rounding = Math.max(left.rounding, right.rounding), sizes = difference.map(Math.abs).filter((size) => size > rounding).sort();
  const top = Math.max(sizes[Math.floor(sizes.length * 0.998)] ?? 0, 10 * rounding); // scale by a high quantile, so that a few large differences do not make all others pale
  paint(canvas, left.rows, left.columns, (row, column) => {
    const size = difference[row * left.columns + column];
    return Math.abs(size) > rounding ? Math.max(0.5 + 0.5 * Math.sign(size) * Math.sqrt(Math.min(Math.abs(size) / top, 1)), 0.002) : 0;
  }, (level) => signedColour(2 * level - 1));
  return top;
}

// Export of the compare page as CSV.

/** A file name that names both heads. */
export const comparedName = ({ sides }) => sides.map(({ source, at, headName }) => `${source.name}-t${at.text}-${headName.replace(" · ", "-")}`).join("-and-");

/**
 * Statistics, then the curves by position, then the cells of the maps: "weight", or "largest_weight" of a block if a map
 * is pooled. Bins and blocks are listed at their first position. `statistics`: [{name, values: [a, b]}].
 */
export function comparedTable({ sides, variation }, statistics) {
  const rows = [], add = (what, position, key, a, b) => rows.push([what, position, key, a, b, a === null || b === null ? null : b - a]);
  for (const { name, values: [a, b] } of statistics) add(name, null, null, a, b);
  for (const name of ["received", "entropy"]) {
    const [a, b] = sides.map((side) => side.curve(name));
    if (!a || !b) continue;
    const n = sides.map(({ view }) => (name === "received" ? view.n_keys : view.n_queries));
    const starts = [a, b].map((values, side) => new Map(Array.from(values, (value, bin) => [Math.ceil((bin * n[side]) / values.length), value])));
    const positions = [...new Set([...starts[0].keys(), ...starts[1].keys()])].sort((x, y) => x - y);
    for (const position of positions) add(name, position, null, ...starts.map((values) => values.get(position) ?? null));
  }
  variation?.forEach((value, query) => rows.push(["total_variation", query, null, null, null, value]));
  const maps = sides.map(({ matrix }) => matrix), [a, b] = maps;
  const together = a.values && b.values && ["rows", "columns", "n_queries", "n_keys", "exact"].every((name) => a[name] === b[name]);
  const cells = together ? [maps] : [[a, null], [null, b]];
  for (const pair of cells) {
    const one = pair[0] ?? pair[1], what = one.exact ? "weight" : "largest_weight";
    one.values?.forEach((_, at) => {
      const row = Math.floor(at / one.columns);
      add(what, row * one.step.down, (at - row * one.columns) * one.step.across, ...pair.map((map) => map?.values[at] ?? null));
    });
  }
  return csvOf(["what", "position", "key", "a", "b", "difference"], rows);
}

// The whole attention map of a head as one matrix, assembled from tiles.

/** Up to this many tokens a side, a map is loaded at full resolution, otherwise as one pooled tile. */
export const MAX_EXACT = 512;

/**
 * The map of a head: {rows, columns, values, step, n_queries, n_keys, exact, why}; values row by row, or null if the
 * profile has no map. `rounding`: what a weight may be off by. `exact`: one cell per weight. Otherwise a cell holds the largest weight of a block of step.down
 * queries × step.across keys; the last blocks may be smaller.
 */
export async function matrixOf(source, { group, text, layer, head }, { signal }) {
  const shape = source.page.groups[group].texts[text].map, { kind, n_queries, n_keys, why } = shape;
  if (kind === "none") return { values: null, n_queries, n_keys, exact: false, why };
  const pyramid = new Pyramid(shape), exact = kind !== "small" && Math.max(n_queries, n_keys) <= MAX_EXACT, zoom = exact ? pyramid.deepest : 0;
  const whole = { top: 0, left: 0, bottom: n_queries - 1, right: n_keys - 1 };
  const map = await assembled(pyramid, zoom, whole, ({ i, j }) => source.tile(group, text, layer, head, "max", zoom, i, j, { signal }));
  const rounding = kind === "small" ? 0.004 : 1e-5; // small maps have 8 bits a weight
  return { ...map, step: pyramid.step(zoom), n_queries, n_keys, exact, rounding, why };
}

/** The total variation distance of each query: half the sum of |left − right| over the keys. */
export function totalVariation(left, right) {
  return Float32Array.from({ length: left.rows }, (_, row) => {
    let difference = 0, missing = 0; // rows may sum to less than 1, for instance with a learned sink
    for (let at = row * left.columns; at < (row + 1) * left.columns; at++) {
      difference += Math.abs(left.values[at] - right.values[at]);
      missing += left.values[at] - right.values[at];
    }
    return (difference + Math.abs(missing)) / 2;
  });
}
