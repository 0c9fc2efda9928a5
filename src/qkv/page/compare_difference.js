// The difference of two maps: its colours, and the picture of it.

import { rgbOf } from "./colour.js";
import { colourOf } from "./export.js";

/** From the colour of A (−1) over the page's own (0) to the colour of B (1), as [r, g, b]. */
export function signedColour(x) {
  const from = rgbOf(colourOf("--paper")), to = rgbOf(colourOf(x < 0 ? "--accent" : "--warm"));
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * Math.min(Math.abs(x), 1)));
}

/** Fill a canvas with right − left, cell by cell, of two maps of the same shape; where they agree it stays transparent. */
export function paintDifference(canvas, left, right) {
  const apart = Float32Array.from(left.values, (value, at) => right.values[at] - value);
  const sizes = apart.map(Math.abs).filter((size) => size > 0).sort();
  const top = sizes[Math.floor(sizes.length * 0.998)] ?? 1; // a few large ones must not make all others pale
  canvas.width = left.columns;
  canvas.height = left.rows;
  const context = canvas.getContext("2d"), image = context.createImageData(left.columns, left.rows);
  const table = Array.from({ length: 257 }, (_, level) => signedColour(level / 128 - 1));
  apart.forEach((size, cell) => {
    if (!size) return;
    const level = Math.sign(size) * Math.sqrt(Math.min(Math.abs(size) / top, 1));
    image.data.set([...table[Math.round(128 * (level + 1))], 255], 4 * cell);
  });
  context.putImageData(image, 0, 0);
}
