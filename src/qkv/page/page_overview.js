// Overview: the main findings, the grid of all heads, and the card of the selected head.

import { choice, legend } from "./charts.js";
import { css, inkOn, looks, ramp } from "./colour.js";
import { h, replace, svg } from "./dom.js";
import { findingTiles } from "./findings.js";
import { csvOf, svgKey, svgPicture, svgRamp, svgText } from "./export.js";
import { KIND, MANY, cellsOf, headButton, headCard, headCurves, headGrid, headName, headTitle, kindCells, kindKey, kindsOf, labelOf, layerShares, markHead, meaningOf, mostSimilar, rowOf, scaleOf, selectable, similarityMeaning, sizeWords, statisticsOf } from "./heads.js";
import { integer, short } from "./numbers.js";

const ORDERS = [["layer", "Layer"], ["value", "Value"], ["type", "Type"]];
const SIMILAR = 3; // heads that the card names

/** Keys of its state: `statistic` and `sort`. */
export const mount = (root, app) => new Overview(root, app);

class Overview {
  #app;
  #head = h("header", { class: "overview-found" });
  #controls = h("div", { class: "controls" });
  #grid = h("div", { class: "grid-box overview-grid" });
  #layers = h("div", { class: "overview-layers" });
  #card = h("article", { class: "card overview-card", "aria-label": "Selected head" });
  #similar = h("p", { class: "overview-links overview-similar" });
  #curves = h("div", { class: "overview-curves" });
  #cleanups = [];
  #drawings = 0; // counts drawings of the curves, so that a slow one cannot replace a later one

  constructor(root, app) {
    this.#app = app;
    root.append(this.#head,
      h("div", { class: "overview-split" }, h("div", {}, this.#controls, this.#grid, this.#layers), this.#card),
      this.#curves);
    this.#cleanups.push(app.onTheme(() => this.update(new Set(["source"]))));
    const watcher = new ResizeObserver(() => this.#along());
    watcher.observe(this.#curves);
    this.#cleanups.push(() => watcher.disconnect());
  }

  unmount() {
    for (const stop of this.#cleanups) stop();
  }

  update(changed) {
    if (this.#corrected()) return; // which calls update again
    if (["page", "source", "group", "text"].some((key) => changed.has(key))) {
      this.#found();
      this.#heads();
      this.#selected();
    } else if (changed.has("statistic") || changed.has("sort")) this.#heads();
    if (changed.has("layer") || changed.has("head")) {
      markHead(this.#grid, this.#app.state.layer, this.#app.state.head);
      this.#selected();
    }
  }

  /** Remove unknown values from the address, with a note; returns whether there were any. */
  #corrected() {
    const { statistic, sort } = this.#app.state;
    if (statistic !== undefined && !this.#statistics().includes(statistic)) {
      this.#app.trouble(`These heads have no statistic “${statistic}”; ${looks.statistics[this.#statistic].label.toLowerCase()} is shown.`);
      this.#app.go({ statistic: null }, { replace: true });
      return true;
    }
    if (sort !== undefined && !ORDERS.some(([id]) => id === sort)) {
      this.#app.trouble(`There is no order “${sort}” of heads; they are ordered by layer.`);
      this.#app.go({ sort: null }, { replace: true });
      return true;
    }
    return false;
  }

  get #page() { return this.#app.opened().page; }
  get #group() { return this.#page.groups[this.#app.state.group]; }
  get #view() { return this.#group.texts[this.#app.state.text]; }

  /** The selected statistic, or the first available one. */
  get #statistic() {
    const known = this.#statistics();
    return known.includes(this.#app.state.statistic) ? this.#app.state.statistic : known[0];
  }

  /** The order of the heads; types of heads have no order by value. */
  get #order() {
    const { sort } = this.#app.state;
    return this.#orders().some(([id]) => id === sort) ? sort : "layer";
  }

  #statistics() {
    return [...statisticsOf(this.#view), KIND];
  }

  #orders() {
    return ORDERS.filter(([id]) => id !== "value" || this.#statistic !== KIND);
  }

  // ---- main findings --------------------------------------------------------------------------------------

  #found() {
    const view = this.#view, group = this.#group, { attrs } = this.#page;
    const facts = [
      sizeWords(group),
      `${group.causal ? "causal" : view.queries ? "cross" : "bidirectional"} attention`,
      attrs.parameters && `${short(attrs.parameters)} parameters`,
      attrs.dtype,
      attrs.seconds && `measured in ${attrs.seconds.toFixed(attrs.seconds < 10 ? 2 : 0)} s`,
    ];
    this.#head.replaceChildren(
      h("p", { class: "overview-headline" }, tied(view.headline)),
      h("p", { class: "overview-facts" }, facts.filter(Boolean).join(" · ")),
      h("ul", { class: "overview-tiles" }, findingTiles(view.findings, (layer, head) =>
        this.#app.go({ page: "map", layer: group.layers.indexOf(layer), head: group.heads.indexOf(head) }), { folded: true })));
  }

  // ---- every head ----------------------------------------------------------------------------------------

  #heads() {
    const app = this.#app, group = this.#group, view = this.#view, statistic = this.#statistic, order = this.#order;
    replace(this.#controls,
      h("label", {}, "Colour by ", h("select", { "data-key": "statistic", onchange: (event) => app.go({ statistic: event.target.value }) },
        this.#statistics().map((name) => h("option", { value: name, selected: name === statistic }, name === KIND ? "Type of head" : labelOf(group, name))))),
      choice("Order by", this.#orders(), order, (sort) => app.go({ sort })),
      h("p", { class: "overview-meaning" },
        h("span", { class: "meaning" }, statistic === KIND ? "the first type whose criterion the head meets, over all texts" : meaningOf(group, statistic)),
        statistic === KIND ? null : legend(scaleOf(view, statistic))));
    const cells = this.#cells(), label = statistic === KIND ? "Type of every head" : `${labelOf(group, statistic)} of every head`;
    const { layer, head } = app.state;
    const select = (l, k) => app.go({ layer: l, head: k });
    const open = (l, k) => app.go({ page: "map", layer: l, head: k });
    const drawn = order === "layer"
      ? [h("span", { class: "axis" }, "head →"), headGrid({ group, cells, layer, head, label, select, open })]
      : [headFlow({ group, cells, sections: this.#sections(order), layer, head, label, select, open })];
    this.#grid.style.setProperty("--heads", group.heads.length);
    replace(this.#grid, ...drawn, statistic === KIND ? kindKey(this.#page, group) : null);
    this.#layers.replaceChildren(h("h3", {}, "Where the weight goes, by layer"), ...layerShares(group, view));
  }

  #cells() {
    const statistic = this.#statistic, group = this.#group, view = this.#view;
    return statistic === KIND ? kindCells(this.#page, group, view) : cellsOf(group, view, statistic);
  }

  #kinds() {
    return kindsOf(this.#page, this.#group);
  }

  /** Rows of the table of heads in order, in titled groups if they are ordered by type. */
  #sections(order) {
    const values = this.#statistic === KIND ? null : this.#view.heads[this.#statistic];
    const all = this.#view.heads.goes_to.map((_, at) => at);
    const descending = (a, b) => (values ? (values[b] ?? -Infinity) - (values[a] ?? -Infinity) || a - b : a - b);
    if (order === "value") return [{ title: null, rows: all.sort(descending) }];
    return this.#kinds().map(({ name, count }) => ({ title: `${name} · ${integer(count)}`, rows: all.filter((at) => this.#group.types.type[at] === name).sort(descending) }));
  }

  // ---- the selected head ---------------------------------------------------------------------------------

  #selected() {
    const app = this.#app, { layer, head } = app.state, group = this.#group, view = this.#view;
    replace(this.#card, ...headCard({ group, view, layer, head }),
      h("p", { class: "overview-links" },
        h("a", { class: "overview-link", href: app.address({ page: "map" }), "data-key": "to-map" }, "Map"),
        h("a", { class: "overview-link", href: app.address({ page: "text" }), "data-key": "to-text" }, "Text")),
      this.#similar);
    this.#along();
    this.#findSimilar();
  }

  /** Links that compare the selected head with the heads whose maps are most like its own. */
  async #findSimilar() {
    const app = this.#app, { source, group: g, text, layer, head } = app.state, group = this.#group, box = this.#similar;
    const stale = () => ["source", "group", "text", "layer", "head"].some((key) => app.state[key] !== { source, group: g, text, layer, head }[key]);
    box.replaceChildren();
    try {
      const { maps, values } = await app.opened().similar(g, text, layer, head);
      if (stale()) return;
      const found = mostSimilar(group, { layer, head }, values, SIMILAR);
      const compared = (other) => ({ page: "compare", bsource: source, bgroup: g, btext: text, blayer: other.layer, bhead: other.head });
      box.replaceChildren(...(found.length === 0 ? [] : [
        h("span", { "data-tip": similarityMeaning(maps) }, "Similar maps"),
        ...found.map((other, k) => h("a", { class: "overview-link", href: app.address(compared(other)), "data-key": k ? `to-compare-${k}` : "to-compare", "data-tip": `Compare with ${headTitle(group, other.layer, other.head)}` },
          headName(group, other.layer, other.head), h("small", {}, other.value.toFixed(2)))),
      ]));
    } catch (error) {
      if (!stale()) app.trouble(error);
    }
  }

  /** Draw the curves of the head, again for every width because they are drawn to the pixel. */
  async #along() {
    const app = this.#app, drawing = ++this.#drawings, { group: g, text, layer, head } = app.state;
    const group = this.#group, view = this.#view;
    try {
      const curves = await app.opened().curves(g, text);
      if (drawing !== this.#drawings) return;
      const width = Math.floor(parseFloat(getComputedStyle(this.#curves).gridTemplateColumns));
      if (width > 0) this.#curves.replaceChildren(...headCurves({ group, view, curves, layer, head, width }));
    } catch (error) {
      app.trouble(error);
    }
  }

  // ---- export --------------------------------------------------------------------------------------------

  picture() {
    const name = `${this.#app.opened().name}-overview-${this.#statistic}`;
    return { name, svg: () => this.#svg(), csv: () => this.#csv() };
  }

  #svg() {
    const group = this.#group, statistic = this.#statistic, cells = this.#cells(), order = this.#order;
    const size = group.heads.length > MANY ? 18 : 36, gap = 2, across = group.heads.length, parts = [];
    const step = size + gap, wide = 30 + across * step;
    const box = (x, y, at) => {
      const { colour, text } = cells[at];
      parts.push(svg("rect", { x, y, width: size, height: size, rx: 3, fill: css(colour) }));
      if (size > 20) parts.push(svgText(x + size / 2, y + size / 2 + 4, text, { "text-anchor": "middle", fill: inkOn(colour) }));
    };
    let bottom = 16;
    if (order === "layer") {
      group.heads.forEach((id, k) => { if (size > 20 || k % 4 === 0) parts.push(svgText(30 + k * step + size / 2, 10, id, { "text-anchor": "middle", fill: "var(--soft)" })); });
      group.layers.forEach((id, l) => {
        parts.push(svgText(22, bottom + size / 2 + 4, id, { "text-anchor": "end", fill: "var(--soft)" }));
        group.heads.forEach((_, k) => box(30 + k * step, bottom, rowOf(group, l, k)));
        bottom += step;
      });
    } else for (const { title, rows } of this.#sections(order)) {
      if (title) parts.push(svgText(30, bottom + 4, title, { fill: "var(--soft)" }));
      bottom += title ? 12 : 0;
      rows.forEach((at, index) => box(30 + (index % across) * step, bottom + Math.floor(index / across) * step, at));
      bottom += Math.ceil(rows.length / across) * step + (title ? 16 : 0);
    }
    if (statistic === KIND) this.#kinds().forEach(({ name, colour, count }, index) => parts.push(svgKey(30, bottom + 22 + 18 * index, [[`${name} ${count}`, css(colour)]])));
    else {
      const { low, high } = scaleOf(this.#view, statistic);
      parts.push(svgRamp(30, bottom + 22, Array.from({ length: 24 }, (_, k) => css(ramp(k / 23))), low, high));
    }
    const height = bottom + 22 + (statistic === KIND ? 18 * this.#kinds().length : 18);
    const title = `${this.#app.opened().name} · ${statistic === KIND ? "kind of head" : labelOf(group, statistic)}`;
    return svgPicture({ width: Math.max(wide, 420), height, title, note: this.#view.headline, parts });
  }

  #csv() {
    const group = this.#group, view = this.#view, names = Object.keys(view.heads);
    const { type, traits } = group.types;
    return csvOf(["layer", "head", ...names, "type", "traits"],
      group.layers.flatMap((layer, l) => group.heads.map((head, k) => {
        const at = rowOf(group, l, k);
        return [layer, head, ...names.map((name) => view.heads[name][at]), type[at], traits[at].join(" ")];
      })));
  }
}

/** Heads in any order, in lines and titled sections; `cells` of `cellsOf`. `select` and `open` as in `selectable`. */
function headFlow({ group, cells, sections, layer, head, label, select, open }) {
  const count = group.heads.length, many = count > MANY;
  const button = (at) => {
    const l = Math.floor(at / count), k = at % count, { text, colour, tip } = cells[at];
    return headButton(group, l, k, tip, { role: "option", "aria-selected": "false", style: { background: css(colour), color: inkOn(colour) } },
      many ? null : [h("small", {}, `${group.layers[l]}·${group.heads[k]}`), h("span", {}, text)]);
  };
  const flow = h("div", { class: many ? "grid tight overview-flow" : "grid overview-flow", role: "listbox", "aria-label": `${label}, in order; arrow keys move` },
    sections.map(({ title, rows }) => h("div", { role: "group", "aria-label": title ?? label },
      title ? h("h4", {}, title) : null, h("div", { class: "overview-line" }, rows.map(button)))));
  return selectable(flow, { layer, head, select, open });
}

const tied = (text) => text.replace(/ (%|× |· (?=H\d))/g, (_, mark) => `\u00a0${mark.trim()}${mark === "%" ? "" : "\u00a0"}`); // no line break inside a figure
