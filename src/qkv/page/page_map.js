// Map: the attention weights of one head, query by key, at any zoom, with a readout and controls.

import { choice, legend } from "./charts.js";
import { h, replace } from "./dom.js";
import { headTitle } from "./heads.js";
import { DEEP, MapColours, MapView, SCALES } from "./map_view.js";
import { mapCsv, MapOverview, MapReadout, mapSvg } from "./map_readout.js";
import { edgeScales } from "./map_scene.js";
import { integer } from "./numbers.js";
import { cancel, later } from "./state.js";
import { FIRST, Pyramid, TileStore } from "./tiles.js";

const REST = 400; // milliseconds without motion before the view is written into the address
const HOLD = 200; // milliseconds that the previous head may stay on the stage, to avoid flicker
const VIEW = ["x", "y", "z"], PIN = ["cq", "ck"]; // keys of the address

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

class MapPage {
  constructor(root, app) {
    this.app = app;
    this.loaded = ""; // the head that was requested last; the previous one is shown until it is loaded
    this.head = null; // the shown head: {source, place, shape, title, name}
    this.loads = 0; // counts loads, so that a slow one cannot replace a later one
    this.build(root);
    this.stopTheme = app.onTheme(() => this.recolour());
    this.recolour();
  }

  build(root) {
    const button = (mark, label, act) => h("button", { type: "button", class: "map-button", "aria-label": label, title: label, onclick: () => { if (this.map.content) act(); } }, mark);
    this.canvas = h("canvas", { class: "map-canvas", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-describedby": "map-keys" });
    this.map = new MapView(this.canvas, {
      onview: () => this.moved(),
      onpoint: (point, how) => this.pointed(point, how),
      onpin: (point) => this.app.go(point ? { cq: point.query, ck: point.key } : { cq: null, ck: null }, { replace: true }),
      onframe: () => this.drawn(),
    });
    this.readout = new MapReadout(this.app, this.map);
    this.overview = new MapOverview(this.map);
    this.status = h("p", { class: "map-status", hidden: true });
    this.why = h("div", { class: "map-why", role: "status", hidden: true });
    this.pinned = h("div", { class: "map-pinned" });
    this.settings = h("div", { class: "map-settings" });
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
        this.readout.element, this.pinned,
        h("details", { class: "map-more", open: wide }, h("summary", {}, "Colour, pooling, overview, jump"),
          this.settings,
          h("figure", { class: "map-overview-box" }, h("figcaption", {}, "The whole map", h("small", {}, " · framed: this view")), this.overview.element),
          jump,
          h("button", { type: "button", class: "link map-copy", onclick: (event) => this.copy(event.target) }, "Copy link to this view"))),
      h("p", { id: "map-keys", class: "unseen" }, "Arrow keys move the crosshair, faster with Shift. Plus and minus zoom, 0 shows the whole map, Enter pins the crosshair, Escape unpins it.")));
  }

  // ---- state ----

  get pool() { return this.app.state.pool === "mean" ? "mean" : "max"; }
  get scale() { return Object.hasOwn(SCALES, this.app.state.scale ?? "") ? this.app.state.scale : "log"; }
  get place() { const { group, text, layer, head } = this.app.state; return [group, text, layer, head]; }

  /** The view in the address, or null. */
  get wantedView() {
    const { x, y, z } = this.app.state;
    return [x, y, z].every(Number.isFinite) ? { x, y, z } : null;
  }

  get pin() {
    const { cq, ck } = this.app.state, { pyramid } = this.map.content;
    return Number.isInteger(cq) && Number.isInteger(ck) && cq >= 0 && ck >= 0 && cq < pyramid.queries && ck < pyramid.keys ? { query: cq, key: ck } : null;
  }

  async update(changed) {
    const { source, group, text } = this.app.state, textOf = `${source}/${group}/${text}`, otherText = textOf !== this.textOf;
    const has = (keys) => keys.some((key) => changed.has(key));
    if (this.textOf !== undefined && otherText) {
      // Drop positions of the previous text, unless the address contains new ones.
      const stale = [VIEW, PIN].filter((keys) => !has(keys)).flat().filter((key) => this.app.state[key] !== undefined);
      if (stale.length) {
        this.textOf = textOf;
        this.app.go(Object.fromEntries(stale.map((key) => [key, null])), { replace: true });
        return;
      }
    }
    this.textOf = textOf;
    if (`${textOf}/${this.place}` !== this.loaded) {
      this.useAddress ||= has(VIEW) || !this.map.content || otherText; // otherwise keep the current view
      await this.load();
    } else if (this.map.content) {
      if (has(["pool", "scale"])) this.controls(), this.map.amend({ pool: this.pool });
      if (has(VIEW)) this.followAddress();
      if (has(PIN)) this.repin();
    }
  }

  /** Show the view in the address, unless this page wrote it there. */
  followAddress() {
    const wanted = this.wantedView ?? this.map.fit, written = this.written();
    if (wanted.x === written.x && wanted.y === written.y && wanted.z === written.z) return;
    if (!this.wantedView && written.x === null) return;
    this.map.look(wanted);
    cancel(this.rest);
    this.entry = { ...this.map.view };
  }

  async load() {
    const load = ++this.loads, place = this.place;
    this.loaded = `${this.textOf}/${place}`;
    this.canvas.classList.add("stale"); // until the new head is loaded
    try {
      const source = await this.app.source(), shape = await source.map(...place);
      if (load === this.loads) await this.show(load, source, place, shape);
    } catch (error) {
      if (load === this.loads) this.fail(error);
    }
  }

  /** Show an error instead of a map: the map of the previous head would mislead. */
  fail(error) {
    this.loaded = "";
    this.head = null;
    this.store?.close();
    this.store = null;
    this.map.clear();
    this.overview.clear();
    this.canvas.classList.remove("stale");
    this.status.hidden = true;
    this.why.hidden = false;
    this.why.replaceChildren(h("p", {}, error.message), h("button", { type: "button", class: "quiet", onclick: () => this.load() }, "Try again"));
    this.readout.hint("The map of this head could not be loaded.");
    replace(this.settings);
    replace(this.pinned);
  }

  async show(load, source, place, shape) {
    const { app } = this, [group, text, layer, head] = place, page = source.page.groups[group], words = page.texts[text];
    const pyramid = new Pyramid(shape), here = () => this.map.content === content;
    let arrived;
    const first = new Promise((resolve) => { arrived = resolve; });
    const store = shape.kind === "none" ? null : new TileStore((pool, { zoom, i, j }, options) => source.tile(...place, pool, zoom, i, j, options), {
      onload: (pool, at) => {
        if (at.zoom === 0) {
          hues.measure(pool);
          arrived();
          if (here()) this.controls();
        }
        if (here()) this.map.redraw(), this.readout.update();
      },
      onerror: (error) => { arrived(); app.trouble(error); },
    });
    const hues = new MapColours(pyramid, store);
    const content = {
      pyramid, store, pool: null, lookOf: (zoom) => hues.look(content.pool, this.scale, zoom),
      tokens: { keys: words.keys, queries: words.queries || words.keys }, profiles: null, colours: null,
    };
    const known = source.profiles(...place).then(
      (profiles) => { content.profiles = { ...profiles, scales: edgeScales(profiles) }; if (here()) this.map.redraw(), this.readout.update(); },
      (error) => { if (shape.kind === "exact") app.trouble(error); });
    // The overview of a long text takes long to compute, so a view of a part of the map loads its tiles first.
    const part = pyramid.deepest >= DEEP && (this.useAddress ? this.wantedView : !this.map.whole);
    if (!part) store?.want([["max", FIRST]]);
    await Promise.race([Promise.all([known, !part && store && first]), pause(part ? 0 : HOLD)]);
    if (load !== this.loads) return store?.close();
    const name = headTitle(page, layer, head);
    this.head = { source, place, shape, title: `${source.name} · ${name}: attention weights`, name: `map-L${page.layers[layer]}-H${page.heads[head]}` };
    this.hues = hues;
    this.store?.close();
    this.store = store;
    this.canvas.classList.remove("stale");
    this.canvas.setAttribute("aria-label", `Attention map, ${name}: ${integer(shape.n_queries)} queries by ${integer(shape.n_keys)} keys`);
    this.why.hidden = shape.kind !== "none"; // for a small map, the reason is shown below the settings
    this.why.textContent = shape.why ?? "";
    this.query.max = shape.n_queries - 1;
    this.key.max = shape.n_keys - 1;
    this.readout.show(source, place);
    this.map.extra = [];
    this.map.point = null;
    const { useAddress } = this, view = useAddress ? this.wantedView : this.map.view;
    this.useAddress = false;
    this.map.show(Object.assign(content, { pool: this.pool, colours: this.colours }), view);
    if (useAddress) {
      cancel(this.rest); // following the address is no motion by the user
      this.entry = { ...this.map.view };
    }
    this.overview.fit();
    this.controls();
    this.repin();
  }

  // ---- colours and controls ----

  recolour() {
    const style = getComputedStyle(document.documentElement), names = ["paper", "ink", "soft", "line", "accent", "area"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.colours.empty = this.colours.paper; // masked pairs look like a weight of zero
    this.hues?.forget();
    if (this.map.content) this.map.amend({ colours: this.colours }), this.controls();
  }

  controls() {
    if (!this.map.content) return;
    this.drawnLevel = this.map.level;
    replace(this.settings,
      legend(this.hues.ends(this.pool, this.scale, this.map.level)),
      choice("Colour", Object.entries(SCALES), this.scale, (scale) => this.app.go({ scale: scale === "log" ? null : scale }, { replace: true })),
      choice("Pooling", [["max", "max"], ["mean", "mean"]], this.pool, (pool) => this.app.go({ pool: pool === "max" ? null : pool }, { replace: true })),
      h("p", { class: "map-note" }, this.pixelWords()),
      this.head.shape.kind === "small" ? h("p", { class: "map-note" }, this.head.shape.why) : null);
  }

  /** What a pixel shows, in words. */
  pixelWords() {
    const { pyramid } = this.map.content, { level } = this.map, { down, across } = pyramid.step(level);
    if (pyramid.exact && level === pyramid.deepest) return "A pixel: one query and one key";
    return `A pixel: ${this.pool === "max" ? "largest" : "mean"} of ${integer(down)} × ${integer(across)} weights`;
  }

  jump() {
    if (!this.map.content) return;
    const { queries, keys } = this.map.content.pyramid, fields = [this.query, this.key].map((field) => (field.value === "" ? null : Number(field.value)));
    const [query, key] = fields;
    if (query === null && key === null) return this.query.focus();
    const valid = (at, other, n) => Math.min(Math.max(at ?? Math.min(other, n - 1), 0), n - 1);
    const to = { query: valid(query, key, queries), key: valid(key, query, keys) };
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
      this.app.trouble("The browser does not allow this page to copy; the address bar shows the same link.");
    }
  }

  // ---- writing the view into the address ----

  /** The view as in the address; empty if the whole map is shown. */
  written() {
    if (this.map.whole) return { x: null, y: null, z: null };
    const { x, y, z } = this.map.view, digits = z > 3 ? 1 : 0; // tenths of a token only if these are larger than a pixel
    return { x: Number(x.toFixed(digits)), y: Number(y.toFixed(digits)), z: Number(z.toFixed(3)) };
  }

  moved() {
    cancel(this.rest);
    this.rest = later(() => this.commit(), REST);
    if (this.map.content && this.drawnLevel !== this.map.level) this.controls();
    if (this.map.point) this.readout.update();
  }

  /** Write the view into the address: a new entry of the history after a large move, otherwise the current entry. */
  commit() {
    cancel(this.rest);
    if (!this.map.content) return;
    const written = this.written(), { x, y, z } = this.app.state;
    if ((x ?? null) === written.x && (y ?? null) === written.y && (z ?? null) === written.z) return;
    const { view } = this.map, { area, scale } = this.map.layout, from = this.entry;
    const far = Math.abs(view.z - from.z) >= 0.5 || Math.abs(view.x - from.x) * scale > area.w / 2 || Math.abs(view.y - from.y) * scale > area.h / 2;
    if (far) this.entry = { ...view };
    this.app.go(written, { replace: !far });
  }

  // ---- the crosshair ----

  pointed(point, how) {
    this.map.extra = [];
    this.readout.update();
    this.readout.hush();
    if (point && how !== "pointer") this.readout.speak();
  }

  repin() {
    const pin = this.pin, { app } = this, { source, place: [group, text] } = this.head;
    this.map.pin = pin;
    this.map.redraw();
    this.query.value = pin ? pin.query : "";
    this.key.value = pin ? pin.key : "";
    const cross = Boolean(source.page.groups[group].texts[text].queries);
    replace(this.pinned, ...(pin ? [
      h("button", { type: "button", class: "quiet", "data-key": "text", onclick: () => app.go({ page: "text", pins: cross ? `${pin.query},k${pin.key}` : String(pin.query) }) }, "Show in text"),
      h("button", { type: "button", class: "quiet", "data-key": "unpin", onclick: () => { app.go({ cq: null, ck: null }, { replace: true }); this.canvas.focus({ preventScroll: true }); } }, "Unpin")] : []));
    this.readout.update();
  }

  // ---- after each frame ----

  drawn() {
    const missing = this.map.content.store?.missing ?? 0;
    if (missing && this.status.hidden && !this.statusTimer) this.statusTimer = setTimeout(() => { this.statusTimer = 0; this.status.hidden = !this.map.content?.store?.missing; }, 180);
    if (!missing) this.status.hidden = true;
    if (missing) this.status.textContent = "computing …";
    this.overview.draw();
  }

  // ---- export ----

  picture() {
    if (!this.map.content) return null;
    const { source, place, title, name } = this.head;
    return {
      name,
      svg: () => mapSvg(this.map, {
        title, ...this.hues.ends(this.pool, this.scale, this.map.level),
        note: `Queries down, keys across. ${this.pixelWords()}. Colours: ${this.scale === "root" ? "square root" : this.scale}.`,
      }),
      csv: () => {
        if (!this.store) throw new Error("There is no map to save: the profile has no map of this text.");
        return mapCsv(this.map, (pool, { zoom, i, j }) => source.tile(...place, pool, zoom, i, j));
      },
    };
  }

  unmount() {
    this.loads++;
    cancel(this.rest);
    clearTimeout(this.statusTimer);
    this.readout.close();
    this.store?.close();
    this.map.close();
    this.stopTheme();
  }
}

/** Keys of its state: `x`, `y`, `z` (view), `cq`, `ck` (pinned pair), `pool`, `scale`. */
export const mount = (root, app) => new MapPage(root, app);
