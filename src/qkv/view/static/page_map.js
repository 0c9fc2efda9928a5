// The map page: one head's weights, query by key, at any zoom, with controls and a readout beside it.

import { h, replace } from "./dom.js";
import { ramp } from "./colour.js";
import { integer, named } from "./numbers.js";
import { choice, legend } from "./charts.js";
import { Look, painted, Pyramid, TileStore } from "./tiles.js";
import { edgeScales } from "./map_scene.js";
import { mapCsv, mapSvg } from "./map_export.js";
import { MapView } from "./map_view.js";

const REST = 400; // milliseconds without motion until the address follows
const EXACT_AFTER = 80; // milliseconds that the crosshair rests until the exact weight is asked for
const PATIENCE = 200; // milliseconds that the head shown before stays, so that nothing flickers
const SCALES = { log: "log", root: "√", linear: "linear" };
const FIRST = { zoom: 0, i: 0, j: 0 };

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** A weight as a share in three digits; powers of ten where it is next to nothing. */
function weightWords(weight) {
  if (weight === 0) return "0\u00a0%";
  const share = 100 * weight;
  if (share >= 0.001) return `${Number(share.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 })}\u00a0%`;
  const [digits, power] = share.toExponential(1).split("e");
  return `${digits}\u00a0·\u00a010${[...power.replace("+", "")].map((digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)]).join("")}\u00a0%`;
}

const range = ([first, last]) => (first === last ? integer(first) : `${integer(first)}–${integer(last)}`);

class MapPage {
  constructor(root, app) {
    this.app = app;
    this.loaded = ""; // which head is shown
    this.journey = 0; // counts loads, so that a slow one does not overtake a later one
    this.tops = { max: 1, mean: 1 }; // the largest weight of zoom 0, by pooling
    this.exact = { pair: "", weight: null, timer: 0, flight: null };
    this.build(root);
    this.map = new MapView(this.canvas, {
      onview: () => this.moved(),
      onpoint: (point, how) => this.pointed(point, how),
      onpin: (point) => app.go(point ? { cq: point.query, ck: point.key } : { cq: null, ck: null }, { replace: true }),
      onframe: () => this.drawn(),
    });
    this.stopTheme = app.onTheme(() => { this.recolour(); if (this.map.content) this.map.amend({ colours: this.colours }); this.controls(); });
    this.recolour();
  }

  build(root) {
    const button = (mark, label, act) => h("button", { type: "button", class: "map-button", "aria-label": label, title: label, onclick: act }, mark);
    this.canvas = h("canvas", { class: "map-canvas", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-describedby": "map-keys" });
    this.status = h("p", { class: "map-status", hidden: true });
    this.why = h("p", { class: "map-why", hidden: true });
    this.readout = h("output", { class: "map-readout", "aria-live": "off" });
    this.pinned = h("div", { class: "map-pinned" });
    this.settings = h("div", { class: "map-settings" });
    this.overview = h("canvas", { class: "map-overview", role: "img", "aria-label": "The whole map, and the part of it that is in view" });
    this.query = h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", "aria-label": "Query position", placeholder: "query" });
    this.key = h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", "aria-label": "Key position", placeholder: "key" });
    const jump = h("form", { class: "map-jump", onsubmit: (event) => { event.preventDefault(); this.jump(); } },
      h("span", {}, "Go to"), this.query, h("span", { "aria-hidden": "true" }, "→"), this.key, h("button", { type: "submit", class: "map-button" }, "Go"));
    const wide = matchMedia("(min-width: 901px)").matches;
    root.append(h("div", { class: "map-page" },
      h("div", { class: "map-stage" }, this.canvas, this.status, this.why,
        h("div", { class: "map-zoom", role: "group", "aria-label": "Zoom" },
          button("+", "Zoom in (+)", () => this.map.zoom(1, this.map.middle, true)),
          button("−", "Zoom out (−)", () => this.map.zoom(-1, this.map.middle, true)),
          button("Fit", "Whole map (0)", () => this.map.look(this.map.fit)))),
      h("aside", { class: "map-side", "aria-label": "Readout and settings" },
        this.readout, this.pinned,
        h("details", { class: "map-more", open: wide }, h("summary", {}, "Colour, pooling, overview, jump"),
          this.settings,
          h("div", { class: "map-overview-box" }, this.overview),
          jump,
          h("button", { type: "button", class: "link map-copy", onclick: (event) => this.copy(event.target) }, "Copy link to this view"))),
      h("p", { id: "map-keys", class: "unseen" }, "Arrow keys move the crosshair, faster with Shift. Plus and minus zoom, 0 shows the whole map, Enter pins the crosshair, Escape lets it go.")));
    const go = (event) => {
      const box = this.overview.getBoundingClientRect(), { queries, keys } = this.map.content.pyramid;
      this.map.look({ ...this.map.view, x: ((event.clientX - box.left) / box.width) * keys, y: ((event.clientY - box.top) / box.height) * queries });
    };
    this.overview.addEventListener("pointerdown", (event) => { this.overview.setPointerCapture(event.pointerId); go(event); });
    this.overview.addEventListener("pointermove", (event) => { if (event.buttons) go(event); });
  }

  // ---- state ----

  get pool() { return this.app.state.pool === "mean" ? "mean" : "max"; }
  get scale() { return SCALES[this.app.state.scale] ? this.app.state.scale : "log"; }
  get place() { const { group, text, layer, head } = this.app.state; return [group, text, layer, head]; }

  /** The view that the address asks for, or null. */
  get asked() {
    const { x, y, z } = this.app.state;
    return [x, y, z].every(Number.isFinite) ? { x, y, z } : null;
  }

  get pin() {
    const { cq, ck } = this.app.state, { pyramid } = this.map.content;
    return Number.isInteger(cq) && Number.isInteger(ck) && cq >= 0 && ck >= 0 && cq < pyramid.queries && ck < pyramid.keys ? { query: cq, key: ck } : null;
  }

  async update(changed) {
    const { source, group, text } = this.app.state, textOf = `${source}/${group}/${text}`;
    if (this.loaded && textOf !== this.textOf && !["x", "y", "z"].some((key) => changed.has(key)) && this.asked) {
      this.textOf = textOf; // positions of the text before mean nothing in this one
      this.app.go({ x: null, y: null, z: null, cq: null, ck: null }, { replace: true });
      return;
    }
    const another = textOf !== this.textOf;
    this.textOf = textOf;
    if (`${textOf}/${this.place}` !== this.loaded) await this.load(another);
    else if (this.map.content) {
      if (["pool", "scale"].some((key) => changed.has(key))) this.controls(), this.map.amend({ pool: this.pool });
      if (["x", "y", "z"].some((key) => changed.has(key))) this.obey();
      if (["cq", "ck"].some((key) => changed.has(key))) this.repin();
    }
  }

  /** Show what the address says, unless it is what this page wrote there. */
  obey() {
    const asked = this.asked ?? this.map.fit, written = this.written();
    if (asked.x === written.x && asked.y === written.y && asked.z === written.z) return;
    if (!this.asked && written.x === null) return;
    clearTimeout(this.rest);
    this.map.look(asked);
    clearTimeout(this.rest);
    this.entry = { ...this.map.view };
  }

  async load(another) {
    const journey = ++this.journey, { app } = this, place = this.place;
    this.loaded = `${this.textOf}/${place}`;
    const source = await app.source(), shape = await source.map(...place);
    if (journey !== this.journey) return;
    const page = source.page.groups[place[0]], text = page.texts[place[1]];
    const pyramid = new Pyramid(shape), tokens = { keys: text.keys, queries: text.queries || text.keys };
    const load = (pool, { zoom, i, j }, options) => source.tile(...place, pool, zoom, i, j, options);
    let arrived;
    const first = new Promise((resolve) => { arrived = resolve; });
    const store = shape.kind === "none" ? null : new TileStore(load, {
      onload: (pool, at) => { if (at.zoom === 0) this.measure(store, pool), arrived(); if (this.map.content?.store === store) this.map.redraw(), this.say(); },
      onerror: (error) => { arrived(); app.trouble(error); },
    });
    this.store?.close();
    this.store = store;
    this.tops = { max: 1, mean: 1 };
    store?.want([["max", FIRST]]);
    const known = source.profiles(...place).then(
      (profiles) => { const all = { ...profiles, scales: edgeScales(profiles) }; if (journey === this.journey && this.map.content?.store === store) this.map.amend({ profiles: all }); return all; },
      (error) => { if (shape.kind === "exact") app.trouble(error); return null; });
    const profiles = await Promise.race([Promise.all([known, store && first]).then(([all]) => all), pause(PATIENCE).then(() => null)]);
    if (journey !== this.journey) return;
    const keep = !another && this.map.content ? this.map.view : null;
    this.looks = new Map();
    this.shape = shape;
    this.names = { layer: page.layers[place[2]], head: page.heads[place[3]] };
    this.canvas.setAttribute("aria-label", `Attention map of layer ${this.names.layer}, head ${this.names.head}: ${integer(shape.n_queries)} queries by ${integer(shape.n_keys)} keys`);
    this.why.hidden = shape.kind !== "none"; // the small map says so beside it
    this.why.textContent = shape.why ?? "";
    this.query.max = shape.n_queries - 1;
    this.key.max = shape.n_keys - 1;
    this.exact.pair = "";
    this.map.extra = [];
    this.map.point = null;
    this.map.show({ pyramid, store, pool: this.pool, lookOf: (zoom) => this.lookOf(zoom), tokens, profiles, colours: this.colours });
    this.map.look(this.asked ?? keep ?? this.map.fit);
    clearTimeout(this.rest);
    this.entry = { ...this.map.view };
    this.map.pin = this.pin;
    this.map.redraw();
    this.sizeOverview();
    this.controls();
    this.repin();
  }

  // ---- colours ----

  recolour() {
    const style = getComputedStyle(document.documentElement), names = ["paper", "ink", "soft", "line", "accent", "area", "warm"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.colours.empty = this.colours.paper; // what the mask hides is no weight at all
    this.looks = new Map();
  }

  /** Learn the largest weight from the tile that shows everything. */
  measure(store, pool) {
    const tile = store.get(pool, FIRST);
    this.tops[pool] = tile.values.reduce((most, weight) => (weight > most ? weight : most), 1e-9);
    this.looks = new Map();
    if (this.map.content?.store === store) this.controls();
  }

  /** The weights at the two ends of the colours. Means shrink as bins grow, so their top depends on the zoom. */
  span(pool, zoom) {
    const { deepest, keys } = this.map.content.pyramid;
    const near = deepest ? zoom / deepest : 0;
    const high = pool === "max" ? this.tops.max : this.tops.mean ** (1 - near) * this.tops.max ** near;
    return { high, low: this.scale === "log" ? Math.min(high / 100, 0.2 / keys) : 0 };
  }

  lookOf(zoom) {
    const { pool } = this.map.content, key = `${pool}/${this.scale}/${pool === "mean" ? zoom : ""}`;
    if (!this.looks.has(key)) {
      const { low, high } = this.span(pool, zoom), range = Math.log(high / low);
      const level = { log: (weight) => Math.log(weight / low) / range, root: (weight) => Math.sqrt(weight / high), linear: (weight) => weight / high }[this.scale];
      this.looks.set(key, new Look(level, ramp));
    }
    return this.looks.get(key);
  }

  // ---- controls ----

  controls() {
    if (!this.map.content) return;
    const level = this.map.level, { low, high } = this.span(this.pool, level), { exact, deepest } = this.map.content.pyramid;
    this.drawnLevel = level;
    const pooled = !exact || level < deepest;
    replace(this.settings,
      legend({ low: this.scale === "log" ? `≤ ${weightWords(low)}` : "0", high: weightWords(high) }),
      choice("Colour", Object.entries(SCALES), this.scale, (scale) => this.app.go({ scale: scale === "log" ? null : scale }, { replace: true })),
      choice("Pooling", [["max", "max"], ["mean", "mean"]], this.pool, (pool) => this.app.go({ pool: pool === "max" ? null : pool }, { replace: true })),
      h("p", { class: "map-note" }, pooled ? this.binWords(level) : "A pixel: one query and one key"),
      this.shape.kind === "small" ? h("p", { class: "map-note" }, this.shape.why) : null);
  }

  binWords(level) {
    const { down, across } = this.map.content.pyramid.step(level);
    return `A pixel: ${this.pool === "max" ? "largest" : "mean"} of ${integer(down)} × ${integer(across)} weights`;
  }

  jump() {
    const { queries, keys } = this.map.content.pyramid, asked = [this.query, this.key].map((field) => (field.value === "" ? null : Number(field.value)));
    const [query, key] = asked;
    if (query === null && key === null) return this.query.focus();
    const settled = (at, other, n) => Math.min(Math.max(at ?? Math.min(other, n - 1), 0), n - 1);
    const to = { query: settled(query, key, queries), key: settled(key, query, keys) };
    this.map.visit(to.query, to.key);
    this.app.go({ cq: to.query, ck: to.key }, { replace: true });
  }

  async copy(button) {
    this.commit();
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
      this.app.announce("The link is copied.");
      setTimeout(() => { button.textContent = "Copy link to this view"; }, 1600);
    } catch {
      this.app.trouble("The browser does not let this page copy; the address bar has the same link.");
    }
  }

  // ---- the address follows the view ----

  /** The view as the address has it: nothing if it is the whole map. */
  written() {
    if (this.map.whole) return { x: null, y: null, z: null };
    const { x, y, z } = this.map.view, digits = z > 3 ? 1 : 0; // a tenth of a token, where that is more than a pixel
    return { x: Number(x.toFixed(digits)), y: Number(y.toFixed(digits)), z: Number(z.toFixed(3)) };
  }

  moved() {
    clearTimeout(this.rest);
    this.rest = setTimeout(() => this.commit(), REST);
    if (this.map.content && this.drawnLevel !== this.map.level) this.controls();
    if (this.map.point) this.say();
  }

  /** One entry of the history for a view that is elsewhere; small corrections rewrite the entry. */
  commit() {
    clearTimeout(this.rest);
    if (!this.map.content) return;
    const written = this.written(), { x, y, z } = this.app.state;
    if ((x ?? null) === written.x && (y ?? null) === written.y && (z ?? null) === written.z) return;
    const { view } = this.map, { area, scale } = this.map.layout, from = this.entry;
    const far = Math.abs(view.z - from.z) >= 0.5 || Math.abs(view.x - from.x) * scale > area.w / 2 || Math.abs(view.y - from.y) * scale > area.h / 2;
    if (far) this.entry = { ...view };
    this.app.go(written, { replace: !far });
  }

  // ---- the readout ----

  pointed(point, how) {
    this.map.extra = [];
    this.say();
    clearTimeout(this.speak);
    if (point && how !== "pointer") this.speak = setTimeout(() => this.app.announce([...this.readout.children].map((line) => line.innerText.replaceAll("\n", ", ")).join(", ")), 350);
  }

  repin() {
    const pin = this.pin, { app } = this;
    this.map.pin = pin;
    this.map.redraw();
    this.query.value = pin ? pin.query : "";
    this.key.value = pin ? pin.key : "";
    const page = app.opened()?.page.groups[app.state.group], cross = page && Boolean(page.texts[app.state.text].queries);
    replace(this.pinned, ...(pin ? [
      h("button", { type: "button", class: "quiet", "data-key": "text", onclick: () => app.go({ page: "text", pins: cross ? `${pin.query},k${pin.key}` : String(pin.query) }) }, "Show in text"),
      h("button", { type: "button", class: "quiet", "data-key": "unpin", onclick: () => { app.go({ cq: null, ck: null }, { replace: true }); this.canvas.focus({ preventScroll: true }); } }, "Unpin")] : []));
    this.say();
  }

  /** What is under the crosshair, or pinned. */
  say() {
    const { content } = this.map, point = this.map.point ?? this.map.pin;
    if (!content) return;
    if (!point || !content.store) {
      this.rested(null);
      this.readout.replaceChildren(h("p", { class: "map-hint" }, content.store ? "Point at the map for the weight there. Click pins it." : "There is no map to point at."));
      return;
    }
    const { pyramid, tokens, store, profiles } = content, level = this.map.level, bin = pyramid.bin(level, point.query, point.key);
    const value = (pool) => { const tile = store.get(pool, bin.place); return tile ? (tile.rows ? tile.values[bin.row * tile.columns + bin.column] : 0) : null; };
    const name = (side, at) => h("span", {}, `${integer(at)} `, h("b", {}, `“${named(tokens[side][at])}”`));
    const single = pyramid.exact && level === pyramid.deepest, pair = `${this.loaded}/${point.query}/${point.key}`;
    const largest = value("max"), mean = value("mean");
    const weight = single ? largest ?? mean : this.exact.pair === pair ? this.exact.weight : null;
    const masked = weight === 0;
    this.readout.replaceChildren(...[
      h("p", { class: "map-pair" }, h("small", {}, "query "), name("queries", point.query)),
      h("p", { class: "map-pair" }, h("small", {}, "→ key "), name("keys", point.key)),
      h("p", { class: "map-weight" }, h("strong", {}, weight === null ? (pyramid.exact ? "…" : "–") : weightWords(weight)), " ",
        h("small", {}, masked ? "hidden by the mask, or nothing" : pyramid.exact ? "exact weight" : "only bins are known")),
      single ? null : h("p", { class: "map-bin" }, `queries ${range(bin.queries)} × keys ${range(bin.keys)} `, h("br"),
        `largest ${largest === null ? "…" : weightWords(largest)}, mean ${mean === null ? "…" : weightWords(mean)}`),
      profiles && h("p", { class: "map-bin" }, `key receives ${weightWords(profiles.received[point.key])} of the weight `, h("br"),
        `query's entropy ${profiles.entropy[point.query].toFixed(2)} nats`),
    ].filter(Boolean));
    this.rested(single ? null : { point, pair, bin, known: largest !== null && mean !== null });
  }

  /** Once the crosshair rests: the exact weight there, and the other pooling of its bin. */
  rested(wanted) {
    const { exact } = this;
    if (wanted && exact.waiting === wanted.pair) return;
    clearTimeout(exact.timer);
    exact.flight?.abort();
    exact.waiting = wanted?.pair ?? "";
    if (!wanted || (exact.pair === wanted.pair && wanted.known)) return;
    exact.timer = setTimeout(async () => {
      const flight = (exact.flight = new AbortController());
      this.map.extra = ["max", "mean"].map((pool) => [pool, wanted.bin.place]);
      this.map.redraw();
      if (!this.map.content.pyramid.exact || exact.pair === wanted.pair) return;
      try {
        const source = await this.app.source();
        const weight = await source.pair(...this.place, wanted.point.query, wanted.point.key, { signal: flight.signal });
        if (!flight.signal.aborted) Object.assign(exact, { pair: wanted.pair, weight }), this.say();
      } catch (error) {
        if (!flight.signal.aborted) this.app.trouble(error);
      }
    }, EXACT_AFTER);
  }

  // ---- after each frame ----

  drawn() {
    const missing = this.map.content.store?.missing ?? 0;
    if (missing && this.status.hidden && !this.statusTimer) this.statusTimer = setTimeout(() => { this.statusTimer = 0; this.status.hidden = !this.map.content?.store?.missing; }, 180);
    if (!missing) this.status.hidden = true;
    if (missing) this.status.textContent = "computing …";
    this.drawOverview();
  }

  sizeOverview() {
    const { queries, keys } = this.map.content.pyramid, most = { w: 216, h: 150 }, fit = Math.min(most.w / keys, most.h / queries);
    Object.assign(this.overview.style, { width: `${Math.max(Math.round(keys * fit), 8)}px`, height: `${Math.max(Math.round(queries * fit), 8)}px` });
    const ratio = devicePixelRatio || 1;
    this.overview.width = Math.round(Math.max(keys * fit, 8) * ratio);
    this.overview.height = Math.round(Math.max(queries * fit, 8) * ratio);
  }

  drawOverview() {
    const { store, pyramid, pool } = this.map.content, context = this.overview.getContext("2d"), { width, height } = this.overview;
    context.fillStyle = this.colours.empty;
    context.fillRect(0, 0, width, height);
    const tile = store?.get(pool, FIRST);
    if (tile?.rows) {
      const { down, across } = pyramid.extent(FIRST);
      context.imageSmoothingEnabled = tile.columns > width / 2;
      context.drawImage(painted(tile, this.lookOf(0)), 0, 0, (width * tile.columns * across) / pyramid.keys, (height * tile.rows * down) / pyramid.queries);
    }
    if (this.map.whole) return;
    const { origin, frame, scale } = this.map.layout, ratio = devicePixelRatio || 1;
    const x = (frame.x - origin.x) / scale / pyramid.keys * width, y = (frame.y - origin.y) / scale / pyramid.queries * height;
    const w = Math.max(frame.w / scale / pyramid.keys * width, 5 * ratio), k = Math.max(frame.h / scale / pyramid.queries * height, 5 * ratio);
    context.strokeStyle = this.colours.warm;
    context.lineWidth = 2 * ratio;
    context.strokeRect(Math.min(x, width - w), Math.min(y, height - k), w, k);
  }

  // ---- export ----

  picture() {
    if (!this.map.content) return null;
    const { layer, head } = this.names, { app } = this, place = this.place;
    const title = `${app.opened()?.name ?? "model"}, layer ${layer}, head ${head}: attention weights`;
    const { low, high } = this.span(this.pool, this.map.level);
    return {
      name: `map-L${layer}-H${head}`,
      svg: () => mapSvg(this.map, { title, low: this.scale === "log" ? `≤ ${weightWords(low)}` : "0", high: weightWords(high), note: `Queries down, keys across. ${this.map.level < this.map.content.pyramid.deepest || !this.map.content.pyramid.exact ? this.binWords(this.map.level) : "A pixel: one query and one key"}. Colours: ${this.scale === "root" ? "square root" : this.scale}.` }),
      csv: async () => {
        if (!this.store) throw new Error("There is no map to save: the profile keeps none of this text.");
        const source = await app.source();
        return mapCsv(this.map, (pool, { zoom, i, j }) => source.tile(...place, pool, zoom, i, j), title);
      },
    };
  }

  unmount() {
    this.journey++;
    for (const timer of [this.rest, this.speak, this.statusTimer, this.exact.timer]) clearTimeout(timer);
    this.exact.flight?.abort();
    this.store?.close();
    this.map.close();
    this.stopTheme();
  }
}

export const mapPage = { title: "Map", mount: (root, app) => new MapPage(root, app) };
