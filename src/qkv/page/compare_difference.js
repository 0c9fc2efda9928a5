// The difference of two maps: its diverging colours and its drawing.

import { rgbOf } from "./colour.js";
import { colourOf } from "./export.js";

/** A diverging colour from that of A (−1) over the background (0) to that of B (1), as [r, g, b]. */
export function signedColour(x) {
  const from = rgbOf(colourOf("--paper")), to = rgbOf(colourOf(x < 0 ? "--accent" : "--second"));
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * Math.min(Math.abs(x), 1)));
}

/** Fill a canvas with right − left of two maps of the same shape. Cells without a difference stay transparent. */
export function paintDifference(canvas, left, right) {
  const difference = Float32Array.from(left.values, (value, at) => right.values[at] - value);
  const sizes = difference.map(Math.abs).filter((size) => size > 0).sort();
  const top = sizes[Math.floor(sizes.length * 0.998)] ?? 1; // scale by a high quantile, so that a few large differences do not make all others pale
  canvas.width = left.columns;
  canvas.height = left.rows;
  const context = canvas.getContext("2d"), image = context.createImageData(left.columns, left.rows);
  const table = Array.from({ length: 257 }, (_, level) => signedColour(level / 128 - 1));
  difference.forEach((size, cell) => {
    if (!size) return;
    const level = Math.sign(size) * Math.sqrt(Math.min(Math.abs(size) / top, 1));
    image.data.set([...table[Math.round(128 * (level + 1))], 255], 4 * cell);
  });
  context.putImageData(image, 0, 0);
}
