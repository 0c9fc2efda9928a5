// What is under the crosshair of a map, or pinned, in words: tokens, weight, what its pixel pools.

import { h } from "./dom.js";
import { integer, named, weightWords } from "./numbers.js";

const EXACT_AFTER = 80; // milliseconds that the crosshair rests until the exact weight is asked for
const SPOKEN_AFTER = 350; // milliseconds that it rests until a screen reader says what is there

const range = ([first, last]) => (first === last ? integer(first) : `${integer(first)}–${integer(last)}`);

export class MapReadout {
  constructor(app, map) {
    Object.assign(this, { app, map, place: null, source: null });
    this.element = h("output", { class: "map-readout", "aria-live": "off" });
    this.exact = { pair: "", weight: null, waiting: "", timer: 0, flight: null };
  }

  /** Another head: its Source, and its place [group, text, layer, head] there. */
  show(source, place) {
    this.rest(null);
    Object.assign(this, { source, place });
    this.exact.pair = "";
  }

  hint(...words) {
    this.rest(null);
    this.element.replaceChildren(h("p", { class: "map-hint" }, ...words));
  }

  say() {
    const { content } = this.map, point = this.map.point ?? this.map.pin;
    if (!content) return;
    if (!content.store) return this.hint("There is no map to point at.");
    if (!point) return this.hint(h("span", { class: "map-with-mouse" }, "Point at the map for the weight there. Click pins it."), h("span", { class: "map-with-finger" }, "Tap the map for the weight there, and to pin it."));
    const { pyramid, tokens, store, profiles } = content, level = this.map.level, bin = pyramid.bin(level, point.query, point.key);
    const value = (pool) => { const tile = store.get(pool, bin.place); return tile ? (tile.rows ? tile.values[bin.row * tile.columns + bin.column] : 0) : null; };
    const name = (side, at) => h("span", {}, `${integer(at)} `, h("b", {}, `“${named(tokens[side][at])}”`));
    const single = pyramid.exact && level === pyramid.deepest, pair = `${point.query}/${point.key}`;
    const largest = value("max"), mean = value("mean");
    const weight = single ? largest ?? mean : this.exact.pair === pair ? this.exact.weight : null;
    this.element.replaceChildren(...[
      h("p", { class: "map-pair" }, h("small", {}, "query "), name("queries", point.query)),
      h("p", { class: "map-pair" }, h("small", {}, "→ key "), name("keys", point.key)),
      h("p", { class: "map-weight" }, h("strong", {}, weight === null ? (pyramid.exact ? "…" : "–") : weightWords(weight)), " ",
        h("small", {}, weight === 0 ? "hidden by the mask, or nothing" : pyramid.exact ? "exact weight" : "only bins are known")),
      single ? null : h("p", { class: "map-bin" }, `queries ${range(bin.queries)} × keys ${range(bin.keys)} `, h("br"),
        `largest ${largest === null ? "…" : weightWords(largest)}, mean ${mean === null ? "…" : weightWords(mean)}`),
      profiles && h("p", { class: "map-bin" }, `key receives ${weightWords(profiles.received[point.key])} of the weight `, h("br"),
        `query's entropy ${profiles.entropy[point.query].toFixed(2)} nats`),
    ].filter(Boolean));
    this.rest(single ? null : { point, pair, bin, known: largest !== null && mean !== null });
  }

  /** Once the crosshair rests: the exact weight there, and the other pooling of its bin. */
  rest(wanted) {
    const { exact } = this;
    if (wanted && exact.waiting === wanted.pair) return;
    clearTimeout(exact.timer);
    exact.flight?.abort();
    exact.waiting = wanted?.pair ?? "";
    if (!wanted || (exact.pair === wanted.pair && wanted.known)) return;
    exact.timer = setTimeout(() => this.ask(wanted), EXACT_AFTER);
  }

  async ask({ point, pair, bin }) {
    const { exact } = this, flight = (exact.flight = new AbortController());
    this.map.extra = ["max", "mean"].map((pool) => [pool, bin.place]);
    this.map.redraw();
    if (!this.map.content.pyramid.exact || exact.pair === pair) return;
    try {
      const weight = await this.source.pair(...this.place, point.query, point.key, { signal: flight.signal });
      if (!flight.signal.aborted) Object.assign(exact, { pair, weight }), this.say();
    } catch (error) {
      if (!flight.signal.aborted) this.app.trouble(error);
    }
  }

  /** Have a screen reader say it, once the crosshair rests. */
  speak() {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => this.app.announce([...this.element.children].map((line) => line.innerText.replaceAll("\n", ", ")).join(", ")), SPOKEN_AFTER);
  }

  hush() {
    clearTimeout(this.speaking);
  }

  close() {
    this.hush();
    this.rest(null);
  }
}
