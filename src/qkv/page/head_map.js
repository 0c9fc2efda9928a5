// A large map of one head, on the map page of the viewer, in a report and in notebooks: the stage with its zoom buttons,
// the controls of its colours, and a readout of what the crosshair points at.

import { choice, legend } from "./charts.js";
import { rowOfCurve } from "./data.js";
import { h, replace } from "./dom.js";
import { MapColours, MapView, SCALES } from "./map_view.js";
import { edgeScales } from "./map_scene.js";
import { integer, named, spread, weightWords } from "./numbers.js";
import { cancel, counted, later } from "./state.js";
import { FIRST, Pyramid, TileStore } from "./tiles.js";

const HOLD = 250; // milliseconds that the previous head may stay on the stage, to avoid flicker
const WAIT = 200; // milliseconds after which missing tiles are announced
const EXACT_AFTER = 80; // milliseconds that the crosshair rests before more about it is requested
const SPOKEN_AFTER = 350; // milliseconds that it rests before a screen reader announces the readout
const HINT = ["Point at the map to read a weight; a click pins it. Drag to move; zoom with + and −, or Ctrl and the wheel."];

/** Curves beside the map for all tokens, from the decoded curves of a text, whose bins may hold several tokens. */
export function edgeCurves(curves, view, row) {
  if (!curves.entropy) return null;
  const found = { received: spread(rowOfCurve(curves.received, row), view.n_keys), entropy: spread(rowOfCurve(curves.entropy, row), view.n_queries) };
  return found.entropy.some(Number.isNaN) ? null : { ...found, scales: edgeScales(found) };
}

const range = ([first, last]) => (first === last ? integer(first) : `${integer(first)}–${integer(last)}`);

export class HeadMap {
  /**
   * onpin(point): a pair {query, key} was selected, or null. onview({queries, keys}): the visible ranges changed. onset({pool}
   * or {scale}): a control was used. ondraw(): the stage was drawn. announce(text, after) as of the app. ontrouble(error).
   * `hint`: the readout while nothing is pointed at. `scales`: whether the scale of the colours can be chosen.
   */
  constructor({ hint = HINT, scales = false, onpin = () => {}, onview = () => {}, onset = () => {}, ondraw = () => {}, announce = () => {}, ontrouble }) {
    Object.assign(this, { hint, scales, onview, onset, ontrouble, pool: "max", scale: "log", loads: 0, head: null });
    this.canvas = h("canvas", { class: "map-canvas", tabindex: 0, role: "application", "aria-roledescription": "attention map" });
    this.map = new MapView(this.canvas, {
      onview: () => this.moved(),
      onpoint: (point, how) => { this.map.extra = []; this.read(); if (point && how !== "pointer") announce(() => this.spoken, SPOKEN_AFTER); },
      onpin: (point) => { this.pin(point); onpin(point); },
      onframe: () => { this.wait(); ondraw(); },
    });
    const button = (mark, name, act) => h("button", { type: "button", class: "quiet", "aria-label": name, title: name, onclick: () => { if (this.map.content) act(); } }, mark);
    this.status = h("p", { class: "map-status", role: "status", hidden: true }, "computing …");
    this.stage = h("div", { class: "map-stage" }, this.canvas, this.map.overlay, this.status,
      h("div", { class: "map-zoom", role: "group", "aria-label": "Zoom" },
        button("+", "Zoom in (+)", () => this.map.zoom(1, this.map.middle, true)), button("−", "Zoom out (−)", () => this.map.zoom(-1, this.map.middle, true)),
        button("Fit", "Whole map (0)", () => this.map.look(this.map.fit))));
    this.controls = h("div", { class: "map-controls" });
    this.readout = h("output", { class: "map-readout", "aria-live": "off" });
    this.note = h("p", { class: "map-note" });
    this.element = h("div", { class: "head-map" }, this.controls, this.stage, this.readout, this.note);
    this.forget();
  }

  /** Forget what was requested about the crosshair. */
  forget() {
    this.rest("");
    Object.assign(this, { asked: { pair: "", weight: null }, row: { query: null, weights: null } });
  }

  /**
   * Show a head: {shape, tile(pool, place, {signal}) or null if there is no map, pair(query, key, {signal}) or null, row(query,
   * {signal}), tokens: {queries, keys}, profiles, name, note()}. `shape` as in `Pyramid`; `profiles`: those of `edgeCurves`, or
   * a promise of them. Without `pair`, weights are read from tiles, to two digits. `view`: null for the whole map; by default
   * that of the head before, if it is of the same size. `whole`: whether to begin with the overview. Returns whether no other
   * head was requested meanwhile.
   */
  async show(head, { view, whole = true } = {}) {
    const load = ++this.loads, pyramid = new Pyramid(head.shape), here = () => this.map.content === content;
    let arrived;
    const first = new Promise((resolve) => { arrived = resolve; });
    const store = head.tile && new TileStore(head.tile, {
      onload: (pool, at) => {
        if (at.zoom === 0) { hues.measure(pool); arrived(); }
        if (here()) { if (at.zoom === 0) this.settings(); this.map.redraw(); this.read(); }
      },
      onerror: (error) => { arrived(); this.ontrouble(error); },
    });
    const hues = new MapColours(pyramid, store);
    const content = { pyramid, store, pool: this.pool, lookOf: (zoom) => hues.look(content.pool, this.scale, zoom), tokens: head.tokens, profiles: null, colours: this.colours() };
    const known = Promise.resolve(head.profiles).then((profiles) => { content.profiles = profiles; if (here()) { this.map.redraw(); this.read(); } });
    if (whole) store?.want([["max", FIRST]]);
    await counted(Promise.race([Promise.all([known, whole && store && first]), new Promise((resolve) => { setTimeout(resolve, whole ? HOLD : 0); })]));
    if (load !== this.loads) { store?.close(); return false; }
    const before = this.map.content?.pyramid, same = before?.queries === pyramid.queries && before?.keys === pyramid.keys;
    this.map.content?.store?.close();
    Object.assign(this, { head, hues });
    this.forget();
    Object.assign(content, { pool: this.pool, colours: this.colours() });
    this.map.extra = [];
    if (!same) this.map.point = this.map.pin = null;
    this.stage.style.setProperty("--proportion", Math.min(Math.max(pyramid.keys / pyramid.queries, 0.6), 2.2));
    this.canvas.setAttribute("aria-label", `Attention map, ${head.name}: ${integer(pyramid.queries)} queries by ${integer(pyramid.keys)} keys. Arrow keys move the crosshair, faster with Shift. Plus and minus zoom, 0 shows the whole map, Enter pins the crosshair, Escape unpins it.`);
    this.map.show(content, view === undefined ? (same && !this.map.whole ? this.map.view : null) : view);
    this.settings();
    this.read();
    return true;
  }

  /** Show no map, and say why. */
  clear(words) {
    this.loads++;
    this.map.content?.store?.close();
    this.map.clear();
    this.head = null;
    this.status.hidden = true;
    this.rest("");
    this.say(words);
    replace(this.controls);
    this.note.textContent = "";
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

  // ---- colours and controls ----

  /** The colours of the canvas: around the map, of masked pairs, and of the mark on the overview. */
  colours() {
    const style = getComputedStyle(this.stage), [paper, empty, ink] = ["panel", "masked", "ink"].map((name) => style.getPropertyValue(`--${name}`).trim());
    return { paper, empty, ink };
  }

  recolour() {
    if (!this.map.content) return;
    this.hues.forget();
    this.map.amend({ colours: this.colours() });
    this.settings();
  }

  /** Set the pooling ("max" or "mean") or the scale of the colours, one of SCALES. */
  set(changes) {
    Object.assign(this, changes);
    if (!this.map.content) return;
    this.map.amend({ pool: this.pool });
    this.settings();
  }

  settings() {
    const { pyramid, store, colours } = this.map.content, pools = !pyramid.exact || pyramid.deepest > 0;
    const masked = colours.empty !== colours.paper && store?.get("max", FIRST)?.values.includes(0);
    const chooser = (label, key, options) => choice(label, options, this[key], (value) => { this.set({ [key]: value }); this.onset({ [key]: value }); });
    this.drawnLevel = this.map.level;
    replace(this.controls,
      h("span", { class: "map-key" }, legend({ ...this.hues.ends(this.pool, this.scale, this.map.level), note: this.scales ? null : "logarithmic" }), masked ? h("span", { class: "legend" }, h("i", { class: "masked" }), "masked") : null),
      this.scales ? chooser("Colour", "scale", Object.entries(SCALES)) : null,
      pools ? chooser("Pooled by", "pool", [["max", "maximum"], ["mean", "mean"]]) : null);
    this.note.textContent = this.head.note();
  }

  moved() {
    if (!this.map.content || !this.map.width || !this.head) return;
    if (this.drawnLevel !== this.map.level) this.settings();
    if (this.map.point) this.read();
    const { rows, columns } = this.map.layout;
    this.onview({ queries: rows, keys: columns });
  }

  /** Say that tiles are being computed, if that takes long. */
  wait() {
    const { store } = this.map.content;
    clearTimeout(this.late);
    if (!store?.missing) this.status.hidden = true;
    else this.late = setTimeout(() => { this.status.hidden = !store.missing; }, WAIT);
  }

  // ---- the readout ----

  say(...words) {
    this.readout.replaceChildren(h("p", { class: "map-hint" }, ...words));
  }

  /** The readout for a screen reader. */
  get spoken() {
    return [...this.readout.children].map((line) => line.innerText.replaceAll("\n", ", ")).join(", ");
  }

  read() {
    const { content } = this.map, point = this.map.point ?? this.map.pin;
    if (!content || !this.head) return;
    if (!point || !content.store) {
      this.rest("");
      this.say(...(content.store ? this.hint : ["There is no map."]));
      return;
    }
    const { pyramid, tokens, store, profiles } = content, { level } = this.map, { head, asked, row } = this, { query, key } = point, pair = `${query}/${key}`;
    const bin = pyramid.bin(level, query, key), single = pyramid.exact && level === pyramid.deepest;
    const value = (pool) => { const tile = store.get(pool, bin.place); return tile ? (tile.rows ? tile.values[bin.row * tile.columns + bin.column] : 0) : null; };
    const nothing = head.pair ? "masked, or zero" : "masked"; // a page keeps masked pairs apart from tiny weights
    const largest = value("max"), mean = value("mean"), exact = single ? largest ?? mean : asked.pair === pair ? asked.weight : null;
    const word = (weight) => (weight === null ? "…" : weightWords(head.pair ? weight : Number(weight.toPrecision(2))));
    const name = (side, at) => h("span", {}, `${integer(at)} `, h("b", {}, "“", h("bdi", {}, named(tokens[side][at])), "” "));
    const aside = head.row && pyramid.exact && !this.map.whole, outside = aside && row.query === query ? this.outside(row.weights) : null;
    this.readout.replaceChildren(...[
      h("div", { class: "map-pair" }, h("small", {}, "query "), name("queries", query)),
      h("div", { class: "map-pair" }, h("small", {}, "→ key "), name("keys", key)),
      single || (head.pair && pyramid.exact) ? h("div", { class: "map-weight" }, h("strong", {}, word(exact)), " ", h("small", {}, exact === 0 ? nothing : head.pair ? "exact weight" : "")) : null,
      single ? null : h("div", { class: "map-bin" }, `queries ${range(bin.queries)} × keys ${range(bin.keys)} `, h("br"), largest === 0 && mean === 0 ? nothing : `largest ${word(largest)}, mean ${word(mean)}`),
      profiles?.exact ? h("div", { class: "map-bin" }, `the key receives ${weightWords(profiles.received[key])} of all attention `, h("br"), `entropy of the query ${profiles.entropy[query].toFixed(2)} nats`) : null,
      aside ? h("div", { class: "map-bin" }, outside ?? "…") : null,
    ].filter(Boolean));
    // Once the crosshair rests: the other pool of the bin, the exact weight, and all weights of the query.
    const wants = { tiles: !single && (largest === null || mean === null), weight: Boolean(!single && head.pair && pyramid.exact && asked.pair !== pair), row: Boolean(aside && row.query !== query) };
    this.rest(`${pair}/${level}/${wants.weight}/${wants.row}`, Object.values(wants).some(Boolean) ? () => this.ask(point, pair, bin, wants) : null);
  }

  /** Wait until the crosshair rests, unless this already waits for the same. */
  rest(wanted, act = null) {
    if (wanted === this.wanted) return;
    this.wanted = wanted;
    cancel(this.timer);
    this.request?.abort();
    this.timer = act && later(act, EXACT_AFTER);
  }

  async ask({ query, key }, pair, bin, wants) {
    const { head } = this, { signal } = (this.request = new AbortController());
    if (wants.tiles) {
      this.map.extra = ["max", "mean"].map((pool) => [pool, bin.place]);
      this.map.redraw();
    }
    try {
      const [weight, weights] = await Promise.all([wants.weight ? head.pair(query, key, { signal }) : null, wants.row ? head.row(query, { signal }) : null]);
      if (signal.aborted) return;
      if (wants.weight) this.asked = { pair, weight };
      if (wants.row) this.row = { query, weights };
      if (wants.weight || wants.row) this.read();
    } catch (error) {
      if (!signal.aborted) this.ontrouble(error);
    }
  }

  /** The share of a query's weight on keys that the zoomed map does not show, in words. */
  outside(weights) {
    const { columns: [first, last] } = this.map.layout;
    let all = 0, inside = 0;
    weights.forEach((weight, key) => { all += weight; if (key >= first && key <= last) inside += weight; });
    return `${weightWords(all > 0 ? Math.max(all - inside, 0) / all : 0)} of the query’s weight is outside this view`;
  }

  close() {
    this.loads++;
    this.rest("");
    clearTimeout(this.late);
    this.map.content?.store?.close();
    this.map.close();
  }
}
