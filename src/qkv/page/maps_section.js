// All maps of a text: the wall of small maps with its order, and the large map of the selected head.

import { choice, legend } from "./charts.js";
import { h, replace } from "./dom.js";
import { HeadMap, edgeCurves } from "./head_map.js";
import { headName, headTitle, kindsOf, markHead, rowOf } from "./heads.js";
import { integer, percent } from "./numbers.js";
import { wall } from "./wall.js";

export class MapsSection {
  /** onselect(layer, head); onpin, onview and ontrouble as in HeadMap. Its elements: `controls`, `wallBox` and `mapBox`. */
  constructor({ onselect, ...listeners }) {
    Object.assign(this, { onselect, order: "layer", shown: null });
    this.large = new HeadMap(listeners);
    // The wheel scrolls the page, unless the map was selected or Ctrl is held.
    this.large.stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && this.large.stage.getRootNode().activeElement !== this.large.canvas) event.stopPropagation();
    }, { capture: true });
    this.title = h("div", { class: "map-title" });
    this.controls = h("div", { class: "controls" });
    this.wallBox = h("div", {});
    this.mapBox = h("div", {}, this.title, this.large.element);
  }

  /**
   * Show a text: {page, group, view, curves, maps}, with `maps` a StoredMaps. `exact`: null, or where exact tiles come from,
   * {shape, tile(layer, head, pool, place, {signal}), pair(layer, head, query, key), note}.
   */
  show(shown, layer, head) {
    this.shown = shown;
    this.at = [layer, head];
    this.draw();
    return this.select(layer, head);
  }

  /** Draw the wall and its controls again. */
  draw() {
    const { page, group, view, maps } = this.shown, { pooled } = view, [layer, head] = this.at;
    const high = pooled?.high ?? 1, binned = pooled && (pooled.bin_queries > 1 || pooled.bin_keys > 1);
    const { types } = group, byType = (name) => types.type.map((_, at) => at).filter((at) => types.type[at] === name).sort((a, b) => (types[name]?.[b] ?? 0) - (types[name]?.[a] ?? 0));
    const sections = this.order === "layer" ? null : kindsOf(page, group).map(({ name, count }) => ({ title: `${name} · ${integer(count)}`, rows: byType(name) }));
    replace(this.controls,
      choice("Order by", [["layer", "Layer × head"], ["type", "Type of head"]], this.order, (order) => { this.order = order; this.draw(); }),
      legend({ low: percent(high / 1000), high: percent(high), note: `${binned ? "largest weight of a bin" : "weight"}, logarithmic` }),
      h("p", { class: "meaning" }, `Rows are queries, columns are keys${binned ? `, in bins of ${integer(pooled.bin_queries)} × ${integer(pooled.bin_keys)} tokens` : ""}. Select a map to enlarge it.`));
    replace(this.wallBox, wall({
      group, high, sections, layer, head, load: (l, k) => maps.small(rowOf(group, l, k)), select: this.onselect, tip: (l, k) => this.words(l, k).join("\n"),
    }));
  }

  /** Where a head attends, and its type, in words. */
  words(layer, head) {
    const { group, view } = this.shown, at = rowOf(group, layer, head), type = group.types.type[at];
    return [view.heads.goes_to[at], ...(type === "mixed" ? [] : [`${type} head`])];
  }

  select(layer, head) {
    const { group, view, maps, curves, exact } = this.shown, row = rowOf(group, layer, head);
    this.at = [layer, head];
    markHead(this.wallBox.firstChild, layer, head);
    replace(this.title, h("h3", {}, headTitle(group, layer, head)), h("p", { class: "map-goes" }, this.words(layer, head).join(" · ")));
    const from = exact
      ? { shape: exact.shape, tile: (pool, place, options) => exact.tile(layer, head, pool, place, options), pair: (query, key) => exact.pair(layer, head, query, key), note: () => exact.note }
      : { shape: maps.shape, tile: (pool, place) => maps.tile(row, pool, place), pair: null, note: () => maps.note };
    return this.large.show({ ...from, tokens: { keys: view.keys, queries: view.queries || view.keys }, profiles: edgeCurves(curves, view, row), name: headName(group, layer, head) });
  }

  recolour() {
    if (!this.shown) return;
    this.draw();
    this.large.recolour();
  }
}
