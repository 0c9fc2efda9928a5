// Map: the attention weights of one head, query by key, at any zoom, with a readout and controls.

import { TEXT } from "./address.js";
import { failure } from "./charts.js";
import { h, replace } from "./dom.js";
import { HeadMap } from "./head_map.js";
import { headTitle } from "./heads.js";
import { DEEP, SCALES } from "./map_view.js";
import { mapCsv, MapOverview } from "./map_overview.js";
import { edgeScales } from "./map_scene.js";
import { integer } from "./numbers.js";
import { cancel, later } from "./state.js";
import { Pyramid } from "./tiles.js";

const REST = 400; // milliseconds without motion before the view is written into the address
const VIEW = ["x", "y", "z"], PIN = ["cq", "ck"]; // keys of the address, as in PAGES

class MapPage {
  constructor(root, app) {
    this.app = app;
    this.loaded = ""; // the head that was requested last; the previous one is shown until it is loaded
    this.head = null; // the shown head: {source, place, shape, title, name}
    this.loads = 0; // counts loads, so that a slow one cannot replace a later one
    this.large = new HeadMap({
      scales: true,
      hint: [h("span", { class: "with-mouse" }, "Point at the map to read a weight. A click pins it."), h("span", { class: "with-finger" }, "Tap the map to read and pin a weight.")],
      onview: () => this.moved(),
      onpin: (point) => app.go(point ? { cq: point.query, ck: point.key } : { cq: null, ck: null }, { replace: true }),
      onset: ({ pool, scale }) => app.go(pool ? { pool: pool === "max" ? null : pool } : { scale: scale === "log" ? null : scale }, { replace: true }),
      ondraw: () => this.overview.draw(),
      announce: (text, after) => app.announce(text, after),
      ontrouble: (error) => app.trouble(error),
    });
    this.map = this.large.map;
    this.overview = new MapOverview(this.map);
    this.build(root);
  }

  build(root) {
    this.why = h("div", { class: "map-why", role: "status", hidden: true });
    this.pinned = h("div", { class: "map-pinned" });
    this.query = h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", "aria-label": "Query position", placeholder: "query" });
    this.key = h("input", { type: "number", min: 0, step: 1, inputmode: "numeric", "aria-label": "Key position", placeholder: "key" });
    const jump = h("form", { class: "map-jump", onsubmit: (event) => { event.preventDefault(); this.jump(); } },
      h("span", {}, "Go to"), this.query, h("span", { "aria-hidden": "true" }, "→"), this.key, h("button", { type: "submit", class: "quiet" }, "Go"));
    const wide = matchMedia("(min-width: 641px)").matches, { stage, readout, controls, note } = this.large;
    stage.append(this.why);
    root.append(h("div", { class: "map-page" }, stage,
      h("aside", { class: "map-side", "aria-label": "Readout and settings" },
        readout, this.pinned,
        this.more = h("details", { class: "map-more", open: wide }, h("summary", {}, "Colour, pooling, overview, jump"),
          controls, note,
          h("figure", { class: "map-overview-box" }, h("figcaption", {}, "The whole map", h("small", {}, " · framed: this view")), this.overview.element),
          jump))));
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
    const has = (keys) => keys.some((key) => changed.has(key));
    if (`${this.app.state.source}/${this.place}` !== this.loaded) {
      this.useAddress ||= has(VIEW) || has(TEXT) || !this.map.content; // otherwise keep the current view
      await this.load();
    } else if (this.map.content) {
      if (has(["pool", "scale"])) this.large.set({ pool: this.pool, scale: this.scale });
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
    this.loaded = `${this.app.state.source}/${place}`;
    this.large.canvas.classList.add("stale"); // until the new head is loaded
    try {
      const source = await this.app.source();
      if (load === this.loads) await this.show(source, place);
    } catch (error) {
      if (load === this.loads) this.fail(error);
    }
  }

  /** Show an error instead of a map: the map of the previous head would mislead. */
  fail(error) {
    this.loaded = "";
    this.head = null;
    this.large.clear("The map of this head could not be loaded.");
    this.large.canvas.classList.remove("stale");
    this.overview.show();
    this.why.hidden = false;
    this.why.replaceChildren(...failure(error, () => this.load()));
    replace(this.pinned);
  }

  async show(source, place) {
    const [group, text, layer, head] = place, page = source.page.groups[group], words = page.texts[text], shape = words.map, name = headTitle(page, layer, head);
    const profiles = source.profiles(...place).then(
      (found) => ({ ...found, scales: edgeScales(found), exact: true }),
      (error) => { if (shape.kind === "exact") this.app.trouble(error); return null; });
    // The overview of a long text takes long to compute, so a view of a part of the map loads its tiles first.
    const part = new Pyramid(shape).deepest >= DEEP && (this.useAddress ? this.wantedView : !this.map.whole), { useAddress } = this;
    Object.assign(this.large, { pool: this.pool, scale: this.scale });
    const shown = await this.large.show({
      shape, profiles, name, tokens: { keys: words.keys, queries: words.queries || words.keys },
      tile: shape.kind === "none" ? null : (pool, { zoom, i, j }, options) => source.tile(...place, pool, zoom, i, j, options),
      pair: async (query, key, options) => (await source.weights(group, text, layer, { head, query, key }, options))[0],
      row: (query, options) => source.weights(group, text, layer, { head, query }, options),
      note: () => [this.pixelWords(), ...(shape.kind === "small" ? [shape.why] : [])].join(". "),
    }, { view: useAddress ? this.wantedView : undefined, whole: !part });
    if (!shown) return;
    this.useAddress = false;
    this.head = { source, place, shape, title: `${source.name} · ${name}: attention weights`, name: `map-L${page.layers[layer]}-H${page.heads[head]}` };
    this.large.canvas.classList.remove("stale");
    this.why.hidden = shape.kind !== "none"; // for a small map, the reason is shown below the settings
    this.more.hidden = shape.kind === "none";
    this.why.textContent = shape.why ?? "";
    this.query.max = shape.n_queries - 1;
    this.key.max = shape.n_keys - 1;
    if (useAddress) {
      cancel(this.rest); // following the address is no motion by the user
      this.entry = { ...this.map.view };
    }
    this.repin();
  }

  /** What a pixel shows, in words. */
  pixelWords() {
    const { pyramid } = this.map.content, { level } = this.map, { down, across } = pyramid.step(level);
    if (pyramid.exact && level === pyramid.deepest) return "A pixel: one query and one key";
    return `A pixel: ${this.large.pool === "max" ? "largest" : "mean"} of ${integer(down)} × ${integer(across)} weights`;
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

  repin() {
    const pin = this.pin, { app } = this, { source, place: [group, text] } = this.head;
    this.large.pin(pin);
    this.query.value = pin ? pin.query : "";
    this.key.value = pin ? pin.key : "";
    const cross = Boolean(source.page.groups[group].texts[text].queries);
    replace(this.pinned, ...(pin ? [
      h("button", { type: "button", class: "quiet", "data-key": "text", onclick: () => app.go({ page: "text", pins: cross ? `${pin.query},k${pin.key}` : String(pin.query) }) }, "Show in text"),
      h("button", { type: "button", class: "quiet", "data-key": "unpin", onclick: () => { app.go({ cq: null, ck: null }, { replace: true }); this.large.canvas.focus({ preventScroll: true }); } }, "Unpin")] : []));
  }

  // ---- export ----

  picture() {
    if (!this.map.content) return null;
    const { source, place, title, name } = this.head;
    return {
      name, title, elements: [this.large.stage, this.large.controls.querySelector(".map-key")],
      note: `Queries down, keys across. ${this.pixelWords()}. Colours: ${this.scale === "root" ? "square root" : this.scale}.`,
      csv: () => {
        if (!this.map.content.store) throw new Error("There is no map to save: the profile has no map of this text.");
        return mapCsv(this.map, (pool, { zoom, i, j }) => source.tile(...place, pool, zoom, i, j));
      },
    };
  }

  recolour() { this.large.recolour(); }

  unmount() {
    this.loads++;
    cancel(this.rest);
    this.large.close();
  }
}

/** Keys of its state: `x`, `y`, `z` (view), `cq`, `ck` (pinned pair), `pool`, `scale`. */
export const mount = (root, app) => new MapPage(root, app);
