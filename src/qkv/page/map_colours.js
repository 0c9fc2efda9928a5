// The colours of weights on the map: the ends of the colour scale and the mapping between them.

import { ramp } from "./colour.js";
import { weightWords } from "./numbers.js";
import { FIRST, Look } from "./tiles.js";

export const SCALES = { log: "log", root: "√", linear: "linear" };

/** The colours of the map of one head; `pyramid` and `store` as in MapView. */
export class MapColours {
  constructor(pyramid, store) {
    Object.assign(this, { pyramid, store, looks: new Map() });
    this.tops = { max: 1, mean: 1 }; // the largest weight of zoom 0, by pooling
  }

  /** Set the upper end of the scale from the tile that shows the whole map. */
  measure(pool) {
    this.tops[pool] = this.store.get(pool, FIRST).values.reduce((most, weight) => (weight > most ? weight : most), 1e-9);
    this.forget();
  }

  /** Drop all looks, after a change of the theme or the scale. */
  forget() {
    this.looks.clear();
  }

  /** The weights at both ends of the scale. Means shrink as bins grow, so the upper end depends on the zoom. */
  span(pool, scale, zoom) {
    const { deepest, keys } = this.pyramid;
    const near = deepest ? zoom / deepest : 0;
    const high = pool === "max" ? this.tops.max : this.tops.mean ** (1 - near) * this.tops.max ** near;
    return { high, low: scale === "log" ? Math.min(high / 100, 0.2 / keys) : 0 };
  }

  /** Both ends in words. */
  ends(pool, scale, zoom) {
    const { low, high } = this.span(pool, scale, zoom);
    return { low: scale === "log" ? `≤ ${weightWords(low)}` : "0", high: weightWords(high) };
  }

  /** The Look for the tiles of a zoom. */
  look(pool, scale, zoom) {
    const key = `${pool}/${scale}/${pool === "mean" ? zoom : ""}`;
    if (!this.looks.has(key)) {
      const { low, high } = this.span(pool, scale, zoom), range = Math.log(high / low);
      const level = { log: (weight) => Math.log(weight / low) / range, root: (weight) => Math.sqrt(weight / high), linear: (weight) => weight / high }[scale];
      this.looks.set(key, new Look(level, ramp));
    }
    return this.looks.get(key);
  }
}
