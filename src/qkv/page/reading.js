// The text of a profile, shaded by the attention that each token receives, or by the weights of one query.

import { Arcs, firstQuery, hasSink, leaveSwitch } from "./arcs.js";
import { choice, legend, Miniature, paint, selectFrom } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { rowOfCurve } from "./data.js";
import { h, replace } from "./dom.js";
import { headName } from "./heads.js";
import { binPeaks, integer, logarithmicRange, named, percent, spread } from "./numbers.js";
import { nextFrame } from "./state.js";
import { TokenFlow } from "./token_flow.js";

const STRIP = 900; // columns of the strip above the text, at most
const TALL = 600; // pixels, the largest height of the text, which scrolls

/** The levels from 0 to 1 at which values are shown, on a logarithmic scale without the lowest `part`, and its ends. */
function logarithmic(values, part) {
  const { low, high } = logarithmicRange(values, part);
  return { low, high, level: (x) => (x <= 0 ? 0 : Math.log(Math.max(x, low) / low) / Math.log(high / low)) };
}

export class Reading {
  /** onquery(query or null): a token was selected as the query whose weights shade the text. */
  constructor({ onquery = () => {} } = {}) {
    Object.assign(this, { onquery, source: "all", query: null, shown: null, loads: 0 });
    this.controls = h("div", { class: "controls" });
    this.strip = h("div", {});
    this.asker = h("div", {});
    this.readout = h("output", { class: "readout" });
    this.arcs = new Arcs({ onchoose: (at) => this.choose(this.query === at ? null : at) });
    this.pane = h("div", { class: "reading-text" });
    this.element = h("div", { class: "reading" }, this.controls, this.arcs.element, this.strip, this.asker, this.readout);
  }

  /** Show a head of `PageData.head`. The controls are in `element`, the text is in `pane`. */
  async show(shown) {
    const other = this.shown?.view !== shown.view;
    this.shown = shown;
    if (other) Object.assign(this, { query: this.exact && !shown.view.queries ? firstQuery(shown.group, shown.view, shown.curves.mean.values) : null, leave: hasSink(shown.view) && !shown.view.queries });
    await this.update();
    if (other || !this.flow) this.flowOf(shown.view.keys);
  }

  /** Shade the text by the weights of a query; null for the attention received. */
  ask(query) {
    this.query = query;
    return this.update();
  }

  async update() {
    const load = ++this.loads, { view, curves, maps, row } = this.shown, queries = view.queries || view.keys;
    if (!this.exact || this.query >= queries.length) this.query = null;
    const values = this.query === null ? this.received(curves) : await maps.line(row, this.query), between = this.exact && !view.queries ? (await maps.of(row)).largest : null;
    if (load !== this.loads) return;
    this.values = values;
    this.scale = logarithmic(this.leave ? values.subarray(1) : values, 0.1);
    this.arcs.show(between && { tokens: view.keys, turns: view.turns, values: between, pinned: this.query, leave: this.leave });
    this.draw();
    this.flow?.repaint();
  }

  /** Whether the weights of single queries are known. */
  get exact() {
    return Boolean(this.shown.maps?.exact);
  }

  /** The share that every token receives from the selected source. */
  received(curves) {
    const { view, layer, row } = this.shown;
    if (this.source === "all") return curves.mean.values;
    if (this.source === "layer") return rowOfCurve(curves.layers, layer);
    return spread(rowOfCurve(curves.received, row), view.n_keys);
  }

  draw() {
    const { group, view, curves, layer, head } = this.shown, { low, high } = this.scale;
    const sources = [["all", "All heads"], ["layer", `Layer ${group.layers[layer]}`], ["head", headName(group, layer, head)]];
    replace(this.controls,
      choice("Shade by attention received from", sources, this.source, (source) => { this.source = source; this.choose(null); }),
      view.queries ? null : leaveSwitch(this.leave, (leave) => { this.leave = leave; this.update(); }),
      legend({ low: percent(low), high: percent(high), note: "share, logarithmic" }));
    replace(this.strip, this.layers(curves, view, group));
    replace(this.asker, view.queries && this.exact ? h("label", { class: "asker" }, "Query ",
      selectFrom("asker", this.query, [[null, "all queries"], ...view.queries.map((token, at) => [at, `${at} ${named(token)}`])], (at) => this.choose(at))) : null);
    this.readout.textContent = this.hint();
  }

  /** Scroll to a token, and make it the query if it can be one. */
  reveal(at) {
    this.flow.setCurrent(at);
    this.flow.reveal(at);
    if (this.exact && !this.shown.view.queries) this.choose(at);
    else this.point(at);
  }

  choose(query) {
    this.onquery(query);
    return this.ask(query);
  }

  hint() {
    const { group, view, layer, head } = this.shown;
    if (this.query !== null) return `Shaded: the weights of the query “${named((view.queries || view.keys)[this.query])}” (position ${integer(this.query)}) in ${headName(group, layer, head)}. Select it again to go back.`;
    if (this.exact && !view.queries) return `Select a token to see its attention weights in ${headName(group, layer, head)}.`;
    if (this.source === "head" && view.bins.received < view.n_keys) return `Stored as ${integer(view.bins.received)} means of ${(view.n_keys / view.bins.received).toFixed(1)} tokens for single heads.`;
    return "Point at a token for its share.";
  }

  point(at) {
    if (at === null) { this.readout.textContent = this.hint(); return; }
    const { view } = this.shown, share = this.values[at], name = `“${named(view.keys[at])}”`;
    this.readout.textContent = this.query === null
      ? `${name} at position ${integer(at)} receives ${percent(share)} of the attention, ${(share * view.n_keys).toPrecision(2)} × an equal share`
      : `“${named((view.queries || view.keys)[this.query])}” gives ${name} (position ${integer(at)}) ${percent(share)} of its weight`;
  }

  flowOf(tokens) {
    this.flow?.close();
    this.flow = new TokenFlow({
      name: "reading", tokens, turns: this.shown.view.turns, label: "The text; arrow keys move between tokens",
      look: (at) => { if (this.leave && !at) return null; const colour = ramp(this.scale.level(this.values[at])); return { background: css(colour), ink: inkOn(colour), line: "" }; },
      kind: (at) => (at === this.query && !this.shown.view.queries ? "pinned" : ""),
      onhover: (at) => this.point(at),
      onchoose: (at) => { if (this.exact && !this.shown.view.queries) this.choose(this.query === at ? null : at); },
      oncurrent: (at) => this.point(at),
      onescape: () => this.choose(null),
      onscroll: () => this.drawn(),
    });
    this.pane.style.height = `${TALL}px`;
    this.pane.replaceChildren(this.flow.element);
  }

  /** After the text was drawn or scrolled: mark its visible part on the strip, and make the pane of a short text smaller. */
  drawn() {
    this.frame();
    const height = Math.min(this.flow.space.offsetHeight + 20, TALL);
    if (this.pane.offsetHeight !== height) nextFrame(() => { this.pane.style.height = `${height}px`; });
  }

  /** The attention received in each layer along the whole text; a click scrolls the text there. */
  layers(curves, view, { layers }) {
    const n = view.n_keys, rows = layers.map((_, l) => binPeaks(rowOfCurve(curves.layers, l), STRIP));
    const { level } = logarithmic(rows.flatMap((row) => Array.from(row)), 0.05);
    const canvas = h("canvas", {});
    paint(canvas, layers.length, rows[0].length, (l, b) => level(rows[l][b]));
    canvas.style.height = `${Math.min(Math.max(layers.length * 9, 54), 200)}px`;
    this.whole = new Miniature({ name: "layers-strip", label: "Received attention by layer and position", ongo: (x) => this.flow.reveal(Math.floor(x * n)) });
    this.whole.show(canvas);
    this.frame();
    return h("figure", { class: "strip" },
      h("figcaption", {}, h("span", {}, "The whole text, layer by layer"), h("small", {}, `rows: layer ${layers[0]} (top) to ${layers.at(-1)} · columns: positions 0 to ${integer(n - 1)}${n > STRIP ? ", the largest share in each" : ""} · click to go there`)),
      this.whole.element);
  }

  /** Mark the visible part of the text on the strip. */
  frame() {
    if (!this.whole || !this.flow?.width) return;
    const [first, last] = this.flow.view, n = this.shown.view.n_keys;
    this.whole.mark({ left: first / n, right: (last + 1) / n });
  }

  recolour() {
    if (!this.shown || !this.values) return;
    this.draw();
    this.flow?.repaint();
  }
}
