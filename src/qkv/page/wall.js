// The wall: a small map of every head, layers down and heads across, or in sections.

import { paint } from "./charts.js";
import { h } from "./dom.js";
import { headButton, headName, layerGrid, selectable } from "./heads.js";
import { levelOf } from "./data.js";
import { counted, nextFrame } from "./state.js";

/**
 * `load(layer, head)` resolves to the pooled map of a head, or null; it is called when the map comes into view.
 * `sections`: null for a grid, or a list of {title, rows}, the heads (layer × number of heads + head) of each.
 * `tip(layer, head)`: the text of the tooltip; `beside(layer, head)`: a number beside the name of a head in sections. `select(layer, head)` is called for clicks and arrow keys,
 * and `open(layer, head)`, if given, for clicks and Enter.
 */
export function wall({ group, high, sections = null, layer, head, load, select, open = null, tip = () => "", beside = () => "" }) {
  const { heads } = group;
  const painter = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      painter.unobserve(target);
      counted(draw(target));
    }
  }, { rootMargin: "300px" });

  async function draw(cell) {
    const map = await load(+cell.dataset.layer, +cell.dataset.head);
    if (!map) return;
    paint(cell.querySelector("canvas"), map.rows, map.columns, (row, column) => levelOf(map.largest[row * map.columns + column], high));
  }

  function cellOf(l, k) {
    const cell = headButton(group, l, k, tip(l, k), { class: "wall-cell", role: sections ? null : "gridcell" },
      h("canvas", { width: 1, height: 1 }), sections ? h("span", {}, headName(group, l, k), beside(l, k) ? h("b", {}, beside(l, k)) : null) : null);
    painter.observe(cell);
    return cell;
  }

  const box = sections
    ? h("div", { class: "wall wall-flow" }, sections.map(({ title, rows }) => h("section", {}, h("h3", {}, title), h("div", { class: "wall-row" }, rows.map((at) => cellOf(Math.floor(at / heads.length), at % heads.length))))))
    : layerGrid(group, cellOf, heads.length > 24 ? 4 : 1, { class: "wall", "aria-label": "Attention maps of all heads; arrow keys move", style: { "--heads": heads.length } });

  selectable(box, { layer, head, select, open, once: true });
  nextFrame(() => nextFrame(() => {})); // by then, the observer has told which maps are in view
  return box;
}
