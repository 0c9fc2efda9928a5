// Overview: the main findings, the grid of all heads, and the card of the selected head.

import { TEXT } from "./address.js";
import { looks } from "./colour.js";
import { rowOf } from "./data.js";
import { h, replace } from "./dom.js";
import { findingTiles, leadOf } from "./findings.js";
import { csvOf } from "./export.js";
import { KIND, allHeads, factsOf, HeadCurves, headCard, headName, headTitle, labelOf, markHead, mostSimilar, similarityMeaning, sizeWords, statisticsOf } from "./heads.js";
import { Wall } from "./wall.js";

const SIMILAR = 3; // heads that the card names

/** Keys of its state: `statistic`; `sort`, `by`, `only`, as of the page of all maps; `finding`, whose heads the wall shows. */
export const mount = (root, app) => new Overview(root, app);

class Overview {
  #app;
  #head = h("header", { class: "overview-found" });
  #wall;
  #tiles = h("div", { class: "overview-tiles" });
  #controls = h("div", { class: "controls" });
  #grid = h("div", { class: "grid-box overview-grid" });
  #layers = h("div", { class: "overview-layers" });
  #card = h("article", { class: "card overview-card", "aria-label": "Selected head" });
  #similar = h("p", { class: "overview-similar" });
  #curves = new HeadCurves("overview-curves");
  #selections = 0; // counts selections, so that a slow one cannot replace a later one

  constructor(root, app) {
    this.#app = app;
    this.#wall = new Wall({
      banner: true, onset: ({ chosen, ...changes }) => app.go({ ...changes, finding: chosen }),
      select: (layer, head) => app.go({ layer, head }, { replace: true }), open: (layer, head) => app.go({ page: "map", layer, head }),
    });
    root.append(this.#head, h("div", { class: "walled" }, this.#wall.box, this.#wall.controls), this.#tiles,
      h("div", { class: "overview-split" }, h("div", {}, h("h2", { class: "unseen" }, "Every head"), this.#controls, this.#grid, this.#layers), this.#card),
      this.#curves.element);
  }

  unmount() { this.#curves.close(); }

  recolour() { this.update(new Set(["source"])); }

  async update(changed) {
    if (this.#corrected()) return; // which calls update again
    const { layer, head } = this.#app.state, has = (...keys) => keys.some((key) => changed.has(key)), other = has("page", ...TEXT), moved = has("layer", "head");
    if (other) this.#found();
    if (other || has("sort", "by", "only", "finding")) this.#maps();
    else if (moved) markHead(this.#wall.box, layer, head);
    if (other || has("statistic")) this.#heads();
    else if (moved) markHead(this.#grid, layer, head);
    if (other || moved) await this.#selected();
  }

  /** Remove an unknown statistic from the address, with a note; returns whether there was one. */
  #corrected() {
    const { statistic } = this.#app.state;
    if (statistic === undefined || this.#statistics().includes(statistic)) return false;
    this.#app.trouble(`These heads have no statistic “${statistic}”; ${looks.statistics[this.#statistic].label.toLowerCase()} is shown.`);
    this.#app.go({ statistic: null }, { replace: true });
    return true;
  }

  get #page() { return this.#app.opened().page; }
  get #group() { return this.#page.groups[this.#app.state.group]; }
  get #view() { return this.#group.texts[this.#app.state.text]; }

  /** The selected statistic, or the first available one. */
  get #statistic() {
    const known = this.#statistics();
    return known.includes(this.#app.state.statistic) ? this.#app.state.statistic : known[0];
  }

  #statistics() {
    return [...statisticsOf(this.#view), KIND];
  }

  // ---- main findings --------------------------------------------------------------------------------------

  #found() {
    const view = this.#view, group = this.#group, { attention, parameters, dtype, "measured in": time } = factsOf(this.#page, group, view);
    const facts = [sizeWords(group), `${attention} attention`, parameters && `${parameters} parameters`, dtype, time && `measured in ${time}`];
    this.#head.replaceChildren(
      h("p", { class: "overview-headline" }, leadOf(view)));
    this.#tiles.replaceChildren(
      h("p", { class: "overview-facts" }, facts.filter(Boolean).join(" · ")),
      h("ul", { class: "tiles" }, findingTiles(view.findings, {
        open: (layer, head) => this.#app.go({ page: "map", layer: group.layers.indexOf(layer), head: group.heads.indexOf(head) }),
        show: (finding) => {
          const of = finding.heads.length ? { finding: view.findings.indexOf(finding), sort: null } : { statistic: finding.statistic };
          this.#app.go(of);
          (finding.heads.length ? this.#head : this.#controls).scrollIntoView({ block: "start" });
        },
      })));
  }

  /** The maps of all heads, framed by type. */
  #maps() {
    const { state } = this.#app, { group, text, layer, head } = state, shown = this.#app.opened().at(group, text, layer, head);
    const chosen = this.#view.findings[state.finding]?.heads ?? null;
    if (shown.maps) this.#wall.draw(shown, { ...state, chosen });
    else for (const part of [this.#wall.controls, this.#wall.box]) replace(part);
  }

  // ---- every head ----------------------------------------------------------------------------------------

  #heads() {
    const app = this.#app, { layer, head } = app.state;
    const { controls, grid, layers } = allHeads({
      page: this.#page, group: this.#group, view: this.#view, statistic: this.#statistic, layer, head, choose: (statistic) => app.go({ statistic }),
      select: (l, k) => app.go({ layer: l, head: k }), open: (l, k) => app.go({ page: "map", layer: l, head: k }),
    });
    replace(this.#controls, ...controls);
    replace(this.#grid, ...grid);
    replace(this.#layers, ...layers);
  }

  // ---- the selected head ---------------------------------------------------------------------------------

  /** Show the selected head: its card at once, then its curves, and links to the heads whose maps are most like its own. */
  async #selected() {
    const app = this.#app, source = app.opened(), selection = ++this.#selections, { group: g, text, layer, head } = app.state, shown = source.at(g, text, layer, head);
    this.#similar.replaceChildren();
    replace(this.#card, ...headCard(shown), this.#similar);
    const curves = async () => {
      const loaded = await source.head(g, text, layer, head);
      if (selection === this.#selections) this.#curves.show(loaded);
    };
    const similar = async () => {
      const { maps, values } = await source.similar(g, text, layer, head);
      if (selection === this.#selections) this.#similar.replaceChildren(...this.#links(shown.group, maps, mostSimilar(shown.group, { layer, head }, values, SIMILAR)));
    };
    await Promise.all([curves(), similar()]);
  }

  /** Links that compare the selected head with those in `found`. */
  #links(group, maps, found) {
    const { source, group: g, text } = this.#app.state, compared = { page: "compare", bsource: source, bgroup: g, btext: text };
    return found.length === 0 ? [] : [
      h("span", { "data-tip": similarityMeaning(maps) }, "Similar maps"),
      ...found.map(({ layer, head, value }, k) => h("a", {
        href: this.#app.address({ ...compared, blayer: layer, bhead: head }), "data-key": k ? `to-compare-${k}` : "to-compare", "data-tip": `Compare with ${headTitle(group, layer, head)}`,
      }, headName(group, layer, head), h("small", {}, value.toFixed(2)))),
    ];
  }

  // ---- export --------------------------------------------------------------------------------------------

  picture() {
    const statistic = this.#statistic, { name } = this.#app.opened(), legend = this.#controls.querySelector(".legend");
    return {
      name: `${name}-overview-${statistic}`, title: `${name} · ${statistic === KIND ? "kind of head" : labelOf(this.#group, statistic)}`, note: this.#view.headline,
      elements: [this.#grid, legend].filter(Boolean), csv: () => this.#csv(),
    };
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
