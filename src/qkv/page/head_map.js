// A large map of one head inside another page: legend, zoom, axes, a crosshair, and a readout of the bin under it.

import { choice, legend } from "./charts.js";
import { h, replace } from "./dom.js";
import { MapColours, MapView } from "./map_view.js";
import { edgeScales } from "./map_scene.js";
import { integer, named, spread, weightWords } from "./numbers.js";
import { cancel, counted, later } from "./state.js";
import { FIRST, Pyramid, TileStore } from "./tiles.js";

const HOLD = 250; // milliseconds that the previous head may stay on the stage, to avoid flicker
const WAIT = 200; // milliseconds after which missing tiles are announced
const EXACT_AFTER = 80; // milliseconds that the crosshair rests before the exact weight is requested
const COLOURS = ["panel", "ink", "soft", "line", "accent", "area", "masked"];

/** Curves beside the map for all tokens, from the decoded curves of a text, whose bins may hold several tokens. */
export function edgeCurves(curves, view, row) {
  if (!curves.entropy) return null;
  const binsOf = ({ values, shape }) => values.subarray(row * shape[2], (row + 1) * shape[2]);
  const found = { received: spread(binsOf(curves.received), view.n_keys), entropy: spread(binsOf(curves.entropy), view.n_queries) };
  return found.entropy.some(Number.isNaN) ? null : { ...found, scales: edgeScales(found) };
}

const range = ([first, last]) => (first === last ? integer(first) : `${integer(first)}–${integer(last)}`);

export class HeadMap {
  /** onpin(point): a pair {query, key} was selected, or null. onview({queries, keys}): the visible ranges changed. ontrouble(error). */
  constructor({ onpin = () => {}, onview = () => {}, ontrouble }) {
    Object.assign(this, { onview, ontrouble, pool: "max", loads: 0, head: null, asked: { pair: "", weight: null } });
    this.canvas = h("canvas", { tabindex: 0, role: "application", "aria-roledescription": "attention map" });
    this.map = new MapView(this.canvas, {
      onview: () => this.moved(),
      onpoint: () => this.read(),
      onpin: (point) => { this.pin(point); onpin(point); },
      onframe: () => this.wait(),
    });
    const button = (mark, name, act) => h("button", { type: "button", class: "quiet", "aria-label": name, title: name, onclick: () => { if (this.map.content) act(); } }, mark);
    this.status = h("p", { class: "head-map-status", role: "status", hidden: true }, "computing …");
    this.stage = h("div", { class: "head-map-stage" }, this.canvas, this.status,
      h("div", { class: "head-map-zoom", role: "group", "aria-label": "Zoom" },
        button("+", "Zoom in (+)", () => this.map.zoom(1, this.map.middle, true)), button("−", "Zoom out (−)", () => this.map.zoom(-1, this.map.middle, true)),
        button("Fit", "Whole map (0)", () => this.map.look(this.map.fit))));
    // The wheel scrolls the page, unless the map was selected or Ctrl is held.
    this.stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && this.stage.getRootNode().activeElement !== this.canvas) event.stopPropagation();
    }, { capture: true });
    this.controls = h("div", { class: "head-map-controls" });
    this.readout = h("output", { class: "readout head-map-readout", "aria-live": "off" });
    this.note = h("p", { class: "note" });
    this.element = h("div", { class: "head-map" }, this.controls, this.stage, this.readout, this.note);
  }

  /**
   * Show a head: {shape, tile(pool, place, {signal}), pair(query, key, {signal}) or null, tokens: {queries, keys}, profiles
   * of `edgeCurves` or null, name, note}. `shape` as in `Pyramid`. Without `pair`, weights are read from tiles, to two digits.
   */
  async show(head) {
    const load = ++this.loads, pyramid = new Pyramid(head.shape);
    let arrived;
    const first = new Promise((resolve) => { arrived = resolve; });
    const store = new TileStore(head.tile, {
      onload: (pool, at) => {
        if (at.zoom === 0) { hues.measure(pool); arrived(); }
        if (this.map.content === content) { if (at.zoom === 0) this.settings(); this.map.redraw(); this.read(); }
      },
      onerror: (error) => { arrived(); this.ontrouble(error); },
    });
    const hues = new MapColours(pyramid, store);
    const content = { pyramid, store, pool: this.pool, lookOf: (zoom) => hues.look(content.pool, "log", zoom), tokens: head.tokens, profiles: head.profiles, colours: this.colours() };
    store.want([["max", FIRST]]);
    await counted(Promise.race([first, new Promise((resolve) => { setTimeout(resolve, HOLD); })]));
    if (load !== this.loads) return store.close();
    const before = this.map.content?.pyramid, same = before?.queries === pyramid.queries && before?.keys === pyramid.keys;
    this.map.content?.store.close();
    Object.assign(this, { head, hues });
    this.asked = { pair: "", weight: null };
    this.map.extra = [];
    if (!same) this.map.point = this.map.pin = null;
    this.stage.style.setProperty("--proportion", Math.min(Math.max(pyramid.keys / pyramid.queries, 0.6), 2.2));
    this.canvas.setAttribute("aria-label", `Attention map, ${head.name}: ${integer(pyramid.queries)} queries by ${integer(pyramid.keys)} keys. Arrow keys move the crosshair, plus and minus zoom, 0 shows the whole map.`);
    this.map.show(content, same && !this.map.whole ? this.map.view : null);
    this.settings();
    this.read();
  }

  /** Mark a pair {query, key}, or nothing. */
  pin(point) {
    this.map.pin = point;
    this.map.redraw();
    this.read();
  }

  /** Show these queries and keys, [first, last] each, as large as they fit. */
  cover(queries, keys) {
    if (!this.map.content || !this.map.width) return;
    const { area } = this.map.layout, across = keys[1] - keys[0] + 1, down = queries[1] - queries[0] + 1;
    this.map.look({ x: keys[0] + across / 2, y: queries[0] + down / 2, z: Math.log2(Math.min(area.w / across, area.h / down)) });
  }

  colours() {
    const style = getComputedStyle(this.element), found = Object.fromEntries(COLOURS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    return { ...found, paper: found.panel, empty: found.masked };
  }

  recolour() {
    if (!this.map.content) return;
    this.hues.forget();
    this.map.amend({ colours: this.colours() });
    this.settings();
  }

  settings() {
    const { pyramid, store } = this.map.content, masked = store.get("max", FIRST)?.values.includes(0), pools = !pyramid.exact || pyramid.deepest > 0;
    this.drawnLevel = this.map.level;
    replace(this.controls,
      h("span", { class: "head-map-key" }, legend({ ...this.hues.ends(this.pool, "log", this.map.level), note: "logarithmic" }), masked ? h("span", { class: "legend" }, h("i", { class: "masked" }), "masked") : null),
      pools ? choice("Pooled by", [["max", "maximum"], ["mean", "mean"]], this.pool, (pool) => { this.pool = pool; this.map.amend({ pool }); this.settings(); }) : null);
    this.note.textContent = this.head.note;
  }

  moved() {
    if (!this.map.content || !this.map.width) return;
    if (this.head && this.drawnLevel !== this.map.level) this.settings();
    const { rows, columns } = this.map.layout;
    this.onview({ queries: rows, keys: columns });
  }

  /** Say that tiles are being computed, if that takes long. */
  wait() {
    const { store } = this.map.content;
    clearTimeout(this.late);
    if (!store.missing) this.status.hidden = true;
    else this.late = setTimeout(() => { this.status.hidden = !store.missing; }, WAIT);
  }

  // ---- the readout ----

  read() {
    const { content } = this.map, point = this.map.point ?? this.map.pin;
    cancel(this.timer);
    if (!content || !this.head) return;
    if (!point) {
      this.readout.replaceChildren("Point at the map to read a weight; a click pins it. Drag to move; zoom with + and −, or Ctrl and the wheel.");
      return;
    }
    const { pyramid, tokens, store } = content, level = this.map.level, bin = pyramid.bin(level, point.query, point.key);
    const value = (pool) => { const tile = store.get(pool, bin.place); return tile ? (tile.rows ? tile.values[bin.row * tile.columns + bin.column] : 0) : null; };
    const word = (weight) => (weight === null ? "…" : weightWords(this.head.pair ? weight : Number(weight.toPrecision(2))));
    const name = (side, at) => h("b", {}, `${integer(at)} “`, h("bdi", {}, named(tokens[side][at])), "”");
    const single = pyramid.exact && level === pyramid.deepest, largest = value("max"), mean = value("mean"), pair = `${point.query}/${point.key}`;
    const weight = this.head.pair ? (this.asked.pair === pair ? this.asked.weight : null) : single ? largest : undefined;
    const masked = single ? largest === 0 : largest === 0 && mean === 0;
    this.readout.replaceChildren(...[
      h("span", {}, "query ", name("queries", point.query), " → key ", name("keys", point.key), weight === undefined ? null : [": ", h("b", {}, masked ? "masked" : word(weight))]),
      single ? null : h("span", {}, `queries ${range(bin.queries)} × keys ${range(bin.keys)}: `, masked ? "masked" : ["maximum ", h("b", {}, word(largest)), ", mean ", h("b", {}, word(mean))]),
    ].filter(Boolean));
    // Once the crosshair rests: the other pool of the bin, and the exact weight.
    const lacks = !single && (largest === null || mean === null), ask = this.head.pair && this.asked.pair !== pair;
    if (lacks || ask) this.timer = later(() => this.ask(point, pair, bin, lacks, ask), EXACT_AFTER);
  }

  async ask(point, pair, bin, lacks, ask) {
    const { head } = this;
    if (lacks) {
      this.map.extra = ["max", "mean"].map((pool) => [pool, bin.place]);
      this.map.redraw();
    }
    if (!ask) return;
    try {
      const weight = await head.pair(point.query, point.key);
      if (head === this.head) { this.asked = { pair, weight }; this.read(); }
    } catch (error) {
      this.ontrouble(error);
    }
  }

  close() {
    this.loads++;
    cancel(this.timer);
    clearTimeout(this.late);
    this.map.content?.store.close();
    this.map.close();
  }
}
