// The wall: a small map of every head, layers down and heads across or in sections, and the controls of its order.

import { choice, legend, paint, selectFrom } from "./charts.js";
import { css, looks } from "./colour.js";
import { h, replace } from "./dom.js";
import { headButton, headName, headWords, kindsOf, labelOf, largestFirst, layerGrid, selectable, similarityMeaning, statisticsOf } from "./heads.js";
import { levelOf, rowOf } from "./data.js";
import { integer, percent, written } from "./numbers.js";
import { counted, nextFrame } from "./state.js";

const ORDERS = [["layer", "Layer × head"], ["type", "Type"], ["value", "Statistic"]];

export class Wall {
  /**
   * onset({sort}, {by} or {only}): a control was used. `similar`: whether the order by similarity is offered. `select(layer,
   * head)` is called for clicks and arrow keys, and `open(layer, head)`, if given, for clicks and Enter. `banner`: a wall that
   * fits into the first screen, on which other heads than the chosen ones fade, under which a key of the types chooses.
   */
  constructor({ onset, similar = false, banner = false, select, open = null }) {
    Object.assign(this, { onset, select, open, banner, orders: similar ? [...ORDERS, ["similar", "Similarity"]] : ORDERS });
    this.controls = h("div", { class: "controls" });
    this.box = h("div", {});
  }

  /**
   * Draw the maps of a text, as in `PageData.head`, in an order `sort`, of which "value" is by the statistic `by`; `only` those
   * heads of a type, or of `chosen` rows. `alike`: the similarity of each head to the selected one, for the order "similar".
   */
  draw({ page, group, view, maps, layer, head }, { sort, by, only, chosen = null }, alike = null) {
    const kinds = kindsOf(page, group), statistics = statisticsOf(view);
    if (!this.orders.some(([id]) => id === sort)) sort = "layer";
    if (!statistics.includes(by)) [by] = statistics;
    if (!kinds.some(({ name }) => name === only)) only = null;
    replace(this.controls, ...this.settings({ group, small: maps.smallest, kinds, statistics }, { sort, by, only, chosen }, alike));
    const frames = Object.fromEntries(kinds.map(({ name, colour }) => [name, css(colour)]));
    const faded = (row) => this.banner && (chosen ? !chosen.includes(row) : only && group.types.type[row] !== only);

    const [what, values, unit] = alike ? ["similarity", alike.values, ""] : sort === "value" ? [labelOf(group, by), view.heads[by], looks.statistics[by].unit] : [];
    const painter = painterOf((l, k) => maps.of(rowOf(group, l, k), maps.smallest), maps.smallest.high, this.banner);
    const cellOf = (l, k) => {
      const row = rowOf(group, l, k), value = what && written(values[row], unit === "%" ? unit : ""), tip = [...headWords(group, view, row), ...(what ? [`${what} ${written(values[row], unit)}`] : [])].join("\n");
      const cell = headButton(group, l, k, tip, { class: faded(row) ? "wall-cell faded" : "wall-cell", role: sections ? null : "gridcell", style: { "--frame": frames[group.types.type[row]] } },
        h("canvas", { width: 1, height: 1 }), sections ? h("span", {}, headName(group, l, k), value ? h("b", {}, value) : null) : null);
      painter.observe(cell);
      return cell;
    };
    const count = group.heads.length, sections = sectionsOf(sort, { group, kinds, only: this.banner ? null : only, values, title: alike ? `Like ${headName(group, layer, head)}` : `${what}, largest first` });
    const wall = sections
      ? h("div", { class: "wall wall-flow" }, sections.map(({ title, rows }) => h("section", {}, h("h3", {}, title), h("div", { class: "wall-row" }, rows.map((at) => cellOf(Math.floor(at / count), at % count))))))
      : this.gridOf(group, cellOf);
    replace(this.box, selectable(wall, { layer, head, select: this.select, open: this.open, once: !this.banner }));
    nextFrame(() => nextFrame(() => {})); // by then, the observer has told which maps are in view
  }

  /** All heads, layers down; in a banner the longer side of layers and heads lies along the longer side of the window. */
  gridOf(group, cellOf) {
    const { layers, heads } = group, turned = this.banner && layers.length > heads.length === innerWidth > 700;
    const [rows, columns] = turned ? [heads, layers] : [layers, heads], words = turned ? "layer →, head ↓" : "head →, layer ↓";
    return layerGrid({ layers: rows, heads: columns }, turned ? (k, l) => cellOf(l, k) : cellOf, columns.length > 24 ? 4 : 1,
      { class: this.banner ? "wall banner" : "wall", "aria-label": `Attention maps of all heads (${words}); arrow keys move`, style: { "--heads": columns.length, "--rows": rows.length } });
  }

  /** The types of heads with their colours and numbers; a click shows one type, or all again. */
  key(kinds, only, chosen) {
    return h("div", { class: "wall-key", role: "group", "aria-label": "Types of heads" },
      chosen ? h("button", { type: "button", class: "quiet", "data-key": "kind-chosen", "aria-pressed": "true", onclick: () => this.onset({ chosen: null }) }, `${integer(chosen.length)} heads of a finding ×`) : null,
      kinds.map(({ name, colour, count }) => h("button", { type: "button", class: "quiet", "data-key": `kind-${name}`, "aria-pressed": String(name === only && !chosen), onclick: () => this.onset({ only: name === only && !chosen ? null : name, chosen: null }) },
        h("i", { style: { background: css(colour) } }), h("b", {}, integer(count)), ` ${name}`)));
  }

  /** The choosers of what `draw` shows, and a legend. */
  settings({ group, small, kinds, statistics }, { sort, by, only, chosen }, alike) {
    const { high, bin_queries, bin_keys } = small, binned = bin_queries > 1 || bin_keys > 1, several = group.types.type.length > 1;
    return [
      this.banner && several ? this.key(kinds, only, chosen) : null,
      several && choice("Order by", this.orders, sort, (order) => this.onset({ sort: order })),
      sort === "value" ? h("label", {}, "Statistic ", selectFrom("by", by, statistics.map((name) => [name, labelOf(group, name)]), (name) => this.onset({ by: name }))) : null,
      this.banner ? null : h("label", {}, "Show ", selectFrom("only", only, [[null, `all ${integer(group.types.type.length)} heads`], ...kinds.map(({ name, count }) => [name, `${name} (${count})`])], (name) => this.onset({ only: name }))),
      legend({ low: percent(high / 1000), high: percent(high), note: `${binned ? "largest weight of a bin" : "weight"}, logarithmic` }),
      h("p", { class: "meaning" }, `${this.banner && several ? "Framed by type. " : ""}In a map rows are queries, columns are keys${binned ? `, in bins of ${integer(bin_queries)} × ${integer(bin_keys)} tokens` : ""}. Select a map to see it large.${alike ? ` The heads with the most similar maps come first. Similarity is ${similarityMeaning(alike.maps)}.` : ""}`),
    ];
  }
}

/** An observer that paints the small map of each cell which comes into view, or of `all`. `load(layer, head)`: a promise of the map. */
function painterOf(load, high, all) {
  async function draw(cell) {
    const map = await load(+cell.dataset.layer, +cell.dataset.head);
    paint(cell.querySelector("canvas"), map.rows, map.columns, (row, column) => levelOf(map.largest[row * map.columns + column], high));
  }
  const painter = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      painter.unobserve(target);
      counted(draw(target));
    }
  }, { rootMargin: all ? "99999px" : "300px" }); // a picture of a whole report has all maps
  return painter;
}

/** The sections of a wall, [{title, rows}, …], or null for a grid. `values`: those by which heads are sorted, if by any. */
function sectionsOf(sort, { group, kinds, only, values, title }) {
  const { types, layers, heads } = group, rows = types.type.map((_, at) => at).filter((at) => !only || types.type[at] === only);
  if (values) return [{ title, rows: largestFirst(rows, values) }];
  if (sort === "type")
    return kinds.map(({ name, count }) => ({ title: `${name} · ${integer(count)}`, rows: largestFirst(rows.filter((at) => types.type[at] === name), types[name] ?? []) })).filter((one) => one.rows.length);
  return only ? [...Map.groupBy(rows, (at) => Math.floor(at / heads.length))].map(([layer, found]) => ({ title: `Layer ${layers[layer]}`, rows: found })) : null;
}
