// Overview: the main findings, the grid of all heads, and the card of the selected head.

import { looks } from "./colour.js";
import { h, replace } from "./dom.js";
import { findingTiles } from "./findings.js";
import { csvOf } from "./export.js";
import { KIND, allHeads, HeadCurves, headCard, headName, headTitle, labelOf, markHead, mostSimilar, rowOf, similarityMeaning, sizeWords, statisticsOf } from "./heads.js";
import { short } from "./numbers.js";

const SIMILAR = 3; // heads that the card names

/** Key of its state: `statistic`. */
export const mount = (root, app) => new Overview(root, app);

class Overview {
  #app;
  #head = h("header", { class: "overview-found" });
  #controls = h("div", { class: "controls" });
  #grid = h("div", { class: "grid-box overview-grid" });
  #layers = h("div", { class: "overview-layers" });
  #card = h("article", { class: "card overview-card", "aria-label": "Selected head" });
  #similar = h("p", { class: "overview-similar" });
  #curves = new HeadCurves("overview-curves");
  #drawings = 0; // counts drawings of the curves, so that a slow one cannot replace a later one

  constructor(root, app) {
    this.#app = app;
    root.append(this.#head,
      h("div", { class: "overview-split" }, h("div", {}, this.#controls, this.#grid, this.#layers), this.#card),
      this.#curves.element);
  }

  unmount() {
    this.#curves.close();
  }

  recolour() {
    this.update(new Set(["source"]));
  }

  update(changed) {
    if (this.#corrected()) return; // which calls update again
    if (["page", "source", "group", "text"].some((key) => changed.has(key))) {
      this.#found();
      this.#heads();
      this.#selected();
    } else if (changed.has("statistic")) this.#heads();
    if (changed.has("layer") || changed.has("head")) {
      markHead(this.#grid, this.#app.state.layer, this.#app.state.head);
      this.#selected();
    }
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
      h("div", { class: "overview-tiles" }, h("ul", { class: "tiles" }, findingTiles(view.findings, (layer, head) =>
        this.#app.go({ page: "map", layer: group.layers.indexOf(layer), head: group.heads.indexOf(head) }), { folded: true }))));
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

  #selected() {
    const { layer, head } = this.#app.state, group = this.#group, view = this.#view;
    replace(this.#card, ...headCard({ group, view, layer, head }), this.#similar);
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
        ...found.map((other, k) => h("a", { href: app.address(compared(other)), "data-key": k ? `to-compare-${k}` : "to-compare", "data-tip": `Compare with ${headTitle(group, other.layer, other.head)}` },
          headName(group, other.layer, other.head), h("small", {}, other.value.toFixed(2)))),
      ]));
    } catch (error) {
      if (!stale()) app.trouble(error);
    }
  }

  async #along() {
    const app = this.#app, drawing = ++this.#drawings, { group, text, layer, head } = app.state;
    try {
      const shown = await app.opened().head(group, text, layer, head);
      if (drawing === this.#drawings) this.#curves.show(shown);
    } catch (error) {
      app.trouble(error);
    }
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

const tied = (text) => text.replace(/ (%|× |· (?=H\d))/g, (_, mark) => `\u00a0${mark.trim()}${mark === "%" ? "" : "\u00a0"}`); // no line break inside a figure
