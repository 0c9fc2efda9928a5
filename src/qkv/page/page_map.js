// The map page: one head's weights, query by key, at any zoom, with controls and a readout beside it.

import { choice, legend } from "./charts.js";
import { h, replace } from "./dom.js";
import { headTitle } from "./heads.js";
import { MapColours, SCALES } from "./map_colours.js";
import { mapCsv, mapSvg } from "./map_export.js";
import { MapOverview } from "./map_overview.js";
import { MapReadout } from "./map_readout.js";
import { edgeScales } from "./map_scene.js";
import { DEEP, MapView } from "./map_view.js";
import { integer } from "./numbers.js";
import { FIRST, Pyramid, TileStore } from "./tiles.js";

const REST = 400; // milliseconds without motion until the address follows
const PATIENCE = 200; // milliseconds that the head shown before stays, so that nothing flickers
const VIEW = ["x", "y", "z"], PIN = ["cq", "ck"]; // keys of the address

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

class MapPage {
  constructor(root, app) {
    this.app = app;
    this.loaded = ""; // which head was asked for last; another may be shown until it comes
    this.head = null; // the one that is shown: {source, place, shape, title, name}
    this.journey = 0; // counts loads, so that a slow one does not overtake a later one
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
          h("div", { class: "map-overview-box" }, this.overview.element),
          jump,
          h("button", { type: "button", class: "link map-copy", onclick: (event) => this.copy(event.target) }, "Copy link to this view"))),
      h("p", { id: "map-keys", class: "unseen" }, "Arrow keys move the crosshair, faster with Shift. Plus and minus zoom, 0 shows the whole map, Enter pins the crosshair, Escape lets it go.")));
  }

  // ---- state ----

  get pool() { return this.app.state.pool === "mean" ? "mean" : "max"; }
  get scale() { return Object.hasOwn(SCALES, this.app.state.scale ?? "") ? this.app.state.scale : "log"; }
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
    const { source, group, text } = this.app.state, textOf = `${source}/${group}/${text}`, another = textOf !== this.textOf;
    const has = (keys) => keys.some((key) => changed.has(key));
    if (this.textOf !== undefined && another) {
      // Positions of the text before mean nothing in this one, unless the address brought new ones.
      const stale = [VIEW, PIN].filter((keys) => !has(keys)).flat().filter((key) => this.app.state[key] !== undefined);
      if (stale.length) {
        this.textOf = textOf;
        this.app.go(Object.fromEntries(stale.map((key) => [key, null])), { replace: true });
        return;
      }
    }
    this.textOf = textOf;
    if (`${textOf}/${this.place}` !== this.loaded) {
      this.told ||= has(VIEW) || !this.map.content || another; // else the view stays where the user has it
      await this.load();
    } else if (this.map.content) {
      if (has(["pool", "scale"])) this.controls(), this.map.amend({ pool: this.pool });
      if (has(VIEW)) this.obey();
      if (has(PIN)) this.repin();
    }
  }

  /** Show what the address says, unless it is what this page wrote there. */
  obey() {
    const asked = this.asked ?? this.map.fit, written = this.written();
    if (asked.x === written.x && asked.y === written.y && asked.z === written.z) return;
    if (!this.asked && written.x === null) return;
    this.map.look(asked);
    clearTimeout(this.rest);
    this.entry = { ...this.map.view };
  }

  async load() {
    const journey = ++this.journey, place = this.place;
    this.loaded = `${this.textOf}/${place}`;
    this.canvas.classList.add("map-stale"); // what is shown has another name by now
    try {
      const source = await this.app.source(), shape = await source.map(...place);
      if (journey === this.journey) await this.show(journey, source, place, shape);
    } catch (error) {
      if (journey === this.journey) this.fail(error);
    }
  }

  /** There is no such map to show, and that of another head would mislead. */
  fail(error) {
    this.loaded = "";
    this.head = null;
    this.store?.close();
    this.store = null;
    this.map.clear();
    this.overview.clear();
    this.canvas.classList.remove("map-stale");
    this.status.hidden = true;
    this.why.hidden = false;
    this.why.replaceChildren(h("p", {}, error.message), h("button", { type: "button", class: "quiet", onclick: () => this.load() }, "Try again"));
    this.readout.hint("The map of this head could not be read.");
    replace(this.settings);
    replace(this.pinned);
  }

  async show(journey, source, place, shape) {
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
        if (here()) this.map.redraw(), this.readout.say();
      },
      onerror: (error) => { arrived(); app.trouble(error); },
    });
    const hues = new MapColours(pyramid, store);
    const content = {
      pyramid, store, pool: null, lookOf: (zoom) => hues.look(content.pool, this.scale, zoom),
      tokens: { keys: words.keys, queries: words.queries || words.keys }, profiles: null, colours: null,
    };
    const known = source.profiles(...place).then(
      (profiles) => { content.profiles = { ...profiles, scales: edgeScales(profiles) }; if (here()) this.map.redraw(), this.readout.say(); },
      (error) => { if (shape.kind === "exact") app.trouble(error); });
    // Of a long text the whole map takes a long pass: whoever comes for a part of it has that first.
    const part = pyramid.deepest >= DEEP && (this.told ? this.asked : !this.map.whole);
    if (!part) store?.want([["max", FIRST]]);
    await Promise.race([Promise.all([known, !part && store && first]), pause(part ? 0 : PATIENCE)]);
    if (journey !== this.journey) return store?.close();
    const name = headTitle(page, layer, head);
    this.head = { source, place, shape, title: `${source.name} · ${name}: attention weights`, name: `map-L${page.layers[layer]}-H${page.heads[head]}` };
    this.hues = hues;
    this.store?.close();
    this.store = store;
    this.canvas.classList.remove("map-stale");
    this.canvas.setAttribute("aria-label", `Attention map, ${name}: ${integer(shape.n_queries)} queries by ${integer(shape.n_keys)} keys`);
    this.why.hidden = shape.kind !== "none"; // the small map says so beside it
    this.why.textContent = shape.why ?? "";
    this.query.max = shape.n_queries - 1;
    this.key.max = shape.n_keys - 1;
    this.readout.show(source, place);
    this.map.extra = [];
    this.map.point = null;
    const { told } = this, view = told ? this.asked : this.map.view;
    this.told = false;
    this.map.show(Object.assign(content, { pool: this.pool, colours: this.colours }), view);
    if (told) {
      clearTimeout(this.rest); // what the address said is no motion
      this.entry = { ...this.map.view };
    }
    this.overview.fit();
    this.controls();
    this.repin();
  }

  // ---- colours and controls ----

  recolour() {
    const style = getComputedStyle(document.documentElement), names = ["paper", "ink", "soft", "line", "accent", "area", "warm"];
    this.colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    this.colours.empty = this.colours.paper; // what the mask hides is no weight at all
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

  /** What a pixel is. */
  pixelWords() {
    const { pyramid } = this.map.content, { level } = this.map, { down, across } = pyramid.step(level);
    if (pyramid.exact && level === pyramid.deepest) return "A pixel: one query and one key";
    return `A pixel: ${this.pool === "max" ? "largest" : "mean"} of ${integer(down)} × ${integer(across)} weights`;
  }

  jump() {
    if (!this.map.content) return;
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
    if (this.map.point) this.readout.say();
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

  // ---- the crosshair ----

  pointed(point, how) {
    this.map.extra = [];
    this.readout.say();
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
    this.readout.say();
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
        if (!this.store) throw new Error("There is no map to save: the profile keeps none of this text.");
        return mapCsv(this.map, (pool, { zoom, i, j }) => source.tile(...place, pool, zoom, i, j));
      },
    };
  }

  unmount() {
    this.journey++;
    for (const timer of [this.rest, this.statusTimer]) clearTimeout(timer);
    this.readout.close();
    this.store?.close();
    this.map.close();
    this.stopTheme();
  }
}

export const mapPage = { title: "Map", mount: (root, app) => new MapPage(root, app) };
