// The readout beside a map: tokens, weight and bin of the pair under the crosshair or pinned.

import { h } from "./dom.js";
import { integer, named, weightWords } from "./numbers.js";

const EXACT_AFTER = 80; // milliseconds that the crosshair rests before the exact weight is requested
const SPOKEN_AFTER = 350; // milliseconds that it rests before a screen reader announces the readout

const range = ([first, last]) => (first === last ? integer(first) : `${integer(first)}–${integer(last)}`);

export class MapReadout {
  constructor(app, map) {
    Object.assign(this, { app, map, place: null, source: null });
    this.element = h("output", { class: "map-readout", "aria-live": "off" });
    this.exact = { pair: "", weight: null, waiting: "", timer: 0, request: null };
    this.outside = new OutsideView(this);
  }

  /** Show another head: its Source and its place [group, text, layer, head] there. */
  show(source, place) {
    this.rest(null);
    Object.assign(this, { source, place });
    this.outside.forget();
    this.exact.pair = "";
  }

  hint(...words) {
    this.rest(null);
    this.element.replaceChildren(h("p", { class: "map-hint" }, ...words));
  }

  update() {
    const { content } = this.map, point = this.map.point ?? this.map.pin;
    if (!content) return;
    if (!content.store) return this.hint("There is no map.");
    if (!point) return this.hint(h("span", { class: "map-with-mouse" }, "Point at the map to read a weight. A click pins it."), h("span", { class: "map-with-finger" }, "Tap the map to read and pin a weight."));
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
        h("small", {}, weight === 0 ? "masked, or zero" : pyramid.exact ? "exact weight" : "only pooled values are stored")),
      single ? null : h("p", { class: "map-bin" }, `queries ${range(bin.queries)} × keys ${range(bin.keys)} `, h("br"),
        `largest ${largest === null ? "…" : weightWords(largest)}, mean ${mean === null ? "…" : weightWords(mean)}`),
      profiles && h("p", { class: "map-bin" }, `the key receives ${weightWords(profiles.received[point.key])} of all attention `, h("br"),
        `entropy of the query ${profiles.entropy[point.query].toFixed(2)} nats`),
    ].filter(Boolean));
    if (!this.map.whole && pyramid.exact) this.element.append(h("p", { class: "map-bin" }, this.outside.words(point.query)));
    this.rest(single ? null : { point, pair, bin, known: largest !== null && mean !== null });
  }

  /** Once the crosshair rests, request the exact weight and the bin's tile with the other pooling. */
  rest(wanted) {
    const { exact } = this;
    if (wanted && exact.waiting === wanted.pair) return;
    clearTimeout(exact.timer);
    exact.request?.abort();
    exact.waiting = wanted?.pair ?? "";
    if (!wanted || (exact.pair === wanted.pair && wanted.known)) return;
    exact.timer = setTimeout(() => this.ask(wanted), EXACT_AFTER);
  }

  async ask({ point, pair, bin }) {
    const { exact } = this, request = (exact.request = new AbortController());
    this.map.extra = ["max", "mean"].map((pool) => [pool, bin.place]);
    this.map.redraw();
    if (!this.map.content.pyramid.exact || exact.pair === pair) return;
    try {
      const weight = await this.source.pair(...this.place, point.query, point.key, { signal: request.signal });
      if (!request.signal.aborted) Object.assign(exact, { pair, weight }), this.update();
    } catch (error) {
      if (!request.signal.aborted) this.app.trouble(error);
    }
  }

  /** Have a screen reader announce the readout, once the crosshair rests. */
  speak() {
    clearTimeout(this.speaking);
    this.speaking = setTimeout(() => this.app.announce([...this.element.children].map((line) => line.innerText.replaceAll("\n", ", ")).join(", ")), SPOKEN_AFTER);
  }

  hush() {
    clearTimeout(this.speaking);
  }

  close() {
    this.outside.forget();
    this.hush();
    this.rest(null);
  }
}

/** The share of a query's weight on keys that a zoomed map does not show. */
class OutsideView {
  constructor(readout) {
    Object.assign(this, { readout, query: null, weights: null, timer: 0, request: null });
  }

  words(query) {
    if (this.query !== query) this.load(query);
    if (!this.weights) return "…";
    const { origin, frame, scale } = this.readout.map.layout, first = Math.max(Math.floor((frame.x - origin.x) / scale), 0), last = Math.ceil((frame.x + frame.w - origin.x) / scale);
    let all = 0, inside = 0;
    this.weights.forEach((weight, key) => { all += weight; if (key >= first && key < last) inside += weight; });
    return `${weightWords(all > 0 ? Math.max(all - inside, 0) / all : 0)} of the query’s weight is outside this view`;
  }

  load(query) {
    this.forget();
    this.query = query;
    const request = (this.request = new AbortController()), { source, place, app } = this.readout;
    this.timer = setTimeout(async () => {
      try {
        this.weights = await source.rowWeights(...place, query, { signal: request.signal });
        this.readout.update();
      } catch (error) {
        if (!request.signal.aborted) app.trouble(error);
      }
    }, EXACT_AFTER);
  }

  forget() {
    clearTimeout(this.timer);
    this.request?.abort();
    Object.assign(this, { query: null, weights: null });
  }
}
