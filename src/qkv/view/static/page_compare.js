// Compare: two heads, of one text or two, of one model or two, side by side. The left one is the shell's
// selection; the right one has keys of its own in the address: bsource, bgroup, btext, blayer, bhead.

import { lengthWords, openingWords, settledHead } from "./address.js";
import { mostAlike } from "./alike.js";
import { keyOf, legend, paint, stack } from "./charts.js";
import { css, destinationColour, looks, ramp } from "./colour.js";
import { h, replace, svg } from "./dom.js";
import { colourOf, csvOf, svgImage, svgKey, svgPicture, svgRamp, svgText } from "./export.js";
import { headName, labelOf, meaningOf, rowOf, sharesOf, statisticsOf } from "./heads.js";
import { WHOLE, matrixOf, totalVariation } from "./matrix.js";
import { binPeaks, integer, named, percent, written } from "./numbers.js";
import { overlay } from "./overlay.js";
import { chooser, headChooser } from "./shell.js";

const PLACE = ["source", "group", "text", "layer", "head"];
const RIGHT = Object.fromEntries(PLACE.map((key) => [key, `b${key}`]));
const MOST_OFFERED = 4; // other profiles that get a button each; the chooser has them all
const SHARP = 320; // cells a side that the narrowest map shows one by one
const MARK = { left: "A", right: "B" };

export const comparePage = {
  title: "Compare",
  mount(root, app) {
    const page = new Compare(root, app);
    return { update: (changed) => page.update(changed), picture: () => page.picture(), unmount: () => page.unmount() };
  },
};

class Compare {
  #app;
  #root;
  #presets = h("div", { class: "compare-presets", role: "group", "aria-label": "What to compare with" });
  #sides = h("div", { class: "compare-sides" });
  #shares = h("div", { class: "compare-shares" });
  #maps = h("div", { class: "compare-maps" });
  #readout = h("output", { class: "readout compare-readout", "aria-live": "polite" });
  #numbers = h("div", { class: "compare-numbers" });
  #curves = h("div", { class: "compare-curves" });
  #aborting = new AbortController();
  #shown = null; // {left, right, variation}: each side with what was loaded of it
  #stopped = [];
  #offered = ""; // the profiles that could be chosen when the choosers were drawn

  constructor(root, app) {
    this.#app = app;
    this.#root = root;
    root.append(this.#presets, this.#sides, this.#shares, this.#maps, this.#readout, h("div", { class: "compare-below" }, this.#numbers, this.#curves));
    this.#stopped.push(app.onTheme(() => this.#draw()));
    const watcher = new ResizeObserver(() => this.#along());
    watcher.observe(this.#curves);
    this.#stopped.push(() => watcher.disconnect());
  }

  unmount() {
    this.#aborting.abort();
    for (const stop of this.#stopped) stop();
  }

  async update(changed) {
    if (changed.has("session") && this.#ready() !== this.#offered) this.#draw();
    if (![...changed].some((key) => key === "page" || PLACE.includes(key) || Object.values(RIGHT).includes(key))) return;
    this.#aborting.abort();
    this.#aborting = new AbortController();
    const { signal } = this.#aborting;
    try {
      const sides = await this.#settled(signal);
      if (!sides) return;
      for (const side of sides) side.view = side.source.page.groups[side.at.group].texts[side.at.text];
      const [left, right] = sides;
      this.#shown = { left, right, variation: null };
      this.#draw();
      // Both maps are asked for at once, and the curves with them: the slower one sets the time.
      await Promise.all(sides.map(async (side) => {
        [side.matrix, side.curves] = await Promise.all([matrixOf(side.source, side.at, { signal }), side.source.curves(side.at.group, side.at.text)]);
      }));
      if (signal.aborted) return;
      if (this.#sameTokens() && left.matrix.exact && right.matrix.exact) this.#shown.variation = totalVariation(left.matrix, right.matrix);
      this.#draw();
    } catch (error) {
      if (!signal.aborted) this.#app.trouble(error);
    }
  }

  /** Both sides with their profiles; null when the address had to be mended first, which comes back here. */
  async #settled(signal) {
    const app = this.#app, { state } = app, left = await app.source();
    if (signal.aborted) return null;
    const asked = Object.fromEntries(PLACE.map((key) => [key, state[RIGHT[key]]]));
    if (asked.source === undefined) {
      const group = left.page.groups[state.group];
      const alike = mostAlike(group, group.texts[state.text], state.layer, state.head) ?? { layer: state.layer, head: state.head };
      this.#goRight({ ...pick(state, PLACE), ...alike }, { replace: true });
      return null;
    }
    const find = () => app.session.sources.find(({ id }) => id === asked.source);
    if (!find()) await app.refresh(); // it may be younger than this page's list
    if (signal.aborted) return null;
    const entry = find();
    if (entry?.state !== "ready") {
      const why = !entry ? `There is no profile ${asked.source}` : entry.state === "running" ? `${entry.name} is not ready yet` : `${entry.name} could not be profiled`;
      app.trouble(`${why}; B is ${left.name} as well.`);
      this.#goRight({ ...asked, source: state.source }, { replace: true });
      return null;
    }
    const right = await app.source(asked.source);
    if (signal.aborted) return null;
    const { state: settled, said } = settledHead(asked, right.page);
    for (const sentence of said) app.trouble(sentence);
    if (PLACE.some((key) => settled[key] !== asked[key])) {
      this.#goRight(settled, { replace: true });
      return null;
    }
    return [{ name: "left", source: left, at: pick(state, PLACE) }, { name: "right", source: right, at: settled }];
  }

  #goRight(place, options) {
    return this.#app.go(Object.fromEntries(PLACE.map((key) => [RIGHT[key], place[key]])), options);
  }

  #sameTokens() {
    const { left: { view: a }, right: { view: b } } = this.#shown;
    const same = (one, other) => one === other || (one && other && one.length === other.length && one.every((token, index) => token === other[index]));
    return same(a.keys, b.keys) && same(a.queries, b.queries);
  }

  #draw() {
    if (!this.#shown) return;
    const { left, right, variation } = this.#shown, loaded = Boolean(left.matrix && right.matrix);
    // Until the new maps are there the old ones stay, paler: stepping from head to head must not flicker.
    this.#maps.classList.toggle("compare-stale", !loaded);
    const first = !this.#maps.firstChild;
    if (loaded || first) this.#root.classList.toggle("compare-three", loaded ? Boolean(variation) : this.#comparable());
    const three = this.#root.classList.contains("compare-three");
    this.#offered = this.#ready();
    replace(this.#presets, h("span", {}, "Compare with"), ...this.#offers());
    replace(this.#sides, this.#side(left), three ? this.#apart(variation) : null, this.#side(right));
    this.#drawShares();
    if (loaded || first) this.#drawMaps(three);
    this.#drawNumbers();
    this.#along();
  }

  /** The profiles that can be chosen. */
  #ready() {
    return this.#app.session.sources.filter(({ state }) => state === "ready").map(({ id }) => id).join();
  }

  /** Whether a difference cell by cell can be expected. */
  #comparable() {
    const { n_queries, n_keys } = this.#shown.left.view;
    return this.#sameTokens() && Math.max(n_queries, n_keys) <= WHOLE;
  }

  // ---- what is compared ----------------------------------------------------------------------------------

  #offers() {
    const { left, right } = this.#shown, app = this.#app, { at, source } = left;
    const group = source.page.groups[at.group], alike = mostAlike(group, left.view, at.layer, at.head);
    const offer = (key, words, place, tip) => h("button", { type: "button", class: "quiet", "data-key": key, "data-tip": tip, onclick: () => this.#goRight(place) }, words);
    const offers = [];
    if (alike) offers.push(offer("alike", `${headName(group, alike.layer, alike.head)}, most like A`, { ...at, ...alike }, "the head of this text whose statistics are nearest to those of A"));
    if (group.texts.length > 1) {
      const text = (at.text + 1) % group.texts.length;
      offers.push(offer("text", `same head in text ${text + 1}`, { ...at, text }, openingWords(group.texts[text])));
    }
    const others = app.session.sources.filter(({ id, state }) => id !== at.source && state === "ready").slice(0, MOST_OFFERED);
    for (const other of others)
      offers.push(h("button", { type: "button", class: "quiet", "data-key": `source-${other.id}`, onclick: () => this.#likeIn(other.id) }, `same head in ${other.name}`));
    offers.push(h("button", { type: "button", class: "quiet compare-swap", "data-key": "swap", onclick: () => this.#swap(left, right) }, "Swap A and B"));
    return offers;
  }

  #swap(left, right) {
    const keys = Object.fromEntries(PLACE.map((key) => [RIGHT[key], left.at[key]]));
    return this.#app.go({ ...right.at, ...keys });
  }

  /** Go to the same place in another profile, or the nearest that it has. */
  async #likeIn(id) {
    try {
      const other = await this.#app.source(id);
      this.#goRight(settledHead({ ...this.#shown.left.at, source: id }, other.page).state);
    } catch (error) {
      this.#app.trouble(error);
    }
  }

  /** The choosers of a side, and in words where its weight goes. */
  #side({ name, source, at, view }) {
    const app = this.#app, group = source.page.groups[at.group];
    const go = (changes) => (name === "left" ? app.go(changes) : this.#goRight({ ...at, ...changes }));
    // Another profile may have fewer texts, layers and heads: go to the nearest without a word.
    const goSource = async (id) => {
      try {
        const other = await app.source(id);
        go(settledHead({ ...at, source: id }, other.page).state);
      } catch (error) {
        app.trouble(error);
      }
    };
    const ready = app.session.sources.filter(({ state }) => state === "ready"), { groups } = source.page;
    return h("div", { class: `compare-side compare-${name}`, role: "group", "aria-label": `${MARK[name]}, the ${name} side` },
      h("div", { class: "compare-choosers" },
        h("b", { class: "compare-mark" }, MARK[name]),
        ready.length > 1 ? chooser("Profile", `${name}-source`, at.source, ready.map((one) => [one.id, one.name]), goSource) : h("strong", { class: "context-name" }, source.name),
        headChooser(group, at.layer, at.head, go, name)),
      groups.length > 1 || group.texts.length > 1 ? h("div", { class: "compare-choosers" },
        groups.length > 1 ? chooser("Attention", `${name}-group`, at.group, groups.map((one, index) => [index, one.name]), (value) => go(settledHead({ ...at, group: value }, source.page).state)) : null,
        group.texts.length > 1 ? chooser("Text", `${name}-text`, at.text, group.texts.map((one, index) => [index, `${index + 1}. ${openingWords(one)}`]), (value) => go({ text: value })) : null) : null,
      h("p", { class: "goes" }, view.heads.goes_to[rowOf(group, at.layer, at.head)], h("small", {}, lengthWords(view))));
  }

  /** How far apart the two are, in one number. */
  #apart(variation) {
    if (!variation) return h("div", { class: "compare-apart" });
    const mean = variation.reduce((sum, one) => sum + one, 0) / variation.length;
    return h("div", { class: "compare-apart" }, h("strong", {}, percent(mean)),
      h("span", { "data-tip": "Total variation: half the sum of |A − B| over the keys, mean over the queries. Weight that no key receives counts as one key more." }, "of the weight lies on other keys in B"));
  }

  #drawShares() {
    const { left, right } = this.#shown;
    const sides = [left, right].map(({ name, source, at, view }) => {
      const group = source.page.groups[at.group];
      return { name, window: group.window, shares: sharesOf(group, view, at.layer, at.head) };
    });
    const used = looks.destinations.filter((part) => sides.some(({ shares }) => shares[part.name] > 0.0005));
    const arrow = ({ name }) => sides.map(({ shares }) => percent(shares[name])).join(" | ");
    this.#shares.replaceChildren(
      ...sides.map(({ name, window, shares }) => h("div", { class: `compare-share compare-${name}` },
        h("b", { class: "compare-mark" }, MARK[name]), stack(shares, { window, label: `Where the weight of ${MARK[name]} goes` }))),
      keyOf(used.map((part) => [part.name === "nearby" ? `nearby (±${sides[0].window})` : part.label, destinationColour(part), arrow(part)])));
  }

  // ---- maps ----------------------------------------------------------------------------------------------

  #drawMaps(three) {
    const { left, right, variation } = this.#shown;
    const top = Math.max(...[left, right].map(({ matrix }) => (matrix?.values ? matrix.values.reduce((most, value) => Math.max(most, value), 0) : 0)), 1e-6);
    // One scale for both, logarithmic as on the map page: a fifth of an equal share is as good as nothing.
    const scale = (this.#shown.scale = { low: Math.min(top / 100, 0.2 / Math.max(left.view.n_keys, right.view.n_keys)), top });
    this.#readout.textContent = [left, right].some(({ matrix }) => matrix?.values) ? "Point at a cell, or focus a map and use the arrow keys." : "";
    replace(this.#maps, this.#map(left, scale), variation ? this.#difference() : three ? h("div", { class: "compare-blank" }) : null, this.#map(right, scale));
  }

  #map(side, { low, top }) {
    const { name, source, at, matrix } = side, group = source.page.groups[at.group];
    const title = `${MARK[name]} · ${headName(group, at.layer, at.head)}`;
    if (!matrix) return h("div", { class: "compare-blank", "aria-busy": "true" }, "Computing the map …");
    if (!matrix.values) return h("p", { class: "compare-blank note" }, `There is no map of ${title}. ${matrix.why ?? ""}`);
    side.canvas = h("canvas", {});
    paint(side.canvas, matrix.rows, matrix.columns, (row, column) => Math.log(Math.max(matrix.values[row * matrix.columns + column] / low, 1)) / Math.log(top / low));
    const note = matrix.exact ? null : h("small", { "data-tip": "each cell is the largest weight of its block" }, " · pooled");
    const whose = this.#shown.left.source === this.#shown.right.source ? null : h("small", {}, ` · ${source.name}`);
    return h("figure", { class: "compare-figure" },
      h("figcaption", {}, h("span", {}, title, note, whose), name === "left" || !this.#shown.variation ? legend({ low: `≤ ${weightWords(low)}`, high: percent(top) }) : null),
      this.#box(side.canvas, matrix, title));
  }

  #difference() {
    const { left, right } = this.#shown, { rows, columns } = left.matrix;
    const apart = Float32Array.from(left.matrix.values, (value, at) => right.matrix.values[at] - value);
    const sizes = apart.map(Math.abs).filter((size) => size > 0).sort();
    const top = sizes[Math.floor(sizes.length * 0.998)] ?? 1; // a few large ones must not make all others pale
    const canvas = (this.#shown.difference = h("canvas", {}));
    paintSigned(canvas, rows, columns, (at) => Math.sign(apart[at]) * Math.sqrt(Math.min(Math.abs(apart[at]) / top, 1)));
    const stops = Array.from({ length: 9 }, (_, k) => css(signedColour(k / 4 - 1))).join(", ");
    return h("figure", { class: "compare-figure" },
      h("figcaption", {}, h("span", {}, "Difference"),
        h("span", { class: "legend" }, h("span", {}, "A more"), h("i", { style: { background: `linear-gradient(to right, ${stops})` } }), h("span", {}, "B more"))),
      this.#box(canvas, left.matrix, "Difference of A and B"));
  }

  /** A map with a crosshair that all maps of the same shape share. */
  #box(canvas, matrix, label) {
    const { rows, columns } = matrix;
    // Squeezed into fewer pixels, single cells would be left out: then they are averaged instead.
    canvas.style.setProperty("image-rendering", columns > SHARP ? "auto" : "pixelated");
    const box = h("div", { class: "map compare-map", tabindex: 0, role: "application", "aria-roledescription": "attention map",
      "aria-label": `${label}. Arrow keys move between cells.`, style: { "aspect-ratio": `${columns} / ${rows}` } },
    canvas, h("i", { class: "across", hidden: true }), h("i", { class: "down", hidden: true }));
    let at = [0, 0];
    const show = (row, column) => {
      at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
      this.#point(matrix, ...at);
    };
    box.addEventListener("pointermove", (event) => {
      const frame = canvas.getBoundingClientRect();
      show(Math.floor(((event.clientY - frame.top) / frame.height) * rows), Math.floor(((event.clientX - frame.left) / frame.width) * columns));
    });
    box.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move) return;
      event.preventDefault();
      const stride = event.shiftKey ? 10 : 1;
      show(at[0] + stride * move[0], at[1] + stride * move[1]);
    });
    return box;
  }

  /** Mark a cell in every map of this shape, and say what they hold there. */
  #point(matrix, row, column) {
    const { left, right, variation } = this.#shown;
    if (!left.matrix || !right.matrix) return; // the maps shown are on their way out
    const sides = [left, right].filter(({ matrix: own }) => own === matrix || (variation && own));
    for (const box of this.#maps.querySelectorAll(".compare-map")) {
      const [across, down] = box.querySelectorAll("i"), own = variation || sides.some(({ canvas }) => box.contains(canvas));
      across.hidden = down.hidden = !own;
      across.style.top = `${((row + 0.5) / matrix.rows) * 100}%`;
      down.style.left = `${((column + 0.5) / matrix.columns) * 100}%`;
    }
    const { view } = sides[0], weights = sides.map(({ matrix: own }) => own.values[row * own.columns + column]);
    const told = sides.map(({ name }, index) => `${MARK[name]} ${weightWords(weights[index])}`);
    if (variation) told.push(`B − A ${weights[1] < weights[0] ? "−" : "+"}${weightWords(Math.abs(weights[1] - weights[0]))}`);
    this.#readout.replaceChildren(
      "query ", h("b", {}, spanWords(view.queries || view.keys, row, matrix.rows, matrix.n_queries)), " → key ",
      h("b", {}, spanWords(view.keys, column, matrix.columns, matrix.n_keys)), ` · ${told.join(" · ")}`);
  }

  // ---- numbers and curves --------------------------------------------------------------------------------

  /** [name, label, unit, left, right] of the statistics that both sides have. */
  #statistics() {
    const { left, right } = this.#shown, values = [left, right].map(({ source, at, view }) => {
      const row = rowOf(source.page.groups[at.group], at.layer, at.head);
      return (name) => view.heads[name][row];
    });
    const group = left.source.page.groups[left.at.group];
    return statisticsOf(left.view).filter((name) => right.view.heads[name].some((x) => x !== null))
      .map((name) => ({ name, label: labelOf(group, name), meaning: meaningOf(group, name), unit: looks.statistics[name].unit, values: values.map((of) => of(name)) }));
  }

  #drawNumbers() {
    const rows = this.#statistics().map(({ label, meaning, unit, values: [a, b] }) => h("tr", {},
      h("th", { scope: "row", "data-tip": meaning }, label), h("td", {}, written(a, unit)), h("td", {}, written(b, unit)),
      h("td", {}, a === null || b === null ? "–" : signed(b - a, unit))));
    this.#numbers.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Mean over queries"), ...["A", "B"].map((mark) => h("th", { scope: "col" }, mark)), h("th", { scope: "col" }, "B − A"))),
      h("tbody", {}, rows)));
  }

  #along() {
    const shown = this.#shown;
    if (!shown?.left.curves || !shown.right.curves) return;
    const width = Math.floor(this.#curves.getBoundingClientRect().width);
    if (width <= 0) return;
    const series = (values) => [shown.left, shown.right].map((side) => ({ ...values(side), colour: `var(${side.name === "left" ? "--accent" : "--warm"})`, label: MARK[side.name] })).filter((one) => one.values);
    const parts = [
      overlay({ title: "Received by each key", unit: "%", width, log: true, series: series((side) => ({ values: binPeaks(alongOf(side, "received"), Math.floor(width / 2)), n: side.view.n_keys })) }),
      overlay({ title: "Entropy of each query, nats", unit: "nats", width, series: series((side) => ({ values: alongOf(side, "entropy"), n: side.view.n_queries })) }),
    ];
    if (shown.variation) parts.push(overlay({ title: "Total variation between A and B", unit: "%", width, series: [{ values: shown.variation, n: shown.left.view.n_queries, colour: "var(--soft)", label: "A, B" }] }));
    this.#curves.replaceChildren(...parts);
  }

  // ---- export --------------------------------------------------------------------------------------------

  picture() {
    if (!this.#shown?.left.curves) return null;
    const { left, right } = this.#shown, short = ({ source, at }) => `${source.name}-t${at.text}-L${source.page.groups[at.group].layers[at.layer]}-H${source.page.groups[at.group].heads[at.head]}`;
    return { name: `${short(left)}-and-${short(right)}`, svg: () => this.#svg(), csv: () => this.#csv() };
  }

  #svg() {
    const { left, right, variation, difference, scale } = this.#shown, size = 360, gap = 28, parts = [];
    const pictures = [[left, left.canvas], ...(variation ? [[null, difference]] : []), [right, right.canvas]];
    let tall = size;
    pictures.forEach(([side, canvas], index) => {
      const x = index * (size + gap);
      const words = side ? `${MARK[side.name]} · ${side.source.name}, ${headName(side.source.page.groups[side.at.group], side.at.layer, side.at.head)}` : "B − A";
      parts.push(svgText(x, 10, words, { "font-weight": 600 }));
      if (!canvas) { parts.push(svgText(x, 40, "no map", { fill: "var(--soft)" })); return; }
      const height = (size * canvas.height) / canvas.width;
      tall = Math.max(tall, height);
      parts.push(svgImage(canvas, { x, y: 20, width: size, height }), svg("rect", { x, y: 20, width: size, height, fill: "none", stroke: "var(--line)" }));
    });
    let y = 20 + tall + 22;
    const colours = Array.from({ length: 24 }, (_, k) => css(ramp(k / 23)));
    if (left.canvas || right.canvas) parts.push(svgRamp(0, y, colours, `≤ ${weightWords(scale.low)}`, percent(scale.top)));
    if (variation) parts.push(svgKey(size + gap, y, [["A more", css(signedColour(-1))], ["B more", css(signedColour(1))]]));
    const width = pictures.length * (size + gap) - gap;
    for (const { name, source, at, view } of [left, right]) {
      y += 24;
      const shares = sharesOf(source.page.groups[at.group], view, at.layer, at.head);
      const used = looks.destinations.filter((part) => shares[part.name] > 0.0005), whole = used.reduce((sum, part) => sum + shares[part.name], 0) || 1;
      let x = 18;
      parts.push(svgText(0, y + 8, MARK[name], { "font-weight": 600 }));
      for (const part of used) {
        const wide = ((width - 18) * shares[part.name]) / whole;
        parts.push(svg("rect", { x, y: y - 4, width: Math.max(wide - 1, 0.5), height: 16, fill: destinationColour(part) }));
        x += wide;
      }
    }
    y += 36;
    parts.push(svgKey(18, y, looks.destinations.filter(({ name }) => [left, right].some((side) => sharesOf(side.source.page.groups[side.at.group], side.view, side.at.layer, side.at.head)[name] > 0.0005)).map((part) => [part.label, destinationColour(part)])));
    const goes = [left, right].map(({ name, view, source, at }) => `${MARK[name]}: ${view.heads.goes_to[rowOf(source.page.groups[at.group], at.layer, at.head)]}`).join(" · ");
    return svgPicture({ width, height: y + 8, title: "Two heads compared", note: `${goes}. Rows are queries, columns are keys.`, parts });
  }

  /** Numbers first, then the curves by position; bins of a long text by their first position. */
  #csv() {
    const { left, right, variation } = this.#shown;
    const rows = this.#statistics().map(({ name, values: [a, b] }) => [name, null, a, b, a === null || b === null ? null : b - a]);
    for (const name of ["received", "entropy"]) {
      const [a, b] = [left, right].map((side) => alongOf(side, name));
      if (!a || !b) continue;
      const n = name === "received" ? [left.view.n_keys, right.view.n_keys] : [left.view.n_queries, right.view.n_queries];
      const starts = [a, b].map((values, side) => new Map(Array.from(values, (value, bin) => [Math.ceil((bin * n[side]) / values.length), value])));
      const positions = [...new Set([...starts[0].keys(), ...starts[1].keys()])].sort((x, y) => x - y);
      for (const position of positions) {
        const [x, y] = starts.map((values) => values.get(position) ?? null);
        rows.push([name, position, x, y, x === null || y === null ? null : y - x]);
      }
    }
    variation?.forEach((value, query) => rows.push(["total_variation", query, null, null, value]));
    return csvOf(["what", "position", "a", "b", "difference"], rows);
  }
}

const pick = (object, keys) => Object.fromEntries(keys.map((key) => [key, object[key]]));

/** A curve of one head among the curves of a text. */
function alongOf({ source, at, curves }, name) {
  if (!curves[name]) return null;
  const { values, shape } = curves[name], row = rowOf(source.page.groups[at.group], at.layer, at.head);
  return values.subarray(row * shape[2], (row + 1) * shape[2]);
}

/** What a row or column of a map stands for: a token, or a range of positions. */
function spanWords(tokens, at, cells, n) {
  if (cells === n) return `${integer(at)} “${named(tokens[at])}”`;
  const block = n / cells;
  return `${integer(Math.floor(at * block))}–${integer(Math.min(Math.ceil((at + 1) * block), n) - 1)}`;
}

/** A weight to three digits. */
const weightWords = (weight) => `${weight === 0 ? 0 : weight < 1e-5 ? (100 * weight).toExponential(1) : +(100 * weight).toPrecision(3)}\u00a0%`;

/** A difference with its sign; of shares in percentage points. */
function signed(value, unit) {
  const mark = value > 0 ? "+" : value < 0 ? "−" : "±";
  return `${mark}${unit === "%" ? `${(100 * Math.abs(value)).toFixed(1)}\u00a0points` : written(Math.abs(value), unit)}`;
}

/** From the colour of A (−1) over the page's own (0) to the colour of B (1), as [r, g, b]. */
function signedColour(x) {
  const from = rgbOfPage("--panel"), to = rgbOfPage(x < 0 ? "--accent" : "--warm");
  return from.map((channel, i) => Math.round(channel + (to[i] - channel) * Math.min(Math.abs(x), 1)));
}

function rgbOfPage(variable) {
  const hex = colourOf(variable);
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function paintSigned(canvas, rows, columns, at) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const table = Array.from({ length: 257 }, (_, level) => signedColour(level / 128 - 1));
  for (let cell = 0; cell < rows * columns; cell++) {
    const colour = table[Math.round(128 * (at(cell) + 1))];
    image.data.set([...colour, 255], 4 * cell);
  }
  context.putImageData(image, 0, 0);
}
