// Compare: two heads side by side, of any texts and models. The left one is the selection of the bar; the right one has
// its own keys in the address: bsource, bgroup, btext, blayer, bhead.

import { lengthWords, validHead } from "./address.js";
import { CellMap, curve, Drawn, keyOf, legend, paint, stack } from "./charts.js";
import { destinationColour, looks } from "./colour.js";
import { comparedName, comparedTable, MAX_EXACT, paintDifference, Side, signedColour, totalVariation } from "./compare_side.js";
import { h, replace } from "./dom.js";
import { firstHead, headName, labelOf, meaningOf, mostSimilar, sharesOf, similarityMeaning, statisticsOf, textChoosers } from "./heads.js";
import { binPeaks, integer, named, percent, weightWords, written } from "./numbers.js";
import { headChooser, profileChooser } from "./shell.js";

const PLACE = ["source", "group", "text", "layer", "head"];
const RIGHT = Object.fromEntries(PLACE.map((key) => [key, `b${key}`]));
const SHARP = 320; // the largest number of cells a side that the narrowest map can show individually
const FAINT = 1e-3; // the colour of a weight too small for the scale, but not zero

/** The head whose map is most like that of the head at `at`: {layer, head, value, maps}; null if there is none. */
async function similarHead(source, at) {
  const { maps, values } = await source.similar(at.group, at.text, at.layer, at.head);
  const [best] = mostSimilar(source.page.groups[at.group], at, values, 1);
  return best ? { ...best, maps } : null;
}

export const mount = (root, app) => new Compare(root, app);

class Compare {
  #app;
  #root;
  #presets = h("div", { class: "compare-presets", role: "group", "aria-label": "What to compare with" });
  #sides = h("div", { class: "compare-sides" });
  #shares = h("div", { class: "compare-shares" });
  #maps = h("div", { class: "compare-maps" });
  #readout = h("output", { class: "readout compare-readout", "aria-live": "polite" });
  #numbers = h("div", { class: "compare-numbers scroll", tabindex: 0, role: "group", "aria-label": "Numbers of A and B" });
  #curves = new Drawn(h("div", { class: "compare-curves" }), (width) => this.#along(width));
  #aborting = new AbortController();
  #shown = null; // {sides, variation}: sides A and B, and the total variation of each query, if their tokens are the same
  #offered = ""; // the profiles that were ready when the choosers were drawn

  constructor(root, app) {
    this.#app = app;
    this.#root = root;
    root.append(this.#presets, this.#sides, this.#shares, this.#maps, this.#readout, h("div", { class: "compare-below" }, this.#numbers, this.#curves.element));
  }

  unmount() {
    this.#aborting.abort();
    this.#curves.close();
  }

  recolour() { this.#draw(); }

  async update(changed) {
    if (changed.has("session") && this.#ready() !== this.#offered) this.#draw();
    if (![...changed].some((key) => key === "page" || PLACE.includes(key) || Object.values(RIGHT).includes(key))) return;
    this.#aborting.abort();
    this.#aborting = new AbortController();
    const { signal } = this.#aborting;
    const sides = await this.#validSides(signal);
    if (!sides) return;
    sides[0].similar = await similarHead(sides[0].source, sides[0].at);
    if (signal.aborted) return;
    this.#shown = { sides, variation: null };
    this.#draw();
    await Promise.all(sides.map((side) => side.load(signal)));
    if (signal.aborted) return;
    const [a, b] = sides.map(({ matrix }) => matrix);
    if (this.#sameTokens() && a.exact && b.exact) this.#shown.variation = totalVariation(a, b);
    this.#draw();
  }

  /** Both sides with their profiles; null if the address was corrected, which calls `update` again. */
  async #validSides(signal) {
    const app = this.#app, { state } = app, left = await app.source();
    if (signal.aborted) return null;
    const wanted = Object.fromEntries(PLACE.map((key) => [key, state[RIGHT[key]]]));
    if (wanted.source === undefined) {
      const at = pick(state, PLACE), other = firstHead(left.page.groups[at.group], at) ?? (await similarHead(left, at)) ?? at;
      if (!signal.aborted) this.#goRight({ ...at, ...pick(other, ["layer", "head"]) }, { replace: true });
      return null;
    }
    const find = () => app.session.sources.find(({ id }) => id === wanted.source);
    if (!find()) await app.refresh(); // it may have been added after the list was fetched
    if (signal.aborted) return null;
    const entry = find();
    if (entry?.state !== "ready") {
      const why = !entry ? `There is no profile ${wanted.source}` : entry.state === "running" ? `${entry.name} is not ready yet` : `${entry.name} could not be profiled`;
      app.trouble(`${why}; B is set to ${left.name}, too.`);
      this.#goRight({ ...wanted, source: state.source }, { replace: true });
      return null;
    }
    const right = await app.source(wanted.source);
    if (signal.aborted) return null;
    const { state: valid, notes } = validHead(wanted, right.page);
    for (const sentence of notes) app.trouble(sentence);
    if (PLACE.some((key) => valid[key] !== wanted[key])) {
      this.#goRight(valid, { replace: true });
      return null;
    }
    return [new Side("A", left, pick(state, PLACE)), new Side("B", right, valid)];
  }

  #goRight(place, options) {
    return this.#app.go(Object.fromEntries(PLACE.map((key) => [RIGHT[key], place[key]])), options);
  }

  #sameTokens() {
    const [a, b] = this.#shown.sides.map(({ view }) => view);
    const same = (one, other) => one === other || (one && other && one.length === other.length && one.every((token, index) => token === other[index]));
    return same(a.keys, b.keys) && same(a.queries, b.queries);
  }

  #draw() {
    if (!this.#shown) return;
    const { sides: [a, b], variation } = this.#shown, loaded = Boolean(a.matrix && b.matrix);
    // Keep the old maps, paler, until the new ones are loaded, so that stepping through heads does not flicker.
    this.#maps.classList.toggle("stale", !loaded);
    const first = !this.#maps.firstChild;
    if (loaded || first) this.#root.classList.toggle("compare-three", loaded ? Boolean(variation) : this.#comparable());
    const three = this.#root.classList.contains("compare-three");
    this.#offered = this.#ready();
    replace(this.#presets, h("span", {}, "Compare with"), ...this.#offers());
    replace(this.#sides, this.#side(a), three ? this.#distance(variation) : null, this.#side(b));
    this.#drawShares();
    if (loaded || first) this.#drawMaps(three);
    this.#drawNumbers();
    this.#curves.draw();
  }

  /** The ids of the profiles that are ready. */
  #ready() {
    return this.#app.session.sources.filter(({ state }) => state === "ready").map(({ id }) => id).join();
  }

  /** Whether the two maps will have a difference cell by cell. */
  #comparable() {
    const { n_queries, n_keys } = this.#shown.sides[0].view;
    return this.#sameTokens() && Math.max(n_queries, n_keys) <= MAX_EXACT;
  }

  // ---- what is compared ----------------------------------------------------------------------------------

  #offers() {
    const { sides: [a, b] } = this.#shown, { at, group, similar } = a;
    const offer = (key, words, place, tip) => h("button", { type: "button", class: "quiet", "data-key": key, "data-tip": tip, onclick: () => this.#goRight(place) }, words);
    const offers = [];
    if (similar) offers.push(offer("similar", `${headName(group, similar.layer, similar.head)}, most similar to A`, { ...at, ...pick(similar, ["layer", "head"]) }, `the head with the most similar map: ${similar.value.toFixed(2)} · ${similarityMeaning(similar.maps)}`));
    const same = validHead({ ...b.at, ...pick(at, ["layer", "head"]) }, b.page).state; // or the nearest that exists
    if (PLACE.some((key) => same[key] !== at[key])) offers.push(offer("same", `${headName(b.group, same.layer, same.head)}, same head as A`, same, `in the text of ${b.source.name}`));
    offers.push(h("button", { type: "button", class: "quiet compare-swap", "data-key": "swap", onclick: () => this.#swap(a, b) }, "Swap A and B"));
    return offers;
  }

  #swap(a, b) {
    return this.#app.go({ ...b.at, ...Object.fromEntries(PLACE.map((key) => [RIGHT[key], a.at[key]])) });
  }

  /** The choosers of a side and the main destination of its weight. */
  #side({ name, source, at, view, group, goesTo }) {
    const app = this.#app;
    const go = (changes) => (name === "A" ? app.go(changes) : this.#goRight({ ...at, ...changes }));
    // Another profile may have fewer texts, layers and heads: select the nearest that exist.
    const goSource = async (id) => {
      try {
        const other = await app.source(id);
        go(validHead({ ...at, source: id }, other.page).state);
      } catch (error) {
        app.trouble(error);
      }
    };
    const ready = app.session.sources.filter(({ state }) => state === "ready"), { groups } = source.page;
    const choosers = textChoosers(groups, at.group, at.text, (value) => go(validHead({ ...at, group: value }, source.page).state), (text) => go({ text }), `${name}-`);
    return h("div", { class: "compare-side", role: "group", "aria-label": `Side ${name}` },
      h("div", { class: "compare-choosers" },
        markOf(name),
        profileChooser(ready, at.source, goSource, `${name}-source`),
        headChooser(group, at.layer, at.head, go, name)),
      choosers.length ? h("div", { class: "compare-choosers" }, choosers) : null,
      h("p", { class: "goes" }, goesTo, h("small", {}, lengthWords(view))));
  }

  /** The mean total variation distance of the two heads. */
  #distance(variation) {
    if (!variation) return h("div", { class: "compare-apart" });
    const mean = variation.reduce((sum, one) => sum + one, 0) / variation.length;
    return h("div", { class: "compare-apart" }, h("strong", {}, percent(mean)),
      h("small", { "data-tip": "Total variation: half the sum of |A − B| over the keys, mean over the queries. Weight that no key receives counts as one additional key." }, "of the weight is on other keys in B"));
  }

  #drawShares() {
    const sides = this.#shown.sides.map(({ name, group, view, layer, head }) => ({ name, window: group.window, shares: sharesOf(group, view, layer, head) }));
    const used = looks.destinations.filter((part) => sides.some(({ shares }) => shares[part.name] > 0.0005));
    const arrow = ({ name }) => sides.map(({ shares }) => percent(shares[name])).join(" | ");
    this.#shares.replaceChildren(
      ...sides.map(({ name, window, shares }) => h("div", { class: "compare-share" },
        markOf(name), stack(shares, { window, label: `Destinations of the weight of ${name}` }))),
      keyOf(used.map((part) => [part.name === "nearby" ? `nearby (±${sides[0].window})` : part.label, destinationColour(part), arrow(part)])));
  }

  // ---- maps ----------------------------------------------------------------------------------------------

  #drawMaps(three) {
    const { sides, variation } = this.#shown;
    const top = Math.max(...sides.map(({ matrix }) => (matrix?.values ? matrix.values.reduce((most, value) => Math.max(most, value), 0) : 0)), 1e-6);
    // One logarithmic scale for both maps, as on the map page: it begins at a fifth of the uniform weight or lower.
    const scale = { low: Math.min(top / 100, 0.2 / Math.max(...sides.map(({ view }) => view.n_keys))), top };
    const apart = variation || !sides.every(({ matrix }) => matrix?.values) ? "" : this.#sameTokens() ? ` The difference, pair by pair, is drawn for texts of up to ${MAX_EXACT} tokens.` : " The difference needs two maps of the same tokens.";
    this.#readout.textContent = sides.some(({ matrix }) => matrix?.values) ? `Point at a cell, or focus a map and use the arrow keys.${apart}` : "";
    replace(this.#maps, this.#map(sides[0], scale), variation ? this.#difference() : three ? h("div", { class: "compare-blank" }) : null, this.#map(sides[1], scale));
  }

  #map(side, { low, top }) {
    const { name, source, matrix } = side, title = `${name} · ${side.headName}`, { sides: [a, b], variation } = this.#shown;
    if (!matrix) return h("div", { class: "compare-blank", "aria-busy": "true" }, "Computing the map …");
    if (!matrix.values) return h("p", { class: "compare-blank note" }, `There is no map of ${title}. ${matrix.why ?? ""}`);
    side.box = this.#box(matrix, title);
    paint(side.box.canvas, matrix.rows, matrix.columns, (row, column) => {
      const weight = matrix.values[row * matrix.columns + column];
      return weight > 0 ? Math.max(Math.log(weight / low) / Math.log(top / low), FAINT) : 0;
    });
    const note = matrix.exact ? null : h("small", { "data-tip": "each cell is the largest weight of its block" }, " · pooled");
    const whose = a.source === b.source ? null : h("small", {}, ` · ${source.name}`);
    return h("figure", { class: "compare-figure" },
      h("figcaption", {}, h("span", {}, title, note, whose), name === "A" || !variation ? legend({ low: percent(low).replace(/^(?!<)/, "≤ "), high: percent(top) }) : null),
      side.box.element);
  }

  #difference() {
    const [a, b] = this.#shown.sides.map(({ matrix }) => matrix), box = (this.#shown.difference = this.#box(a, "Difference of A and B"));
    const top = percent(paintDifference(box.canvas, a, b));
    return h("figure", { class: "compare-figure" },
      h("figcaption", {}, h("span", {}, "Difference"),
        legend({ low: `A ${top} more`, high: `B ${top} more`, colourOf: (level) => signedColour(2 * level - 1) })),
      box.element);
  }

  /** A map whose crosshair is shared by all maps of the same shape. */
  #box(matrix, label) {
    const { rows, columns } = matrix, box = new CellMap({ name: "compare-map", rows, columns, label, onmove: (row, column) => this.#point(matrix, row, column) });
    // With more cells than pixels, average them: nearest-neighbour scaling would skip cells.
    box.canvas.style.setProperty("image-rendering", columns > SHARP ? "auto" : "pixelated");
    return box;
  }

  /** Mark a cell in every map of this shape, and show the weights in it. */
  #point(matrix, row, column) {
    const { sides: both, variation, difference } = this.#shown;
    if (both.some((side) => !side.matrix)) return; // the shown maps are about to be replaced
    const sides = both.filter(({ matrix: own }) => own === matrix || (variation && own));
    for (const side of both) side.box?.mark(sides.includes(side) ? [row, column] : null);
    difference?.mark([row, column]);
    const { view } = sides[0], weights = sides.map(({ matrix: own }) => own.values[row * own.columns + column]);
    const parts = sides.map(({ name }, index) => `${name} ${weightWords(weights[index])}`);
    if (variation) parts.push(`B − A ${weights[1] < weights[0] ? "−" : "+"}${weightWords(Math.abs(weights[1] - weights[0]))}`);
    this.#readout.replaceChildren(
      "query ", h("b", {}, spanWords(view.queries || view.keys, row, matrix.step.down)), " → key ",
      h("b", {}, spanWords(view.keys, column, matrix.step.across)), ` · ${parts.join(" · ")}`);
  }

  // ---- numbers and curves --------------------------------------------------------------------------------

  /** {name, label, meaning, unit, values: [a, b]} of the statistics that both sides have. */
  #statistics() {
    const { sides } = this.#shown, [{ group, view }, b] = sides, names = statisticsOf(b.view);
    return statisticsOf(view).filter((name) => names.includes(name))
      .map((name) => ({ name, label: labelOf(group, name), meaning: meaningOf(group, name), unit: looks.statistics[name].unit, values: sides.map((side) => side.view.heads[name][side.row]) }));
  }

  #drawNumbers() {
    const rows = this.#statistics().map(({ label, meaning, unit, values: [a, b] }) => h("tr", {},
      h("th", { scope: "row", "data-tip": meaning }, label), h("td", {}, written(a, unit)), h("td", {}, written(b, unit)),
      h("td", {}, a === null || b === null ? "–" : signed(b - a, unit))));
    this.#numbers.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Mean over queries"), ["A", "B", "B − A"].map((mark) => h("th", { scope: "col" }, mark)))),
      h("tbody", {}, rows)));
  }

  #along(width) {
    const shown = this.#shown;
    if (!shown?.sides.every(({ curves }) => curves)) return null;
    const series = (values) => shown.sides.map((side) => ({ ...values(side), colour: side.colour, label: side.name })).filter((one) => one.values);
    const parts = [
      curve({ title: "Received by each key", unit: "%", width, log: true, series: series((side) => ({ values: binPeaks(side.curve("received"), Math.floor(width / 2)), n: side.view.n_keys })) }),
      curve({ title: "Entropy of each query, nats", unit: "nats", width, series: series((side) => ({ values: side.curve("entropy"), n: side.view.n_queries })) }),
    ];
    if (shown.variation) parts.push(curve({ title: "Total variation between A and B", unit: "%", width, series: [{ values: shown.variation, n: shown.sides[0].view.n_queries, colour: "var(--soft)", label: "A, B" }] }));
    return parts;
  }

  // ---- export --------------------------------------------------------------------------------------------

  picture() {
    const shown = this.#shown;
    if (!shown?.sides.every(({ curves }) => curves)) return null;
    const statistics = this.#statistics();
    return {
      name: comparedName(shown), title: "Two heads compared", note: `${shown.sides.map(({ name, goesTo }) => `${name}: ${goesTo}`).join(" · ")}. Rows are queries, columns are keys.`,
      elements: [this.#maps, this.#shares], csv: () => comparedTable(shown, statistics),
    };
  }
}

const markOf = (name) => h("b", { class: `compare-mark compare-mark-${name}` }, name);

const pick = (object, keys) => Object.fromEntries(keys.map((key) => [key, object[key]]));

/** The token of a row or column of a map, or the positions of its block, of which the last may be shorter. */
function spanWords(tokens, at, step) {
  const from = at * step, to = Math.min(from + step, tokens.length) - 1;
  return from === to ? [`${integer(from)} “`, h("bdi", {}, named(tokens[from])), "”"] : `${integer(from)}–${integer(to)}`;
}

/** A difference with its sign; differences of shares are in percentage points. */
function signed(value, unit) {
  const size = unit === "%" ? `${(100 * Math.abs(value)).toFixed(1)}\u00a0points` : written(Math.abs(value), unit);
  return `${parseFloat(size) === 0 ? "±" : value > 0 ? "+" : "−"}${size}`; // of what is written, which may be rounded to zero
}
