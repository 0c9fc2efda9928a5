// The widget of a profile in a notebook: the wall of all heads, and beside it the map, the text or the numbers of one.
// `model` is anywidget's: traits of qkv.report.widget.ProfileWidget, and messages to it.

import { choice } from "./charts.js";
import { useDark, useLooks } from "./colour.js";
import { h, replace, tooltips } from "./dom.js";
import { HeadCurves, headCard, sizeWords, textChoosers } from "./heads.js";
import { MapsSection } from "./maps_section.js";
import { integer } from "./numbers.js";
import { Reading } from "./reading.js";
import { PageData } from "./data.js";

const REST = 250; // milliseconds without motion before the visible part of the map is written into the selection

/** Questions to Python, and their answers. */
class Kernel {
  constructor(model) {
    Object.assign(this, { model, waiting: new Map(), next: 0 });
    this.listen = (message, buffers) => {
      const promise = this.waiting.get(message.id);
      if (!promise) return; // of another view of the same widget
      this.waiting.delete(message.id);
      if (message.error) promise.reject(new Error(message.error));
      else promise.resolve({ ...message, buffers });
    };
    model.on("msg:custom", this.listen);
  }

  ask(of) {
    const id = `${Math.random()}/${this.next++}`;
    return new Promise((resolve, reject) => {
      this.waiting.set(id, { resolve, reject });
      this.model.send({ id, of });
    });
  }

  /** Exact maps of a text for `MapsSection`, or null if Python has none. */
  async exactMaps(group, text) {
    const { shape } = await this.ask({ what: "shape", group, text });
    if (!shape) return null;
    return {
      shape, note: "A cell is one query and one key where you zoom in; Python computes the weights, exactly.",
      tile: async (row, pool, place) => {
        const { rows, columns, buffers } = await this.ask({ what: "tile", group, text, row, pool, ...place });
        const bytes = new Uint8Array(buffers[0].buffer ?? buffers[0], buffers[0].byteOffset ?? 0, buffers[0].byteLength);
        return { rows, columns, values: new Float32Array(bytes.slice().buffer) };
      },
      pair: async (row, query, key) => (await this.ask({ what: "pair", group, text, row, query, key })).weight,
    };
  }

  close() {
    this.model.off("msg:custom", this.listen);
  }
}

/** Whether the page behind an element is dark. */
function isDarkBehind(element) {
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
  for (let at = element; at; at = at.parentNode ?? at.host) {
    if (!(at instanceof Element)) continue;
    pixel.clearRect(0, 0, 1, 1);
    pixel.fillStyle = getComputedStyle(at).backgroundColor; // in any colour space
    pixel.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
    if (a > 127) return 0.2126 * r + 0.7152 * g + 0.0722 * b < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}

class WidgetView {
  constructor(model, host, root) {
    Object.assign(this, { model, host, root, page: JSON.parse(model.get("_page")), tab: "map", head: null, exact: null });
    this.data = new PageData(this.page, (id) => model.get("_packed")[id]);
    useLooks(this.page);
    this.kernel = new Kernel(model);
    this.maps = new MapsSection({
      onselect: (layer, head) => this.choose({ layer: this.group.layers[layer], head: this.group.heads[head] }),
      onpin: (pair) => this.choose({ query: pair ? pair.query : null, key: pair ? pair.key : null }),
      onview: (part) => this.moved(part), ontrouble: (error) => this.trouble(error),
    });
    this.reading = new Reading({ onquery: (query) => this.choose({ query }) });
    this.switches = h("div", { class: "widget-switches" });
    this.tabs = h("div", { class: "widget-tabs" });
    this.problem = h("p", { class: "widget-problem", role: "alert", hidden: true });
    this.card = h("div", {});
    this.along = new HeadCurves("widget-curves");
    this.panes = { map: this.maps.mapBox, text: h("div", {}, this.reading.element, this.reading.pane), numbers: h("div", { class: "widget-numbers" }, this.card, this.along.element) };
    this.tip = h("div", { class: "tip", role: "status", hidden: true });
    root.append(h("div", { class: "widget" },
      h("header", { class: "widget-head" }, h("b", {}, this.page.attrs.model || "Attention profile"), this.size = h("span", {}), this.switches), this.problem,
      h("div", { class: "widget-body" }, h("div", { class: "widget-wall" }, this.maps.wall.controls, this.maps.wall.box), h("div", { class: "widget-side" }, this.tabs, ...Object.values(this.panes)))), this.tip);
    this.stopTips = tooltips(root, this.tip);
    this.onchange = () => this.update();
    model.on("change:selection", this.onchange);
    this.theme = new MutationObserver(() => this.retheme());
    for (const element of [document.documentElement, document.body]) this.theme.observe(element, { attributes: true });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.onscheme = () => this.retheme();
    this.scheme.addEventListener("change", this.onscheme);
    this.retheme();
    this.open(this.tab);
    this.update();
  }

  get selection() { return this.model.get("selection"); }
  get group() { return this.page.groups[this.groupAt]; }
  get groupAt() { return this.page.groups.findIndex(({ name }) => name === this.selection.group); }
  get view() { return this.group.texts[this.selection.text]; }
  get at() { return [this.group.layers.indexOf(this.selection.layer), this.group.heads.indexOf(this.selection.head)]; }

  trouble(error) {
    this.problem.textContent = error && error.message ? error.message : String(error);
    this.problem.hidden = false;
  }

  /** Change parts of the selection. */
  choose(changes) {
    const before = this.selection, after = { ...before, ...changes };
    if (JSON.stringify(before) === JSON.stringify(after)) return;
    this.model.set("selection", after);
    this.model.save_changes();
    this.update();
  }

  /** Show the selection. */
  async update() {
    const { selection } = this, [layer, head] = this.at, key = JSON.stringify(selection);
    if (this.updating === key) return;
    this.updating = key;
    try {
      const shown = await this.data.head(this.groupAt, selection.text, layer, head), { maps, view } = shown;
      if (this.updating !== key) return;
      const otherText = this.head?.view !== view, otherHead = otherText || this.head.row !== shown.row;
      this.head = shown;
      if (otherText) {
        this.exact = null;
        this.size.textContent = `${sizeWords(shown.group)}, ${integer(view.n_keys)} tokens`;
        this.drawSwitches();
        this.panes.map.classList.toggle("widget-without", !maps);
      }
      if (otherHead) {
        if (maps) await this.maps.show(shown, this.exact ?? maps);
        if (otherText && maps && !maps.exact) this.refine(view);
        await this.reading.show(shown);
        this.drawNumbers();
      }
      if (this.reading.query !== selection.query) this.reading.ask(selection.query);
      const { map } = this.maps.large;
      if (maps && map.content) {
        const pin = selection.query === null || selection.key === null ? null : { query: selection.query, key: selection.key };
        if (JSON.stringify(map.pin) !== JSON.stringify(pin)) this.maps.large.pin(pin);
        const part = JSON.stringify([selection.queries, selection.keys]), asked = part !== this.seen && part !== this.part; // by Python
        this.seen = part;
        if (asked && !(otherText && this.isWhole(selection))) this.maps.large.cover([selection.queries[0], selection.queries[1] - 1], [selection.keys[0], selection.keys[1] - 1]);
      }
      this.host.dataset.ready = key;
    } catch (error) {
      this.trouble(error);
    }
  }

  isWhole({ queries, keys }) {
    return queries[0] === 0 && keys[0] === 0 && queries[1] === this.view.n_queries && keys[1] === this.view.n_keys;
  }

  /** Use exact maps from Python in place of pooled ones, if it has them. */
  async refine(view) {
    const { selection: { group, text } } = this;
    try {
      const exact = await this.kernel.exactMaps(group, text);
      if (!exact || this.head.view !== view) return;
      this.exact = exact;
      await this.maps.show(this.head, exact);
      this.host.dataset.exact = `${this.groupAt}-${text}`;
    } catch (error) {
      this.trouble(error);
    }
  }

  /** The visible part of the map has changed. */
  moved({ queries, keys }) {
    clearTimeout(this.rest);
    const part = { queries: [queries[0], queries[1] + 1], keys: [keys[0], keys[1] + 1] };
    this.part = JSON.stringify([part.queries, part.keys]);
    this.rest = setTimeout(() => this.choose(part), REST);
  }

  drawSwitches() {
    const { groups } = this.page, { selection: { text }, groupAt } = this, show = (g, t) => {
      const { name, layers, heads, texts } = groups[g], { n_queries, n_keys } = texts[t];
      this.choose({ group: name, text: t, layer: layers[0], head: heads[0], query: null, key: null, queries: [0, n_queries], keys: [0, n_keys] });
    };
    replace(this.switches, ...textChoosers(groups, groupAt, text, (g) => show(g, Math.min(text, groups[g].texts.length - 1)), (t) => show(groupAt, t)));
  }

  open(tab) {
    this.tab = tab;
    for (const [name, pane] of Object.entries(this.panes)) pane.hidden = name !== tab;
    replace(this.tabs, choice("Show", [["map", "Map"], ["text", "Text"], ["numbers", "Numbers"]], tab, (name) => this.open(name)));
  }

  drawNumbers() {
    replace(this.card, headCard(this.head));
    this.along.show(this.head);
  }

  retheme() {
    const dark = isDarkBehind(this.host.parentNode);
    if (this.host.dataset.theme === (dark ? "dark" : "light")) return;
    this.host.dataset.theme = dark ? "dark" : "light";
    useDark(dark);
    if (!this.head) return;
    this.maps.recolour();
    this.reading.recolour();
    if (this.along.shown) this.drawNumbers();
  }

  close() {
    clearTimeout(this.rest);
    this.model.off("change:selection", this.onchange);
    this.theme.disconnect();
    this.scheme.removeEventListener("change", this.onscheme);
    this.stopTips();
    this.kernel.close();
    this.maps.large.close();
    this.along.close();
    this.reading.flow?.close();
  }
}

/** anywidget's `render`: draw the widget in `el`. Returns the function that removes it. */
export function renderWidget({ model, el }) {
  const host = h("div", { class: "qkv-widget", "data-lm-suppress-shortcuts": "true" }), root = host.attachShadow({ mode: "open" });
  root.append(h("style", {}, model.get("_style")));
  host.addEventListener("keydown", (event) => event.stopPropagation()); // the notebook has shortcuts of its own
  el.append(host);
  let view = null;
  const laidOut = new ResizeObserver(() => { // notebooks render before they attach
    if (!host.clientWidth || view) return;
    laidOut.disconnect();
    requestAnimationFrame(() => { view = new WidgetView(model, host, root); });
  });
  laidOut.observe(host);
  return () => { laidOut.disconnect(); view?.close(); };
}
