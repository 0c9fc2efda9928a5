// Text: tokens as running text, the weights of a token in both directions, and paths through the layers.

import { Arcs, firstQuery, hasSink, leaveSwitch } from "./arcs.js";
import { choice, failure, legend } from "./charts.js";
import { matrixOf } from "./compare_side.js";
import { h, replace } from "./dom.js";
import { headName } from "./heads.js";
import { integer, named, weightWords } from "./numbers.js";
import { cancel, later } from "./state.js";
import { textCsv, TextWeights } from "./text_weights.js";
import { TextFind, TextLinks, tokenPanel, tokenSentence } from "./text_panel.js";
import { receivedLook, receivedShades, stripColumns, TextStrip, tonesOf, weightLook, weightShades } from "./text_shades.js";
import { TokenFlow } from "./token_flow.js";

const DEBOUNCE = 60; // milliseconds that the pointer rests before the weights of its token are requested
const SPOKEN_AFTER = 500; // milliseconds after the last key before a screen reader announces the token

// Words of the address: a pinned token, and a step of the path.
const pinWord = ({ side, at }) => `${side === "key" ? "k" : ""}${at}`, stepWord = ({ layer, head, at }) => `${layer}.${head}.${at}`;

const OF = { head: "this head", layer: "its layer", model: "all layers" };

class TextPage {
  constructor(root, app) {
    Object.assign(this, { app, root, loaded: "", loads: 0, weights: null, hovered: null, current: null, flows: {} });
    this.build();
  }

  build() {
    this.find = new TextFind(() => Object.fromEntries(Object.entries(this.flows).map(([side, { flow }]) => [side, flow])), (hit) => this.found(hit));
    this.settings = h("div", { class: "text-settings" });
    this.key = h("div", { class: "text-key" });
    this.box = h("div", { class: "text-flows" });
    this.patches = h("div", { class: "text-patches" });
    this.pins = h("div", { class: "text-pins" });
    this.trail = h("nav", { class: "text-trail", "aria-label": "Path through the layers" });
    this.panel = h("div", { class: "text-panel" });
    this.arcs = new Arcs({ onchoose: (at) => this.togglePin({ side: "query", at }) });
    this.links = new TextLinks({
      ongo: (at) => this.goTo("key", at), onfollow: (layer, head, at, to) => this.follow(layer, head, at, to), ontrouble: (error) => this.app.trouble(error),
    });
    this.root.append(h("div", { class: "text-page" },
      h("div", { class: "text-main" },
        h("div", { class: "text-bar" }, this.find.element, this.settings),
        this.key, this.patches, this.box, this.arcs.element),
      h("aside", { class: "text-side", "aria-label": "The selected token" }, this.trail, this.pins, this.panel, this.links.element)));
  }

  // ---- state ----

  get of() { return Object.hasOwn(OF, this.app.state.of ?? "") ? this.app.state.of : "head"; }

  /** Whether shades and arcs leave out the first token. */
  get leave() {
    const { leave } = this.app.state;
    return leave === undefined ? hasSink(this.weights.text) && !this.weights.crossed : Boolean(leave);
  }

  /** The pinned tokens, [{side, at}, …], from "12,40" in the address; with two texts, "k40" is key 40. One is pinned from the start. */
  get pinned() {
    const { group, text, received, weightless } = this.weights, { pins } = this.app.state;
    if (pins === undefined && !weightless) return [{ side: "query", at: firstQuery(group, text, received) }];
    return this.pinnedByUser;
  }

  get pinnedByUser() {
    return String(this.app.state.pins ?? "").split(",").map((word) => /^(k?)(\d+)$/.exec(word)).filter(Boolean)
      .map(([, key, at]) => ({ side: key && this.weights.crossed ? "key" : "query", at: Number(at) }))
      .filter(({ side, at }) => at < this.weights.tokensOf(side).length);
  }

  /** The followed path, [{layer, head, at}, …], from "3.7.120,2.1.80" in the address. */
  get path() {
    const { group: { layers, heads }, queries } = this.weights;
    return String(this.app.state.trail ?? "").split(",").map((word) => /^(\d+)\.(\d+)\.(\d+)$/.exec(word)).filter(Boolean)
      .map(([, layer, head, at]) => ({ layer: Number(layer), head: Number(head), at: Number(at) }))
      .filter(({ layer, head, at }) => layer < layers.length && head < heads.length && at < queries.length);
  }

  /** The token in the panel: the one under the pointer, else the current one, else the last pinned one. */
  get active() { return this.hovered ?? this.current ?? this.pinned.at(-1) ?? null; }

  /** The tokens whose weights are shown as shades. */
  get shown() { return this.hovered ? [this.hovered] : this.current ? [this.current] : this.pinned; }

  async update(changed) {
    const { source, group, text, layer, head } = this.app.state, textOf = `${source}/${group}/${text}`;
    const wanted = [textOf, layer, head, this.of].join("/");
    if (wanted !== this.loaded) await this.load(wanted, textOf);
    else if (this.weights && changed.has("leave")) this.show(this.weights, textOf);
    else if (this.weights && ["pins", "trail"].some((key) => changed.has(key))) this.repin(changed.has("pins"));
  }

  async load(wanted, textOf) {
    const load = ++this.loads, { group, text, layer, head } = this.app.state, { of } = this;
    this.loaded = wanted;
    this.matrix = null;
    this.box.classList.add("stale"); // until the new weights are loaded
    try {
      const weights = await TextWeights.of(await this.app.source(), { group, text, layer, head, of });
      if (load !== this.loads) return;
      this.show(weights, textOf);
      this.matrix = of === "head" && !weights.crossed && !weights.weightless && weights.queries.length <= 60 ? await matrixOf(weights.source, weights.at, {}) : null;
      if (load === this.loads) this.drawArcs();
    } catch (error) {
      if (load === this.loads) this.fail(error, wanted, textOf);
    }
  }

  show(weights, textOf) {
    this.weights = weights;
    this.shares = receivedShades(this.kept(weights.received));
    this.shades = null;
    if (this.flowsOf !== textOf) this.makeFlows(textOf);
    replace(this.settings, weights.crossed ? null : leaveSwitch(this.leave, (leave) => this.app.go({ leave: Number(leave) })), choice("Weights of", Object.entries(OF), this.of, (of) => this.app.go({ of: of === "head" ? null : of })));
    this.repin(true);
  }

  /** Show an error instead of the text: the weights of the previous head would mislead. */
  fail(error, wanted, textOf) {
    Object.assign(this, { loaded: "", flowsOf: "", weights: null });
    this.request?.abort();
    this.closeFlows();
    this.links.clear();
    this.arcs.show(null);
    this.box.classList.remove("stale");
    for (const part of [this.key, this.patches, this.trail, this.pins, this.panel]) part.replaceChildren();
    this.box.replaceChildren(h("div", { class: "text-failed", role: "status" }, failure(error, () => this.load(wanted, textOf))));
  }

  makeFlows(textOf) {
    this.closeFlows();
    this.flowsOf = textOf;
    this.hovered = this.current = null;
    const make = (side, title) => {
      const tokens = this.weights.tokensOf(side);
      const flow = new TokenFlow({
        name: `text-${side}`, tokens, turns: this.weights.text.turns, label: `${title ?? "Tokens of the text"}; arrow keys move, Enter pins`,
        look: (at) => this.look(side, at), kind: (at) => this.kind(side, at),
        onhover: (at) => this.hover(at === null ? null : { side, at }),
        onchoose: (at) => this.togglePin({ side, at }),
        oncurrent: (at) => this.select({ side, at }),
        onescape: () => this.clear(),
        onscroll: () => strip.scrolled(),
      });
      const strip = new TextStrip(flow);
      this.flows[side] = { flow, strip };
      return h("div", { class: "text-column" }, title ? h("h3", {}, title) : null, h("div", { class: "text-pane" }, flow.element, strip.element));
    };
    this.box.classList.toggle("two", this.weights.crossed);
    this.box.replaceChildren(...(this.weights.crossed ? [make("query", "Queries"), make("key", "Keys")] : [make("query", null)]));
    this.find.clear();
  }

  /** Values by key, without the first one if it is left out. */
  kept(values) {
    return this.leave ? values.map((value, at) => (at ? value : 0)) : values;
  }

  drawArcs() {
    const pin = this.pinned.at(-1);
    this.arcs.show(this.matrix?.values ? { tokens: this.weights.queries, turns: this.weights.text.turns, values: this.matrix.values, pinned: pin ? pin.at : null, leave: this.leave } : null);
  }

  closeFlows() {
    for (const { flow } of Object.values(this.flows)) flow.close();
    this.flows = {};
  }

  repaint() {
    for (const { flow } of Object.values(this.flows)) flow.repaint();
  }

  found(hit) {
    this.repaint();
    if (!hit) return;
    const { flow } = this.flows[hit.side];
    flow.setCurrent(hit.at);
    flow.reveal(hit.at);
  }

  // ---- weights of a token ----

  /** Fetch the weights of the shown tokens and draw; a later call cancels an earlier one. */
  async refresh(wait) {
    cancel(this.timer);
    this.request?.abort();
    const { weights } = this;
    if (!weights) return;
    const request = (this.request = new AbortController()), wanted = [...this.shown, ...(this.active ? [this.active] : [])];
    const missing = weights.weightless ? [] : wanted.filter((token) => !weights.ofToken(token));
    if (missing.length) {
      if (wait) await new Promise((resolve) => { this.timer = later(resolve, wait); });
      if (request.signal.aborted) return;
      try {
        await Promise.all(missing.map((token) => weights.fetch(token, request.signal)));
      } catch (error) {
        if (!request.signal.aborted) this.app.trouble(error);
      }
      if (request.signal.aborted || weights !== this.weights) return;
    }
    this.redraw();
    const words = this.unspoken && this.active && tokenSentence(this.active, this.weights);
    if (!words) return;
    this.unspoken = false;
    this.app.announce(words, SPOKEN_AFTER);
  }

  // ---- selecting ----

  hover(token) {
    // The last token under the pointer stays selected, so that the panel can be reached; unless a token is pinned.
    if (!token && this.hovered && !this.pinnedByUser.length) this.current = this.hovered;
    this.hovered = token;
    this.repaint();
    this.refresh(token ? DEBOUNCE : 0);
  }

  select(token) {
    this.hovered = null;
    this.current = token;
    this.unspoken = true; // its weights are loaded first
    this.refresh(DEBOUNCE);
  }

  /** Pin or unpin a token. */
  togglePin(token) {
    const word = pinWord(token), words = this.pinnedByUser.map(pinWord), had = this.pinned.map(pinWord).includes(word);
    this.current = null;
    this.app.go({ pins: (had ? words.filter((other) => other !== word) : [...words, word]).join(","), ...(had || !this.path.length ? {} : { trail: null }) });
  }

  clear() {
    this.hovered = this.current = null;
    if (this.pinned.length || this.path.length) this.app.go({ pins: "", trail: null });
    else this.refresh(0);
  }

  /** Scroll to a token and make it the current one, from which the arrow keys move. */
  goTo(side, at) {
    const place = this.weights.crossed ? side : "query", { flow } = this.flows[place];
    flow.setCurrent(at);
    flow.reveal(at);
    flow.element.focus({ preventScroll: true });
    this.select({ side: place, at });
  }

  follow(layer, head, at, to) {
    const trail = [...this.path, { layer, head, at }].map(stepWord).join(",");
    this.hovered = this.current = null;
    this.links.layer = null;
    this.app.go({ layer: layer - 1, head, pins: String(to), trail });
  }

  repin(reveal) {
    const { weights } = this, { group } = weights, last = this.pinned.at(-1);
    if (reveal && last) {
      const { flow } = this.flows[last.side];
      flow.setCurrent(last.at);
      flow.reveal(last.at);
    }
    replace(this.trail, ...this.path.flatMap((step, index) => [
      h("button", { type: "button", class: "link", "data-key": `step-${index}`, onclick: () => this.back(index) },
        `${headName(group, step.layer, step.head)} `, h("bdi", {}, `“${named(weights.queries[step.at])}”`)),
      h("span", { "aria-hidden": "true" }, "→"),
    ]), this.path.length && last ? h("b", {}, `L${group.layers[weights.at.layer]} `, h("bdi", {}, `“${named(weights.tokensOf(last.side)[last.at])}”`)) : null);
    replace(this.pins, ...this.pinned.map((token, index) => h("span", { class: "text-pin" },
      h("button", { type: "button", "data-key": `pin-${index}`, onclick: () => this.goTo(token.side, token.at), title: "Go to this token" }, h("bdi", {}, named(weights.tokensOf(token.side)[token.at])), h("small", {}, integer(token.at))),
      h("button", { type: "button", "data-key": `unpin-${index}`, "aria-label": `Unpin ${named(weights.tokensOf(token.side)[token.at])}`, onclick: () => this.togglePin(token) }, "×"))),
    this.pinned.length > 1 ? h("button", { type: "button", class: "link", "data-key": "clear", onclick: () => this.clear() }, "Clear") : null);
    this.refresh(0);
  }

  back(index) {
    const { layer, head, at } = this.path[index];
    this.hovered = this.current = null;
    this.links.layer = null;
    this.app.go({ layer, head, pins: String(at), trail: this.path.slice(0, index).map(stepWord).join(",") || null });
  }

  // ---- shades ----

  /** The look of a token: its fill shows how much it is attended to, its underline how much it attends. */
  look(side, at) {
    const { shades, weights } = this, asKey = !weights.crossed || side === "key", asQuery = !weights.crossed || side === "query";
    if (!shades) return asKey ? receivedLook(this.shares.level(this.shares.weights[at])) : null;
    const level = (one, takes) => (one && takes ? one.level(one.weights[at]) : 0);
    return weightLook(level(shades.to, asKey), level(shades.from, asQuery), this.tones);
  }

  kind(side, at) {
    const is = (token) => token && token.at === at && token.side === side, { hit } = this.find;
    return [is(this.active) ? "active" : "", this.pinSet?.has(`${side}/${at}`) ? "pinned" : "", hit?.side === side && at >= hit.at && at <= hit.last ? "hit" : ""].filter(Boolean).join(" ");
  }

  redraw() {
    if (!this.weights) return;
    this.tones = tonesOf();
    this.shades = weightShades(this.shown.map((token) => this.weights.ofToken(token)).filter(Boolean).map(({ to, from }) => ({ to: to && this.kept(to), from })));
    this.pinSet = new Set(this.pinned.map(({ side, at }) => `${side}/${at}`));
    this.box.classList.remove("stale");
    this.repaint();
    const { crossed } = this.weights;
    for (const [side, { strip }] of Object.entries(this.flows))
      strip.draw(stripColumns({ received: this.shares, selected: this.shades, tones: this.tones, asKeys: !crossed || side === "key", asQueries: !crossed || side === "query" }));
    replace(this.patches, this.weights.text.patches.map((grid) => this.overlay(grid)));
    this.keys();
    this.about();
    this.drawArcs();
  }

  /** The patches of an image as a grid, over the image if it is known: the larger the weight on a patch, the brighter. */
  overlay({ name, keys, picture }) {
    const { weights } = this.shades?.to ?? this.shares, { text: { keys: tokens }, crossed } = this.weights, top = Math.max(...keys.flat().map((at) => weights[at])) || 1;
    const cell = (at) => h("i", { style: { background: `rgb(0 0 0 / ${0.78 * (1 - weights[at] / top)})` }, "data-tip": `${named(tokens[at])}\n${weightWords(weights[at])}`, onclick: () => this.togglePin({ side: crossed ? "key" : "query", at }) });
    return h("figure", { class: "text-patch" }, h("figcaption", {}, h("span", {}, name), h("small", {}, `at most ${weightWords(top)} on a patch`)),
      h("div", { role: "img", "aria-label": `Weights on the patches of ${name}`, }, picture ? h("img", { src: picture, alt: "" }) : null,
        h("div", { style: { "grid-template-columns": `repeat(${keys[0].length}, 1fr)`, "aspect-ratio": picture ? null : `${keys[0].length} / ${keys.length}` } }, keys.flat().map(cell))));
  }

  // ---- legend and panel ----

  keys() {
    const many = this.shown.length, { of } = this.weights.at, { whose } = this.weights;
    if (!this.shades) {
      this.key.replaceChildren(h("span", { class: "text-what" }, `Shaded by the attention each token receives · ${of === "model" ? "mean of all heads" : whose.replace(/^L/, "l")}`), legend({ low: "0", high: weightWords(this.shares.top), note: `of all weight${this.leave ? ", without the first token" : ""}` }));
      return;
    }
    const it = many > 1 ? `the ${many} pinned tokens` : "the token", { to, from } = this.shades;
    const part = of === "model" ? " · the weights of a single token are those of this layer" : "";
    this.key.replaceChildren(h("span", { class: "text-what" }, `${whose}${part}${this.leave ? " · without the first token" : ""}`),
      ...[to && h("span", { class: "text-swatch" }, h("i", { class: "fill" }), `${it} attend${many > 1 ? "" : "s"} to · up to ${weightWords(to.top)}`),
        from && h("span", { class: "text-swatch" }, h("i", { class: "under" }), `attend${many > 1 ? "" : "s"} to ${many > 1 ? "them" : "it"} · up to ${weightWords(from.top)}`)].filter(Boolean));
  }

  /** The panel about the active token; below it the links of the last pinned token, which pointing does not change. */
  about() {
    const { active, weights } = this, pin = this.pinned.at(-1), linkable = (token) => !weights.weightless && !(weights.crossed && token.side === "key");
    if (active) replace(this.panel, ...tokenPanel(active, weights, (side, at) => this.goTo(side, at)));
    else replace(this.panel, h("p", { class: "text-hint" },
      h("span", { class: "with-mouse" }, "Point at a token to see which tokens it attends to, and which attend to it. A click pins it; Escape unpins it."),
      h("span", { class: "with-finger" }, "Tap a token to see which tokens it attends to, and which attend to it.")),
    weights.text.map.why ? h("p", { class: "text-note" }, weights.text.map.why) : null);
    if (pin && linkable(pin)) this.links.show(weights, pin.at);
    else this.links.clear(!pin && active && linkable(active) ? "Pin the token to follow its links through the layers." : null);
  }

  // ---- export ----

  picture() {
    const { weights, shades } = this;
    if (!weights) return null;
    const { queries, crossed, received, text } = weights;
    return {
      name: weights.fileName,
      title: `${weights.source.name}: ${weights.at.of === "model" && !shades ? "all heads" : weights.whose}`,
      note: shades ? `Outlined: ${this.shown.map(({ side, at }) => `“${named(weights.tokensOf(side)[at])}” at ${at}`).join(", ")}` : "Shaded by the attention that each token receives.",
      elements: [this.patches, this.box, this.key].filter((part) => part.childElementCount),
      csv: () => textCsv({ keys: text.keys, queries, crossed, received, weights: shades }),
    };
  }

  recolour() { this.redraw(); }

  unmount() {
    this.loads++;
    cancel(this.timer);
    this.request?.abort();
    this.closeFlows();
    this.arcs.close();
  }
}

/** Keys of its state: `of` ("head", "layer" or "model"), `pins`, `trail`, `leave` (1: without the first token, 0: with it). */
export const mount = (root, app) => new TextPage(root, app);
