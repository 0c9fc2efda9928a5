// A map on a canvas, its tiles and its colours.

import { ramp } from "./colour.js";
import { svg } from "./dom.js";
import { axes, crosshair, edges, fitted, LABELLED, layoutOf } from "./map_scene.js";
import { percent } from "./numbers.js";
import { cancel, nextFrame } from "./state.js";
import { FIRST, Look, painted, TILE } from "./tiles.js";

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
    return { low: scale === "log" ? percent(low).replace(/^(?!<)/, "≤ ") : "0", high: percent(high) };
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

/**
 * Paint the tiles of a zoom into `layout.frame` of a canvas with `ratio` pixels per pixel of the stage; if some are not loaded
 * yet, first those of other zooms below them. `content` as in MapView.
 */
function paintTiles(context, { layout, content, ratio, zoom }) {
  const { frame, origin, scale, rows, columns } = layout, { pyramid, store, pool, lookOf, colours } = content;
  const edge = (at) => Math.round(at * ratio), view = { top: rows[0], bottom: rows[1], left: columns[0], right: columns[1] };
  context.save();
  context.beginPath();
  context.rect(edge(frame.x), edge(frame.y), edge(frame.x + frame.w) - edge(frame.x), edge(frame.y + frame.h) - edge(frame.y));
  context.clip();
  context.fillStyle = colours.empty;
  context.fillRect(edge(frame.x), edge(frame.y), edge(frame.w) + 1, edge(frame.h) + 1);
  const pixel = pyramid.step(pyramid.deepest);
  context.imageSmoothingEnabled = scale * Math.max(pixel.down, pixel.across) < 2;
  context.imageSmoothingQuality = "low";
  const paintTile = (place, tile) => {
    const { top, left, down, across } = pyramid.extent(place), masked = !tile.rows;
    const sx = Math.max(Math.floor((view.left - left) / across), 0), ex = Math.min(Math.ceil((view.right + 1 - left) / across), masked ? TILE : tile.columns);
    const sy = Math.max(Math.floor((view.top - top) / down), 0), ey = Math.min(Math.ceil((view.bottom + 1 - top) / down), masked ? TILE : tile.rows);
    const dx = edge(origin.x + (left + sx * across) * scale), dw = edge(origin.x + (left + ex * across) * scale) - dx;
    const dy = edge(origin.y + (top + sy * down) * scale), dh = edge(origin.y + (top + ey * down) * scale) - dy;
    if (ex <= sx || ey <= sy || dw <= 0 || dh <= 0) return;
    context.fillRect(dx, dy, dw, dh); // zeros are transparent
    if (!masked) context.drawImage(painted(tile, lookOf(place.zoom)), sx, sy, ex - sx, ey - sy, dx, dy, dw, dh);
  };
  const tilesAt = (at) => pyramid.within(at, view).map((place) => [place, store.get(pool, place)]);
  const paintAll = (tiles) => { for (const [place, tile] of tiles) if (tile) paintTile(place, tile); };
  const wanted = tilesAt(zoom);
  if (wanted.some(([, tile]) => !tile)) {
    for (let other = 0; other < zoom; other++) paintAll(tilesAt(other));
    if (zoom < pyramid.deepest) paintAll(tilesAt(zoom + 1));
  }
  paintAll(wanted);
  context.restore();
}

// A map on a canvas, and its axes as SVG over it: drawn once a frame at most, panned and zoomed by pointer, touch, wheel and keys.

const NEAREST = Math.log2(40); // a token is never wider than 40 pixels
const GLIDE = 170; // milliseconds of the animation of a zoom step; drags and trackpads are not animated
const CLICK = 4; // pixels that a pointer may move during a click
export const DEEP = 5; // from this depth (8,193 tokens), the overview needs a long pass over all weights

/**
 * The stage of a map: drawing, pointers and keys. `show` sets its content. Listeners: onview(view) after every change of
 * the view; onpoint(point, how) when the crosshair moves, with {query, key} or null; onpin(point); onframe() after each
 * drawing.
 */
export class MapView {
  constructor(canvas, listeners) {
    Object.assign(this, { canvas, listeners });
    this.context = canvas.getContext("2d", { alpha: false });
    this.overlay = svg("svg", { class: "map-axes", "aria-hidden": "true" }); // in a box with the canvas
    this.content = null;
    this.view = { x: 0, y: 0, z: 0 };
    this.point = this.pin = null;
    this.pointers = new Map(); // pressed pointers: id → [x, y]
    this.hover = null; // where the mouse is, in pixels
    this.glide = null;
    this.extra = []; // tiles to load in addition to the visible ones
    this.frame = null;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(canvas);
    this.listen();
  }

  /**
   * Show a content {pyramid, store, pool, lookOf(zoom), tokens, profiles, colours} in a view, or null for the whole map.
   * `store` is null if there is no map.
   */
  show(content, view) {
    this.content = content;
    this.glide = null;
    this.measure();
    if (this.width) this.view = this.clamped(view ?? this.fit);
    this.draw(); // immediately, because a resized canvas is empty
    this.listeners.onview(this.view);
  }

  /** Remove the content and clear the canvas. */
  clear() {
    this.content = this.point = this.pin = this.glide = null;
    this.context.fillStyle = getComputedStyle(this.canvas).getPropertyValue("--paper");
    this.context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    this.overlay.replaceChildren();
  }

  /** Change parts of the content and redraw. */
  amend(changes) {
    Object.assign(this.content, changes);
    this.redraw();
  }

  close() {
    cancel(this.frame);
    this.sizes.disconnect();
    this.content = null;
  }

  get size() {
    const { pyramid } = this.content;
    return { width: this.width, height: this.height, queries: pyramid.queries, keys: pyramid.keys };
  }

  get layout() {
    return layoutOf({ ...this.size, view: this.view });
  }

  get fit() {
    return fitted(this.size);
  }

  /** Whether the whole map is visible. */
  get whole() {
    return this.view.z <= this.fit.z + 0.002;
  }

  resize() {
    if (!this.content) return;
    const whole = this.width && this.whole;
    this.measure();
    if (!this.width) return;
    this.view = this.clamped(whole ? this.fit : this.view); // keep showing the whole map
    this.draw();
  }

  /** Match the pixels of the canvas to its size on the page. */
  measure() {
    const { clientWidth, clientHeight } = this.canvas, ratio = devicePixelRatio || 1;
    if (!clientWidth || !clientHeight || (clientWidth === this.width && clientHeight === this.height && ratio === this.ratio)) return;
    Object.assign(this, { width: clientWidth, height: clientHeight, ratio });
    this.canvas.width = Math.round(clientWidth * ratio);
    this.canvas.height = Math.round(clientHeight * ratio);
  }

  /** Limit a view to the map: not smaller than the whole map, and centred along an axis that fits entirely. */
  clamped({ x, y, z }) {
    const fit = this.fit, zoom = Math.min(Math.max(z, fit.z), Math.max(NEAREST, fit.z)), scale = 2 ** zoom;
    const { area } = layoutOf({ ...this.size, view: { x, y, z: zoom } });
    const along = (at, tokens, room) => {
      const half = room / scale / 2;
      return half * 2 >= tokens ? tokens / 2 : Math.min(Math.max(at, half), tokens - half);
    };
    return { x: along(x, this.size.keys, area.w), y: along(y, this.size.queries, area.h), z: zoom };
  }

  // ---- moving ----

  /** Show a view without animation. */
  look(view) {
    this.glide = null;
    this.move(view);
  }

  move(view) {
    this.view = this.clamped(view);
    if (this.hover) this.follow();
    this.redraw();
    this.listeners.onview(this.view);
  }

  pan(right, down) {
    const scale = 2 ** this.view.z;
    this.look({ ...this.view, x: this.view.x + right / scale, y: this.view.y + down / scale });
  }

  /** Zoom by powers of two around a point of the stage, which keeps its token. */
  zoom(by, [px, py] = this.middle, gently = false) {
    const from = this.glide?.to ?? this.view.z, to = Math.min(Math.max(from + by, this.fit.z), Math.max(NEAREST, this.fit.z));
    const { origin, scale } = this.layout;
    const anchor = { px, py, key: (px - origin.x) / scale, query: (py - origin.y) / scale };
    if (!gently || this.still.matches) { this.glide = null; this.around(anchor, to); return; }
    this.glide = { anchor, to, from: this.view.z, start: performance.now() };
    this.redraw();
  }

  around({ px, py, key, query }, z) {
    const { area, scale } = layoutOf({ ...this.size, view: { x: 0, y: 0, z } });
    this.move({ x: key - (px - area.x - area.w / 2) / scale, y: query - (py - area.y - area.h / 2) / scale, z });
  }

  get middle() {
    const { frame } = this.layout;
    return [frame.x + frame.w / 2, frame.y + frame.h / 2];
  }

  step(now) {
    const { anchor, from, to, start } = this.glide, part = Math.min(Math.max((now - start) / GLIDE, 0), 1);
    if (part >= 1) this.glide = null;
    this.around(anchor, from + (to - from) * (1 - (1 - part) ** 3));
  }

  /** Centre a pair of tokens, with a zoom at which its labels are shown. */
  visit(query, key) {
    this.point = { query, key };
    this.hover = null;
    this.look({ x: key + 0.5, y: query + 0.5, z: Math.max(this.view.z, Math.log2(LABELLED + 5)) });
    this.listeners.onpoint(this.point, "jump");
  }

  // ---- pointers and keys ----

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    return [event.clientX - box.left, event.clientY - box.top];
  }

  /** The pair of tokens at a point of the stage, or null outside of the map. */
  pairAt([px, py]) {
    const { frame, origin, scale } = this.layout;
    if (px < frame.x || py < frame.y || px >= frame.x + frame.w || py >= frame.y + frame.h) return null;
    const { queries, keys } = this.size;
    const within = (at, n) => Math.min(Math.max(Math.floor(at / scale), 0), n - 1);
    return { query: within(py - origin.y, queries), key: within(px - origin.x, keys) };
  }

  /** Move the crosshair to the mouse. */
  follow() {
    const pair = this.hover && this.pairAt(this.hover);
    if (pair?.query === this.point?.query && pair?.key === this.point?.key) return;
    this.point = pair;
    this.redraw();
    this.listeners.onpoint(pair, "pointer");
  }

  listen() {
    const { canvas } = this, on = (name, act, options) => canvas.addEventListener(name, (event) => { if (this.content) act(event); }, options);
    let start = null, moved = false, pinch = null, before = null;

    const gauge = () => {
      const [a, b] = [...this.pointers.values()];
      return { apart: Math.hypot(a[0] - b[0], a[1] - b[1]), middle: [(a[0] + b[0]) / 2, (a[1] + b[1]) / 2] };
    };
    on("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, this.at(event));
      if (this.pointers.size === 1) start = this.at(event), moved = false;
      if (this.pointers.size === 2) pinch = gauge(), moved = true;
    });
    on("pointermove", (event) => {
      const here = this.at(event), last = this.pointers.get(event.pointerId);
      if (event.pointerType === "mouse") this.hover = here;
      if (!last) return this.follow();
      if (this.pointers.size === 1 && !moved && Math.hypot(here[0] - start[0], here[1] - start[1]) < CLICK) return;
      if (!moved) moved = true, canvas.classList.add("dragging");
      this.pointers.set(event.pointerId, here);
      if (this.pointers.size === 2 && pinch) {
        const now = gauge();
        this.zoom(Math.log2(now.apart / pinch.apart), now.middle);
        this.pan(pinch.middle[0] - now.middle[0], pinch.middle[1] - now.middle[1]);
        pinch = now;
      } else if (this.pointers.size === 1) this.pan(last[0] - here[0], last[1] - here[1]);
    });
    const lift = (event) => {
      this.pointers.delete(event.pointerId);
      pinch = null;
      if (!this.pointers.size) canvas.classList.remove("dragging");
    };
    on("pointerup", lift);
    on("pointercancel", lift);
    on("pointerleave", () => { if (!this.pointers.size && this.hover) { this.hover = null; this.point = null; this.redraw(); this.listeners.onpoint(null, "pointer"); } });
    on("click", (event) => {
      const pair = moved ? null : this.pairAt(this.at(event));
      if (!pair) return;
      if (event.detail < 2) before = this.pin;
      this.point = pair;
      this.listeners.onpoint(pair, "pointer");
      this.listeners.onpin(pair);
    });
    on("dblclick", (event) => {
      this.listeners.onpin(before); // a double click must not change the pin
      this.zoom(event.shiftKey ? -1 : 1, this.at(event), true);
    });
    on("wheel", (event) => {
      event.preventDefault();
      const unit = [1, 16, this.height][event.deltaMode], right = event.deltaX * unit, down = event.deltaY * unit;
      if (!event.ctrlKey && (event.shiftKey || Math.abs(right) > Math.abs(down))) return this.pan(right || down, 0);
      const notch = Math.abs(down) >= 80 && !event.ctrlKey; // a mouse wheel sends large steps, a trackpad many small ones
      this.zoom(-down * (event.ctrlKey ? 0.014 : 0.0035), this.at(event), notch);
    }, { passive: false });
    on("keydown", (event) => this.key(event));
    on("focus", () => { if (canvas.matches(":focus-visible") && !this.point) this.place(this.centre()); });
    on("blur", () => { if (!this.hover) { this.point = null; this.redraw(); this.listeners.onpoint(null, "keys"); } });
  }

  centre() {
    return this.pin ?? this.pairAt(this.middle);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const act = {
      "+": () => this.zoom(event.shiftKey && event.code !== "Equal" ? 2 : 1, this.crossed, true),
      "=": () => this.zoom(1, this.crossed, true),
      "-": () => this.zoom(-1, this.crossed, true),
      _: () => this.zoom(-2, this.crossed, true),
      0: () => this.look(this.fit),
      Enter: () => this.point && this.listeners.onpin(this.point),
      " ": () => this.point && this.listeners.onpin(this.point),
      Escape: () => this.listeners.onpin(null),
    }[event.key];
    if (!arrow && !act) return;
    event.preventDefault();
    if (act) return act();
    const from = this.point ?? this.centre(), { scale, area } = this.layout, { queries, keys } = this.size;
    // One token if labels are shown, else about eight pixels; eight times as far with Shift.
    const stride = (scale >= LABELLED ? 1 : Math.max(Math.round(8 / scale), 1)) * (event.shiftKey ? 8 : 1);
    const within = (at, n) => Math.min(Math.max(at, 0), n - 1);
    const to = { query: within(from.query + arrow[0] * stride, queries), key: within(from.key + arrow[1] * stride, keys) };
    // Scroll along: the crosshair stays near the middle of the view, except at the edges of the map.
    if (!this.whole) {
      const reach = (at, middle, room) => Math.min(Math.max(middle, at - 0.2 * room / scale), at + 0.2 * room / scale);
      this.look({ ...this.view, x: reach(to.key + 0.5, this.view.x, area.w), y: reach(to.query + 0.5, this.view.y, area.h) });
    }
    this.place(to);
  }

  /** The position of the crosshair on the stage; the middle if there is none. */
  get crossed() {
    if (!this.point) return this.middle;
    const { origin, scale } = this.layout;
    return [origin.x + (this.point.key + 0.5) * scale, origin.y + (this.point.query + 0.5) * scale];
  }

  place(point) {
    this.hover = null;
    this.point = point;
    this.redraw();
    this.listeners.onpoint(point, "keys");
  }

  // ---- drawing ----

  redraw() {
    if (!this.frame) this.frame = nextFrame((now) => this.draw(now));
  }

  get level() {
    return this.content.pyramid.zoomFor(2 ** this.view.z * this.ratio);
  }

  draw(now = performance.now()) {
    cancel(this.frame);
    this.frame = null;
    if (!this.content || !this.width) return;
    if (this.glide) this.step(now);
    const { context, layout, content } = this, { colours, store } = content;
    context.fillStyle = colours.paper;
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    if (store) {
      store.want(this.wanted(layout), this.level);
      paintTiles(context, { layout, content, ratio: this.ratio, zoom: this.level });
    }
    this.overlay.parentElement?.style.setProperty("--stage", `${this.width}px`);
    this.overlay.replaceChildren(...this.marks(layout));
    this.listeners.onframe(layout);
  }

  /** Axes, edge curves and crosshairs. */
  marks(layout) {
    const { tokens, profiles, pyramid } = this.content;
    const followed = this.point ?? this.pin, same = this.pin?.query === followed?.query && this.pin?.key === followed?.key;
    const cross = (pair, pinned) => crosshair(layout, pair, pyramid.bin(this.level, pair.query, pair.key), tokens, pinned);
    return [
      ...axes(layout, tokens, followed), ...(profiles ? edges(layout, profiles) : []),
      ...(this.pin && !same ? cross(this.pin, true) : []), ...(followed ? cross(followed, false) : []),
    ];
  }

  /** The tiles to load: the overview, which sets the colour scale, and the visible ones, from the middle outwards. */
  wanted({ rows: [top, bottom], columns: [left, right] }) {
    const { pyramid, pool } = this.content, near = [...this.extra, ...pyramid.within(this.level, { top, bottom, left, right }).map((place) => [pool, place])];
    const whole = pool === "max" ? [["max", FIRST]] : [["max", FIRST], ["mean", FIRST]];
    return pyramid.deepest >= DEEP && !this.whole ? [...near, ...whole] : [...whole, ...near];
  }
}
