// The text page: tokens as running text, whom each attends to and who attends to it, and paths through the layers.

import { h, replace, svg } from "./dom.js";
import { css, inkOn, ramp } from "./colour.js";
import { binPeaks, binStart, integer, named, visible } from "./numbers.js";
import { choice, legend } from "./charts.js";
import { csvOf, svgKey, svgPicture, svgText } from "./export.js";
import { TokenFlow } from "./token_flow.js";
import { linkList, shareWords, strongest, tieList } from "./text_panel.js";

const DEBOUNCE = 60; // milliseconds that the pointer rests until its token is asked about
const LISTED = 8;
const KEPT = 96; // tokens whose weights are kept

const OF = { head: "this head", layer: "its layer", model: "all layers" };

class TextPage {
  constructor(root, app) {
    Object.assign(this, { app, root, loaded: "", journey: 0, ties: new Map(), hovered: null, settled: null, flows: {}, linkLayer: null, hits: [] });
    this.build();
    this.stopTheme = app.onTheme(() => this.redraw());
    this.sizes = new ResizeObserver(() => this.strips());
    this.sizes.observe(this.box);
  }

  build() {
    this.find = h("input", { type: "search", class: "text-find", placeholder: "Find in the text", "aria-label": "Find in the text; Enter goes to the next place", oninput: () => this.search(0), onkeydown: (event) => {
      if (event.key === "Enter") event.preventDefault(), this.search(event.shiftKey ? -1 : 1);
    } });
    this.found = h("span", { class: "text-found", "aria-live": "polite" });
    this.settings = h("div", { class: "text-settings" });
    this.key = h("div", { class: "text-key" });
    this.box = h("div", { class: "text-flows" });
    this.pins = h("div", { class: "text-pins" });
    this.trail = h("nav", { class: "text-trail", "aria-label": "Path through the layers" });
    this.panel = h("div", { class: "text-panel" });
    this.links = h("div", { class: "text-linked" });
    this.root.append(h("div", { class: "text-page" },
      h("div", { class: "text-main" },
        h("div", { class: "text-bar" }, h("div", { class: "text-search" }, this.find, this.found), this.settings),
        this.key, this.box),
      h("aside", { class: "text-side", "aria-label": "The chosen token" }, this.trail, this.pins, this.panel, this.links)));
  }

  // ---- state ----

  get place() { const { group, text, layer } = this.app.state; return [group, text, layer]; }
  get group() { return this.source.page.groups[this.app.state.group]; }
  get text() { return this.group.texts[this.app.state.text]; }
  get of() { return OF[this.app.state.of] ? this.app.state.of : "head"; }
  get head() { return this.of === "head" ? this.app.state.head : "mean"; } // as the server counts
  get queries() { return this.text.queries || this.text.keys; }

  /** Whether queries and keys are two texts. */
  get crossed() { return Boolean(this.text.queries) || this.text.n_queries !== this.text.n_keys || this.group.name === "cross"; }

  tokensOf(side) { return side === "key" ? this.text.keys : this.queries; }

  /** The pinned tokens, [{side, at}, …]: "12,40", and in two texts "12,k40" for the key 40. */
  get pinned() {
    return String(this.app.state.pins ?? "").split(",").map((word) => /^(k?)(\d+)$/.exec(word)).filter(Boolean)
      .map(([, key, at]) => ({ side: key && this.crossed ? "key" : "query", at: Number(at) }))
      .filter(({ side, at }) => at < this.tokensOf(side).length);
  }

  /** The path that was followed, [{layer, head, at}, …]: "3.7.120,2.1.80". */
  get path() {
    const { layers, heads } = this.group;
    return String(this.app.state.trail ?? "").split(",").map((word) => /^(\d+)\.(\d+)\.(\d+)$/.exec(word)).filter(Boolean)
      .map(([, layer, head, at]) => ({ layer: Number(layer), head: Number(head), at: Number(at) }))
      .filter(({ layer, head, at }) => layer < layers.length && head < heads.length && at < this.queries.length);
  }

  /** The token that the panel is about: under the pointer, or gone to, or pinned last. */
  get active() { return this.hovered ?? this.settled ?? this.pinned.at(-1) ?? null; }

  /** The tokens that the shades are about. */
  get shown() { return this.hovered ? [this.hovered] : this.settled ? [this.settled] : this.pinned; }

  async update(changed) {
    const { source, group, text } = this.app.state, textOf = `${source}/${group}/${text}`;
    if (this.textOf !== undefined && this.textOf !== textOf && this.app.state.pins !== undefined && !changed.has("pins")) {
      this.textOf = textOf; // positions of the text before mean nothing in this one
      this.app.go({ pins: null, trail: null }, { replace: true });
      return;
    }
    this.textOf = textOf;
    const wanted = [textOf, this.app.state.layer, this.app.state.head, this.of].join("/");
    if (wanted !== this.loaded) await this.load(wanted, textOf);
    else if (this.source && ["pins", "trail"].some((key) => changed.has(key))) this.repin(changed.has("pins"));
  }

  async load(wanted, textOf) {
    const journey = ++this.journey, { app } = this;
    this.loaded = wanted;
    const source = await app.source();
    const [curves, shape] = await Promise.all([source.curves(...this.place), source.map(...this.place, app.state.head)]);
    if (journey !== this.journey) return;
    Object.assign(this, { source, curves, shape });
    this.ties.clear();
    this.received = await this.shares();
    if (journey !== this.journey) return;
    if (this.flowsOf !== textOf) this.makeFlows(textOf);
    this.controls();
    this.repin(true);
  }

  /** What each key receives: the share of all weight, of one head, a layer or the model. */
  async shares() {
    const { curves, text } = this, { layer, head } = this.app.state, n = text.n_keys;
    if (this.of === "model") return curves.mean.values;
    if (this.of === "layer") return curves.layers.values.subarray(layer * n, (layer + 1) * n);
    const bins = curves.received.shape[2], at = (layer * this.group.heads.length + head) * bins;
    if (bins === n) return curves.received.values.subarray(at, at + n);
    try {
      return (await this.source.profiles(...this.place, head)).received;
    } catch {
      const out = new Float32Array(n); // a profile that keeps no maps has the curve in bins
      for (let bin = 0; bin < bins; bin++) out.fill(curves.received.values[at + bin], binStart(bin, bins, n), binStart(bin + 1, bins, n));
      return out;
    }
  }

  makeFlows(textOf) {
    this.flowsOf = textOf;
    for (const { flow } of Object.values(this.flows)) flow.close();
    this.hovered = this.settled = null;
    const make = (side, title) => {
      const tokens = this.tokensOf(side);
      const flow = new TokenFlow({
        name: `text-${side}`, tokens, label: `${title ?? "Tokens of the text"}; arrow keys move, Enter pins`,
        look: (at) => this.look(side, at), kind: (at) => this.kind(side, at),
        onhover: (at) => this.hover(at === null ? null : { side, at }),
        onchoose: (at) => this.choose({ side, at }),
        oncurrent: (at) => this.settle({ side, at }),
        onescape: () => this.clear(),
        onscroll: () => this.strips(),
      });
      const strip = h("canvas", { class: "text-strip", role: "img", "aria-label": `The whole text from top to bottom, shaded; a click goes there` });
      const jump = (event) => {
        const box = strip.getBoundingClientRect(), part = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 0.9999);
        flow.reveal(Math.floor(part * tokens.length));
      };
      strip.addEventListener("pointerdown", (event) => { strip.setPointerCapture(event.pointerId); jump(event); });
      strip.addEventListener("pointermove", (event) => { if (event.buttons) jump(event); });
      this.flows[side] = { flow, strip };
      return h("div", { class: "text-column" }, title ? h("h3", {}, title) : null, h("div", { class: "text-pane" }, flow.element, strip));
    };
    this.flows = {};
    this.box.classList.toggle("two", this.crossed);
    this.box.replaceChildren(...(this.crossed ? [make("query", "Queries"), make("key", "Keys")] : [make("query", null)]));
    this.find.value = "";
    this.search(0);
  }

  // ---- ties of a token ----

  name({ side, at }) { return `${side}/${at}`; }

  /** Weights {to, from} of a token, or undefined while they are not here. */
  tie(token) { return this.ties.get(this.name(token)); }

  async fetchTies(token, signal) {
    const name = this.name(token);
    if (this.ties.has(name) || this.shape.kind === "none" || this.shape.kind === "small") return;
    const { source, place, head } = this, both = !this.crossed;
    const [to, from] = await Promise.all([
      both || token.side === "query" ? source.rowWeights(...place, head, token.at, { signal }) : null,
      both || token.side === "key" ? source.columnWeights(...place, head, token.at, { signal }) : null,
    ]);
    this.ties.set(name, { to, from });
    if (this.ties.size > KEPT) this.ties.delete(this.ties.keys().next().value);
  }

  /** Fetch what the shown tokens need, and draw; a later call makes an earlier one void. */
  async ask(wait) {
    clearTimeout(this.timer);
    this.flight?.abort();
    const flight = (this.flight = new AbortController()), wanted = [...this.shown, ...(this.active ? [this.active] : [])], journey = this.journey;
    const missing = wanted.filter((token) => !this.ties.has(this.name(token)));
    if (!missing.length) return this.redraw();
    if (wait) await new Promise((resolve) => { this.timer = setTimeout(resolve, wait); });
    if (flight.signal.aborted) return;
    try {
      await Promise.all(missing.map((token) => this.fetchTies(token, flight.signal)));
      if (!flight.signal.aborted && journey === this.journey) this.redraw();
    } catch (error) {
      if (!flight.signal.aborted) this.app.trouble(error);
    }
  }

  // ---- choosing ----

  hover(token) {
    // What the pointer leaves stays, so that one can go to the panel; a pin comes back instead.
    if (!token && this.hovered && !this.pinned.length) this.settled = this.hovered;
    this.hovered = token;
    for (const { flow } of Object.values(this.flows)) flow.repaint();
    this.ask(token ? DEBOUNCE : 0);
  }

  settle(token) {
    this.hovered = null;
    this.settled = token;
    this.ask(DEBOUNCE);
    clearTimeout(this.speak);
    this.speak = setTimeout(() => this.app.announce(this.spoken()), 500);
  }

  /** Pin a token, or let a pinned one go. */
  choose(token) {
    const word = `${token.side === "key" && this.crossed ? "k" : ""}${token.at}`, words = this.pinWords(), had = words.includes(word);
    this.settled = null;
    this.app.go({ pins: (had ? words.filter((other) => other !== word) : [...words, word]).join(",") || null, ...(had || !this.path.length ? {} : { trail: null }) });
  }

  pinWords() { return this.pinned.map(({ side, at }) => `${side === "key" ? "k" : ""}${at}`); }

  clear() {
    this.hovered = this.settled = null;
    if (this.pinned.length || this.path.length) this.app.go({ pins: null, trail: null });
    else this.ask(0);
  }

  /** Scroll to a token and show it. */
  goTo(side, at) {
    const { flow } = this.flows[this.crossed ? side : "query"];
    flow.setCurrent(at);
    flow.reveal(at);
    this.settle({ side: this.crossed ? side : "query", at });
  }

  follow(layer, head, at, to) {
    const trail = [...this.path.map((step) => `${step.layer}.${step.head}.${step.at}`), `${layer}.${head}.${at}`].join(",");
    this.hovered = this.settled = null;
    this.linkLayer = null;
    this.app.go({ layer: layer - 1, head, pins: String(to), trail });
  }

  repin(reveal) {
    const last = this.pinned.at(-1);
    if (reveal && last) {
      const { flow } = this.flows[last.side];
      flow.setCurrent(last.at);
      flow.reveal(last.at);
    }
    replace(this.trail, ...this.path.flatMap((step, index) => [
      h("button", { type: "button", class: "text-step", "data-key": `step-${index}`, onclick: () => this.back(index) },
        `L${this.group.layers[step.layer]}·H${this.group.heads[step.head]} `, h("bdi", {}, `“${named(this.queries[step.at])}”`)),
      h("span", { "aria-hidden": "true" }, "→"),
    ]), this.path.length && last ? h("b", {}, `L${this.group.layers[this.app.state.layer]} `, h("bdi", {}, `“${named(this.tokensOf(last.side)[last.at])}”`)) : null);
    replace(this.pins, ...this.pinned.map((token, index) => h("span", { class: "text-pin" },
      h("button", { type: "button", "data-key": `pin-${index}`, onclick: () => this.goTo(token.side, token.at), title: "Go to this token" }, h("bdi", {}, named(this.tokensOf(token.side)[token.at])), h("small", {}, integer(token.at))),
      h("button", { type: "button", "data-key": `unpin-${index}`, "aria-label": `Unpin ${named(this.tokensOf(token.side)[token.at])}`, onclick: () => this.choose(token) }, "×"))),
    this.pinned.length > 1 ? h("button", { type: "button", class: "link", "data-key": "clear", onclick: () => this.clear() }, "Clear") : null);
    this.ask(0);
  }

  back(index) {
    const { layer, head, at } = this.path[index];
    this.hovered = this.settled = null;
    this.linkLayer = null;
    this.app.go({ layer, head, pins: String(at), trail: this.path.slice(0, index).map((step) => `${step.layer}.${step.head}.${step.at}`).join(",") || null });
  }

  // ---- shades ----

  /** Weights of the shown tokens, the largest of each if there are several, and the two tops. */
  gather() {
    const known = this.shown.map((token) => this.tie(token)).filter(Boolean);
    if (!known.length) return null;
    const largest = (name) => {
      const lists = known.map((tie) => tie[name]).filter(Boolean);
      if (lists.length < 2) return lists[0] ?? null;
      return lists[0].map((_, at) => lists.reduce((most, list) => Math.max(most, list[at]), 0));
    };
    const top = (weights) => (weights ? weights.reduce((most, weight) => (weight > most ? weight : most), 1e-9) : 1);
    const to = largest("to"), from = largest("from");
    return { to, from, topTo: top(to), topFrom: top(from), bendTo: bent(to, top(to), 0.5), bendFrom: bent(from, top(from), 0.5) };
  }

  /** A received share as a level from 0 to 1. */
  receivedLevel(share) { return (share / this.mostReceived) ** this.bend; }

  /** How a token looks: filled as far as it is attended to, underlined as far as it attends. */
  look(side, at) {
    const { shades } = this;
    if (!shades) {
      if (this.crossed && side === "query") return null;
      const level = this.receivedLevel(this.received[at]);
      if (!(level > 0.02)) return null;
      const colour = ramp(level);
      return { background: css(colour), ink: inkOn(colour), line: "" };
    }
    const { to, from } = shades;
    const filled = to && (!this.crossed || side === "key") ? (to[at] / shades.topTo) ** shades.bendTo : 0;
    const lined = from && (!this.crossed || side === "query") ? (from[at] / shades.topFrom) ** shades.bendFrom : 0;
    if (filled < 0.02 && lined < 0.02) return null;
    const colour = mixed(this.tones.panel, this.tones.accent, filled);
    return {
      background: filled >= 0.02 ? css(colour) : "",
      ink: filled >= 0.02 ? inkOn(colour) : "",
      line: lined >= 0.02 ? `inset 0 ${-Math.max(1, Math.round(5 * lined))}px ${css(mixed(this.tones.panel, this.tones.warm, 0.25 + 0.75 * lined))}` : "",
    };
  }

  kind(side, at) {
    const is = (token) => token && token.at === at && (!this.crossed || token.side === side);
    return [is(this.active) ? "active" : "", this.pinSet?.has(this.crossed ? `${side}/${at}` : `query/${at}`) ? "pinned" : "", this.hit?.side === side && at >= this.hit.at && at <= this.hit.last ? "hit" : ""].filter(Boolean).join(" ");
  }

  redraw() {
    if (!this.source || !this.received) return;
    const style = getComputedStyle(document.documentElement), tone = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(`--${name}`).trim().slice(at, at + 2), 16));
    this.tones = { panel: tone("paper"), accent: tone("accent"), warm: tone("warm") };
    this.mostReceived = this.received.reduce((most, share) => (share > most ? share : most), 1e-12);
    this.bend = bent(this.received, this.mostReceived, 0.35);
    this.shades = this.gather();
    this.pinSet = new Set(this.pinned.map((token) => this.name(token)));
    for (const { flow } of Object.values(this.flows)) flow.repaint();
    this.strips();
    this.keys();
    this.about();
  }

  // ---- the strip of the whole text ----

  strips() {
    if (!this.received || !this.tones) return;
    for (const [side, { flow, strip }] of Object.entries(this.flows)) {
      const ratio = devicePixelRatio || 1, width = Math.round(strip.clientWidth * ratio), height = Math.round(strip.clientHeight * ratio);
      if (!width || !height) continue;
      if (strip.width !== width || strip.height !== height) Object.assign(strip, { width, height });
      const context = strip.getContext("2d"), n = flow.tokens.length;
      context.fillStyle = css(this.tones.panel);
      context.fillRect(0, 0, width, height);
      const column = (weights, levelOf, x, wide, colourOf) => {
        const rows = Math.min(Math.floor(height / (2 * ratio)), n), peaks = binPeaks(weights, rows);
        for (let row = 0; row < rows; row++) {
          const level = levelOf(peaks[row]);
          if (level < 0.03) continue;
          context.fillStyle = css(colourOf(level));
          const from = Math.floor((row * height) / rows);
          context.fillRect(x, from, wide, Math.ceil(((row + 1) * height) / rows) - from);
        }
      };
      const { shades } = this, half = Math.floor(width / 2);
      if (!shades) {
        if (!this.crossed || side === "key") column(this.received, (share) => this.receivedLevel(share), 0, width, ramp);
      } else {
        if (shades.to && (!this.crossed || side === "key")) column(shades.to, (weight) => (weight / shades.topTo) ** shades.bendTo, 0, this.crossed ? width : half, (level) => mixed(this.tones.panel, this.tones.accent, level));
        if (shades.from && (!this.crossed || side === "query")) column(shades.from, (weight) => (weight / shades.topFrom) ** shades.bendFrom, this.crossed ? 0 : half, this.crossed ? width : width - half, (level) => mixed(this.tones.panel, this.tones.warm, level));
      }
      const [first, last] = flow.view, line = 2 * ratio, from = (first / n) * height, tall = Math.max(((last + 1 - first) / n) * height, 6 * ratio);
      context.strokeStyle = css(this.tones.warm);
      context.lineWidth = line;
      context.strokeRect(line / 2, Math.min(from, height - tall) + line / 2, width - line, Math.max(tall - line, 1));
    }
  }

  // ---- words around it ----

  controls() {
    replace(this.settings, choice("Weights of", Object.entries(OF), this.of, (of) => this.app.go({ of: of === "head" ? null : of })));
  }

  /** Whose weights are shown, in words. */
  whose() {
    const { layers, heads } = this.group, { layer, head } = this.app.state;
    return this.of === "head" ? `layer ${layers[layer]}, head ${heads[head]}` : `layer ${layers[layer]}, mean of ${heads.length} heads`;
  }

  keys() {
    const many = this.shown.length;
    if (!this.shades) {
      const whose = this.of === "model" ? "mean of all heads" : this.whose();
      this.key.replaceChildren(h("span", { class: "text-what" }, `Shaded by the attention each token receives · ${whose}`), legend({ low: "0", high: shareWords(this.mostReceived), note: "of all weight" }));
      return;
    }
    const it = many > 1 ? `the ${many} pinned tokens` : "the token", { to, from, topTo, topFrom } = this.shades;
    this.key.replaceChildren(h("span", { class: "text-what" }, `${this.whose().replace(/^l/, "L")}`),
      ...[to && h("span", { class: "text-swatch" }, h("i", { class: "fill" }), `${it} attend${many > 1 ? "" : "s"} to · up to ${shareWords(topTo)}`),
        from && h("span", { class: "text-swatch" }, h("i", { class: "under" }), `attend${many > 1 ? "" : "s"} to ${many > 1 ? "them" : "it"} · up to ${shareWords(topFrom)}`)].filter(Boolean));
  }

  about() {
    const token = this.active;
    if (!token) {
      replace(this.panel, h("p", { class: "text-hint" }, "Point at a token to see whom it attends to, and who attends to it. A click pins it; Escape lets go."),
        this.shape.why ? h("p", { class: "text-note" }, this.shape.why) : null);
      this.links.replaceChildren();
      return;
    }
    const tokens = this.tokensOf(token.side), tie = this.tie(token), unavailable = this.shape.kind === "none" || this.shape.kind === "small";
    const isKey = !this.crossed || token.side === "key";
    const head = h("header", { class: "text-token" }, h("h2", {}, h("bdi", {}, `“${named(tokens[token.at])}”`)),
      h("p", {}, `${this.crossed ? `${token.side} ` : "token "}${integer(token.at)} of ${integer(tokens.length)}${isKey ? ` · receives ${shareWords(this.received[token.at])}` : ""}`));
    if (!tie) {
      replace(this.panel, head, h("p", { class: "text-note" }, unavailable ? this.shape.why : "…"));
      if (unavailable) this.links.replaceChildren();
      return;
    }
    const lists = [];
    if (tie.to) {
      const ties = strongest(tie.to, LISTED);
      lists.push(tieList({ side: "to", title: "attends to", ties, tokens: this.text.keys, ongo: (at) => this.goTo("key", at), note: ties.total < 0.99 ? `on no token: ${shareWords(1 - ties.total)}` : null }));
    }
    if (tie.from) lists.push(tieList({ side: "from", title: "attended by", ties: strongest(tie.from, LISTED), tokens: this.queries, ongo: (at) => this.goTo("query", at) }));
    replace(this.panel, head, h("div", { class: "text-both" }, lists));
    if (this.crossed && token.side === "key") this.links.replaceChildren();
    else this.linked(token);
  }

  /** Each head's strongest key of a pinned token, in this layer or one beside it. */
  async linked(token) {
    const { layers, heads } = this.group, here = this.app.state.layer, is = this.pinSet.has(this.name(token));
    if (!is) { this.linkedFor = null; this.links.replaceChildren(h("p", { class: "text-note" }, "Pin the token to follow its links through the layers.")); return; }
    const layer = Math.abs((this.linkLayer ?? here) - here) <= 1 ? this.linkLayer ?? here : here;
    const wanted = `${this.loaded}/${this.name(token)}/${layer}`;
    if (this.linkedFor === wanted) return;
    this.linkedFor = wanted;
    const [group, text] = this.place;
    let links;
    try {
      ({ heads: links } = await this.source.links(group, text, layer, token.at));
    } catch (error) {
      if (this.linkedFor === wanted) this.linkedFor = null, this.app.trouble(error);
      return;
    }
    if (this.linkedFor !== wanted) return;
    const options = [[here - 1, `below (L${layers[here - 1]})`], [here, `L${layers[here]}`], [here + 1, `above (L${layers[here + 1]})`]].filter(([at]) => at >= 0 && at < layers.length);
    replace(this.links, h("h3", {}, "Each head’s strongest key"),
      choice("In layer", options, layer, (at) => { this.linkLayer = Number(at); this.linkedFor = null; this.linked(token); }),
      linkList({ links, heads, tokens: this.text.keys, ongo: (at) => this.goTo("key", at), onfollow: layer > 0 && !this.crossed ? (head, to) => this.follow(layer, head, token.at, to) : null }));
  }

  /** The panel in one sentence, for those who hear it. */
  spoken() {
    const token = this.active, tie = token && this.tie(token);
    if (!tie) return "";
    const list = (weights, tokens) => strongest(weights, 3).top.map(([at, weight]) => `${named(tokens[at])} ${shareWords(weight)}`).join(", ");
    return [`${named(this.tokensOf(token.side)[token.at])}, token ${token.at}`, tie.to && `attends to ${list(tie.to, this.text.keys)}`, tie.from && `attended by ${list(tie.from, this.queries)}`].filter(Boolean).join("; ");
  }

  // ---- finding ----

  /** Go `way` places on: 1 next, -1 previous, 0 the first from here. */
  search(way) {
    const asked = this.find.value.toLowerCase();
    this.hit = null;
    if (!asked) { this.found.textContent = ""; this.hits = []; this.hitsOf = ""; for (const { flow } of Object.values(this.flows)) flow.repaint(); return; }
    if (this.hitsOf !== `${this.flowsOf}/${asked}`) {
      this.hitsOf = `${this.flowsOf}/${asked}`;
      this.hits = Object.entries(this.flows).flatMap(([side, { flow }]) => places(flow.tokens, asked).map(([at, last]) => ({ side, at, last })));
      const seen = Object.values(this.flows)[0].flow.view[0];
      this.hitAt = Math.max(this.hits.findIndex(({ at }) => at >= seen), 0);
      way = 0;
    }
    const count = this.hits.length;
    this.hitAt = count ? (this.hitAt + way + count) % count : 0;
    this.hit = this.hits[this.hitAt] ?? null;
    this.found.textContent = count ? `${integer(this.hitAt + 1)} of ${integer(count)}` : "not found";
    for (const { flow } of Object.values(this.flows)) flow.repaint();
    if (!this.hit) return;
    const { flow } = this.flows[this.hit.side];
    flow.setCurrent(this.hit.at);
    flow.reveal(this.hit.at);
  }

  // ---- export ----

  picture() {
    if (!this.source || !this.received) return null;
    const { layers, heads } = this.group, { layer, head } = this.app.state;
    const of = this.of === "head" ? `L${layers[layer]}-H${heads[head]}` : this.of === "layer" ? `L${layers[layer]}` : "model";
    return { name: `text-${of}`, svg: () => this.svg(), csv: () => this.csv() };
  }

  svg() {
    const frame = this.box.getBoundingClientRect(), parts = [], shapes = [], words = [];
    for (const { flow } of Object.values(this.flows)) {
      const pane = flow.element.getBoundingClientRect(), font = getComputedStyle(flow.space);
      for (const token of flow.element.querySelectorAll("[data-at]")) {
        const rects = [...token.getClientRects()].filter(({ width, top, bottom }) => width > 1.5 && bottom <= pane.bottom + 1 && top >= pane.top - 1);
        if (!rects.length) continue;
        const { background, color, boxShadow } = token.style, line = /-(\d+)px/.exec(boxShadow);
        for (const { left, top, width, height } of rects) {
          const x = left - frame.left, y = top - frame.top;
          if (background) shapes.push(svg("rect", { x, y, width, height, rx: 3, fill: background }));
          if (line) shapes.push(svg("rect", { x, y: y + height - Number(line[1]), width, height: Number(line[1]), fill: /rgb\([^)]*\)/.exec(boxShadow)[0] }));
          if (token.classList.contains("pinned") || token.classList.contains("active")) shapes.push(svg("rect", { x, y, width, height, rx: 3, fill: "none", stroke: "var(--warm)", "stroke-width": 2 }));
        }
        const { left, top, height } = rects[0], at = Number(token.dataset.at), said = visible(flow.tokens[at].replace(/^ +| +$/g, ""));
        const indent = flow.tokens[at].length - flow.tokens[at].trimStart().length && !flow.tokens[at].includes("\n") ? parseFloat(font.fontSize) * 0.25 : 0;
        words.push(svgText(left - frame.left + 1 + indent, top - frame.top + height * 0.76, said, { "font-size": parseFloat(font.fontSize), "font-family": font.fontFamily, fill: color || "var(--ink)" }));
      }
    }
    const about = this.shown.map(({ side, at }) => `“${named(this.tokensOf(side)[at])}” at ${at}`).join(", ");
    const key = this.shades
      ? svgKey(0, frame.height + 24, [this.shades.to && ["it attends to", "var(--accent)"], this.shades.from && ["attends to it (underlined)", "var(--warm)"]].filter(Boolean))
      : svgKey(0, frame.height + 24, [["received attention", "var(--accent)"]]);
    parts.push(shapes, words, key);
    return svgPicture({ width: frame.width, height: frame.height + 34, title: `${this.app.opened()?.name ?? ""}: ${this.of === "model" && !this.shades ? "all heads" : this.whose()}`, note: this.shades ? `Outlined: ${about}` : "Shaded by the attention that each token receives.", parts });
  }

  csv() {
    const { shades } = this, rows = [];
    const value = (weights, at) => (weights ? weights[at] : null);
    if (this.crossed) {
      for (let at = 0; at < this.queries.length; at++) rows.push(["query", at, this.queries[at], null, null, value(shades?.from, at)]);
      for (let at = 0; at < this.text.n_keys; at++) rows.push(["key", at, this.text.keys[at], this.received[at], value(shades?.to, at), null]);
      return csvOf(["side", "position", "token", "received", "attended_to", "attends"], rows);
    }
    for (let at = 0; at < this.text.n_keys; at++) rows.push([at, this.text.keys[at], this.received[at], value(shades?.to, at), value(shades?.from, at)]);
    return csvOf(["position", "token", "received", "attended_to", "attends"], rows);
  }

  unmount() {
    this.journey++;
    for (const timer of [this.timer, this.speak]) clearTimeout(timer);
    this.flight?.abort();
    this.sizes.disconnect();
    for (const { flow } of Object.values(this.flows)) flow.close();
    this.stopTheme();
  }
}

/**
 * The power that makes the mean of what is not zero pale, and so keeps differences visible: the largest may be twice
 * the mean, or a thousand times. Not below `least`, where next to nothing would look like something.
 */
function bent(weights, top, least) {
  let sum = 0, count = 0;
  for (const weight of weights ?? []) if (weight > 0) sum += weight, count++;
  return count ? Math.min(Math.max(Math.log(0.2) / Math.log(Math.min(sum / count / top, 0.9)), least), 2) : 1;
}

const mixed = (from, to, part) => from.map((channel, at) => Math.round(channel + (to[at] - channel) * Math.min(Math.max(part, 0), 1)));

/** Where a lower-case string occurs in the text that tokens make: [[first token, last token], …]. */
function places(tokens, asked) {
  const lower = tokens.map((token) => token.toLowerCase()), starts = new Uint32Array(tokens.length + 1);
  for (let at = 0; at < lower.length; at++) starts[at + 1] = starts[at] + lower[at].length;
  const joined = lower.join(""), found = [];
  let token = 0;
  for (let at = joined.indexOf(asked); at >= 0 && found.length < 10_000; at = joined.indexOf(asked, at + asked.length)) {
    while (starts[token + 1] <= at) token++;
    let last = token;
    while (starts[last + 1] < at + asked.length) last++;
    found.push([token, last]);
  }
  return found;
}

export const textPage = { title: "Text", mount: (root, app) => new TextPage(root, app) };
