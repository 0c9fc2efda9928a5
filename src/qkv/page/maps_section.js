// All maps of a text: the wall of small maps, and the large map of the selected head.

import { h, replace } from "./dom.js";
import { HeadMap, edgeCurves } from "./head_map.js";
import { headName, headTitle, headWords, markHead } from "./heads.js";
import { Wall } from "./wall.js";

export class MapsSection {
  /** onselect(layer, head); onpin, onview and ontrouble as in HeadMap. Its elements: those of `wall`, and `mapBox`. */
  constructor({ onselect, ...listeners }) {
    Object.assign(this, { shown: null, settings: {} });
    this.wall = new Wall({ banner: true, select: onselect, onset: (changes) => this.set(changes) });
    this.large = new HeadMap(listeners);
    // The wheel scrolls the page, unless the map was selected or Ctrl is held.
    this.large.stage.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey && this.large.stage.getRootNode().activeElement !== this.large.canvas) event.stopPropagation();
    }, { capture: true });
    this.title = h("div", { class: "map-title" });
    this.mapBox = h("div", {}, this.title, this.large.element);
  }

  /**
   * Show a head of `PageData.head`. `maps`: StoredMaps, or where exact tiles come from, {shape, tile(row, pool, place, {signal}),
   * pair(row, query, key), note}.
   */
  show(shown, maps = shown.maps) {
    const { group, view, curves, layer, head, row } = shown, other = this.shown?.view !== view;
    this.shown = shown;
    if (other) this.draw(); else markHead(this.wall.box, layer, head);
    replace(this.title, h("h3", {}, headTitle(group, layer, head)), h("p", { class: "map-goes" }, headWords(group, view, row).join(" · ")));
    return this.large.show({
      shape: maps.shape, tile: (...tile) => maps.tile(row, ...tile), pair: maps.pair ? (...pair) => maps.pair(row, ...pair) : null, note: () => maps.note, tokens: { keys: view.keys, queries: view.queries || view.keys }, profiles: edgeCurves(curves, view, row), name: headName(group, layer, head),
    });
  }

  /** Order or filter the wall, as with its controls. */
  set(changes) {
    Object.assign(this.settings, changes);
    this.draw();
  }

  /** Draw the wall and its controls again. */
  draw() {
    this.wall.draw(this.shown, this.settings);
  }

  recolour() {
    if (!this.shown) return;
    this.draw();
    this.large.recolour();
  }
}
