// The grid of all heads of a text, the card of one head, and its curves. `group` and `view` are `groups[g]` and
// `groups[g].texts[t]` of a page; layers and heads are indices in the group.

import { chooser, curve, Drawn, keyOf, legend, selectFrom, stack } from "./charts.js";
import { css, destinationColour, inkOn, isDark, looks, ramp, rgbOf } from "./colour.js";
import { rowOf, rowOfCurve } from "./data.js";
import { h, vertically } from "./dom.js";
import { binPeaks, integer, named, short, visible, written } from "./numbers.js";

export const MANY = 16; // with more heads or layers, cells are too small for text

/** The short name of a head. */
export const headName = (group, layer, head) => `L${group.layers[layer]} · H${group.heads[head]}`;

/** The next or previous head; `byLayer`: the same head of the next or previous layer. */
export function stepped(group, layer, head, by, byLayer = false) {
  const count = group.heads.length, layers = group.layers.length;
  if (byLayer) return { layer: (layer + by + layers) % layers, head };
  const next = (layer * count + head + by + layers * count) % (layers * count);
  return { layer: Math.floor(next / count), head: next % count };
}

/** Where a head attends, and its type, in words. */
export const headWords = (group, view, row) => [view.heads.goes_to[row], ...(group.types.type[row] === "mixed" ? [] : [`${group.types.type[row]} head`])];

/** The full name of a head, for titles and screen readers. */
export const headTitle = (group, layer, head) => `Layer ${group.layers[layer]}, head ${group.heads[head]}`;

/** The first words of a text, or the question of a chat. */
export function openingWords({ keys, turns }, tokens = 9) {
  const [, from, end] = turns.findLast((turn) => turn[3] === "user") ?? [0, 0, keys.length];
  const words = visible(keys.slice(from, Math.min(from + tokens, end)).join("").replace(/\s+/g, " ").trim());
  return end > from + tokens ? `${words} …` : words;
}

/** Choosers of the kind of attention and of the text, where there are several; `prefix` makes their keys unique. */
export function textChoosers(groups, g, t, ongroup, ontext, prefix = "") {
  const { texts } = groups[g];
  return [
    groups.length > 1 ? chooser("Attention", `${prefix}group`, g, groups.map(({ name }, index) => [index, name]), ongroup) : null,
    texts.length > 1 ? chooser("Text", `${prefix}text`, t, texts.map((one, index) => [index, `${index + 1}. ${openingWords(one)}`]), ontext) : null,
  ].filter(Boolean);
}

/** The numbers of layers and heads of a group in words. */
export function sizeWords({ layers, heads }) {
  const counted = ({ length }, noun) => `${integer(length)} ${noun}${length === 1 ? "" : "s"}`;
  return `${counted(layers, "layer")} × ${counted(heads, "head")}`;
}

/** What is known of a measurement, in words: {name: fact}. */
export const factsOf = ({ attrs: { parameters, dtype, seconds } }, group, view) => ({
  attention: group.causal ? "causal" : view.queries ? "cross" : "bidirectional", parameters: parameters && short(parameters), dtype,
  "measured in": seconds && `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`,
});

/** Names of the statistics that at least one head of a text has. */
export const statisticsOf = (view) => Object.keys(looks.statistics).filter((name) => view.heads[name]?.some((x) => x !== null));

/** Label and meaning of a statistic in this group. */
export const labelOf = (group, name) => ({ local: `Local ±${group.window}`, sink: "First token, later queries" }[name] ?? looks.statistics[name].label);
export const meaningOf = (group, name) => looks.statistics[name].meaning.replace("`local_window`", group.window);

/** Instead of the name of a statistic: colour heads by their type. */
export const KIND = "type";
const ABBREVIATIONS = { "first token": "1st", "previous token": "prev", "other sink": "sink", "duplicate token": "dup", induction: "ind", delimiter: "del", local: "loc", uniform: "uni", self: "self", mixed: "" };

/** Types of heads that occur in a group, with colours and counts. */
export const kindsOf = (page, group) => page.roles
  .map((role) => ({ name: role.name, colour: rgbOf(role[isDark() ? "dark" : "light"]), count: group.types.type.filter((name) => name === role.name).length }))
  .filter(({ count }) => count);

/** The colours of all heads by a statistic or KIND: the cells, what they mean, and a colour bar (`scale`) or the names of the colours (`key`). */
function colouring(page, group, view, statistic) {
  const goesTo = view.heads.goes_to;
  if (statistic === KIND) {
    const { type, traits } = group.types, kinds = kindsOf(page, group), colours = Object.fromEntries(kinds.map(({ name, colour }) => [name, colour]));
    return {
      title: "Type", meaning: "the first type whose criterion the head meets, over all texts", scale: null, key: keyOf(kinds.map(({ name, colour, count }) => [name, css(colour), integer(count)])),
      cells: type.map((name, at) => ({ text: ABBREVIATIONS[name] ?? name.slice(0, 4), colour: colours[name], tip: [name, traits[at].join(", "), goesTo[at]].filter(Boolean).join("\n") })),
    };
  }
  const values = view.heads[statistic], known = values.filter((x) => x !== null), { label, unit } = looks.statistics[statistic];
  const low = Math.min(0, ...known), high = Math.max(...known, { ratio: 1, "%": 0.1 }[unit] ?? 1e-9); // so that negligible values look negligible
  return {
    title: labelOf(group, statistic), meaning: meaningOf(group, statistic), scale: legend({ low: low ? written(low, unit) : "0", high: written(high, unit) }), key: null,
    cells: values.map((x, at) => ({ text: x === null ? "–" : cellText(x, unit), colour: ramp(x === null ? 0 : (x - low) / (high - low)), tip: `${label} ${written(x, unit)}\n${goesTo[at]}` })),
  };
}

function cellText(x, unit) {
  if (unit === "%") return (100 * x).toFixed(0);
  if (unit === "ratio") return x.toFixed(2).replace(/^0/, "");
  return Math.abs(x) >= 9.95 ? (x >= 9999 ? `${(x / 1000).toFixed(0)}k` : x.toFixed(0)) : x.toFixed(1);
}

/** A button that stands for a head, with its name and `tip` as the tooltip. */
export function headButton(group, layer, head, tip, attributes, ...children) {
  const title = headTitle(group, layer, head);
  return h("button", {
    type: "button", tabindex: -1, "data-layer": layer, "data-head": head,
    "aria-label": `${title}${tip ? `: ${tip.replaceAll("\n", "; ")}` : ""}`, "data-tip": `${title}${tip ? `\n${tip}` : ""}`, ...attributes,
  }, ...children);
}

/** A grid with a row per layer and a column per head. `cell(l, k)` makes a cell; each `every`-th head has its number above it. */
export function layerGrid({ layers, heads }, cell, every, attributes) {
  return h("div", { role: "grid", ...attributes },
    h("div", { role: "row", class: "row" }, h("span"), heads.map((id, k) => h("span", { role: "columnheader", class: "column" }, k % every ? h("span", { class: "unseen" }, String(id)) : String(id)))),
    layers.map((id, l) => h("div", { role: "row", class: "row" }, h("span", { role: "rowheader", class: "rowhead" }, String(id)), heads.map((_, k) => cell(l, k)))));
}

/**
 * Let clicks and `arrowKeys` select among the heads in a box, and mark (layer, head); returns the box. `select(layer, head)` is
 * called for each selection, and `open(layer, head)`, if given, for Enter and double clicks; with `once`, for clicks.
 */
export function selectable(box, { layer, head, select, open = null, once = false }) {
  const cellOf = (event) => event.target.closest("[data-layer]"), placeOf = (cell) => [+cell.dataset.layer, +cell.dataset.head];
  const choose = (cell) => { markHead(box, ...placeOf(cell)); select(...placeOf(cell)); };
  box.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) choose(cell);
    if (cell && once) open?.(...placeOf(cell)); // Enter is a click
  });
  if (open && !once) box.addEventListener("dblclick", (event) => { if (cellOf(event)) open(...placeOf(cellOf(event))); });
  if (open && !once) box.addEventListener("keydown", (event) => { if (event.key === "Enter" && cellOf(event)) event.preventDefault(), open(...placeOf(cellOf(event))); });
  arrowKeys(box, choose);
  markHead(box, layer, head);
  return box;
}

/** Call `move(cell)` for the arrow keys, Home and End among the heads in a box: within a row of a grid, or among all where lines wrap. */
export function arrowKeys(box, move) {
  box.addEventListener("keydown", (event) => {
    const cell = event.target.closest("[data-layer]"), all = [...box.querySelectorAll("[data-layer]")], here = all.indexOf(cell);
    if (!cell) return;
    const row = cell.closest("[role=row]"), line = row ? all.filter((other) => row.contains(other)) : all, at = line.indexOf(cell), boxOf = (index) => all[index]?.getBoundingClientRect();
    const moves = { ArrowLeft: () => line[at - 1], ArrowRight: () => line[at + 1], Home: () => line[0], End: () => line.at(-1), ArrowUp: () => all[vertically(boxOf, here, -1)], ArrowDown: () => all[vertically(boxOf, here, 1)] };
    if (!Object.hasOwn(moves, event.key)) return;
    event.preventDefault();
    const next = moves[event.key]();
    if (next) move(next);
  });
}

/** Mark the selected head of a grid; the keyboard focus follows if it is in the grid. */
export function markHead(grid, layer, head) {
  const active = grid.getRootNode().activeElement, focused = active?.matches("[data-layer]") && grid.contains(active);
  for (const cell of grid.querySelectorAll("[aria-selected='true']")) { cell.tabIndex = -1; cell.setAttribute("aria-selected", "false"); }
  const cell = grid.querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
  if (!cell) return;
  cell.tabIndex = 0;
  cell.setAttribute("aria-selected", "true");
  if (focused) cell.focus();
}

/** The controls, the grid and the bars by layer of all heads of a text, coloured by a statistic or by KIND; `select` and `open` as in `selectable`. */
export function allHeads({ page, group, view, statistic, layer, head, choose, select, open }) {
  const { title, meaning, cells, scale, key } = colouring(page, group, view, statistic), many = group.heads.length > MANY;
  const cell = (l, k) => {
    const { text, colour, tip } = cells[rowOf(group, l, k)];
    return headButton(group, l, k, tip, { role: "gridcell", style: { background: css(colour), color: inkOn(colour) } }, h("span", {}, text));
  };
  const grid = layerGrid(group, cell, many ? 4 : 1, { class: many ? "grid tight" : "grid", "aria-label": `${title} of every head; arrow keys move`,
    style: { "grid-template-columns": `auto repeat(${group.heads.length}, minmax(${many ? 15 : 24}px, 1fr))` } });
  return {
    controls: [
      h("label", {}, "Colour by ", selectFrom("statistic", statistic, [...statisticsOf(view).map((one) => [one, labelOf(group, one)]), [KIND, "Type of head"]], choose)),
      scale, h("p", { class: "meaning" }, meaning),
    ],
    grid: [h("span", { class: "axis" }, "head →"), selectable(grid, { layer, head, select, open }), key],
    layers: [h("h3", {}, "Where the weight goes, by layer"), ...layerShares(group, view)],
  };
}

/** The destinations of the weight of each layer as stacked bars with a legend. */
function layerShares(group, view) {
  const { layers, heads } = group;
  const means = layers.map((_, l) => Object.fromEntries(looks.destinations.map(({ name }) => [name, heads.reduce((sum, _, k) => sum + view.shares[name][rowOf(group, l, k)], 0) / heads.length])));
  const used = looks.destinations.filter(({ name }) => means.some((mean) => mean[name] > 0.0005));
  return [
    h("div", { class: layers.length > MANY ? "layers tight" : "layers" }, layers.map((layer, l) => [h("span", { class: "rowhead" }, layers.length > MANY && l % 4 ? "" : String(layer)), stack(means[l], { window: group.window, label: `Layer ${layer}` })])),
    keyOf(used.map((part) => [part.name === "nearby" ? `nearby (±${group.window})` : part.label, destinationColour(part)])),
  ];
}

/** The share of a head's weight on each destination. */
export const sharesOf = (group, view, layer, head) =>
  Object.fromEntries(looks.destinations.map(({ name }) => [name, view.shares[name][rowOf(group, layer, head)]]));

/** The card of a head: name, destinations and statistics. `step(by)`, if given, selects the head before or after. */
export function headCard({ group, view, layer, head, step }) {
  const at = rowOf(group, layer, head), number = (name) => view.heads[name][at];
  const type = group.types.type[at];
  return [
    h("header", {},
      h("div", {}, h("h3", {}, headTitle(group, layer, head)), h("p", { class: "module" }, group.modules[layer])),
      step && h("div", { class: "steps" },
        h("button", { type: "button", "data-key": "back", class: "quiet", "aria-label": "Previous head", onclick: () => step(-1) }, "←"),
        h("button", { type: "button", "data-key": "on", class: "quiet", "aria-label": "Next head", onclick: () => step(1) }, "→"))),
    h("p", { class: "goes" }, number("goes_to"), type !== "mixed" ? h("span", { class: "kind" }, ` · ${type} head`) : null),
    stack(sharesOf(group, view, layer, head), { window: group.window, legend: true, label: "Where the weight goes" }),
    h("p", { class: "card-note" }, "The parts add up to 100 %: a key with two names has the first one."),
    h("dl", { class: "numbers" },
      statisticsOf(view).filter((name) => number(name) !== null).map((name) =>
        h("div", { "data-tip": meaningOf(group, name) }, h("dt", {}, labelOf(group, name)), h("dd", {}, written(number(name), looks.statistics[name].unit)))),
      h("div", { "data-tip": "the key that receives the largest share" }, h("dt", {}, "Most attended"), h("dd", {}, h("bdi", {}, named(view.keys[number("top_key")])), ` @\u00a0${integer(number("top_key"))}`))),
  ];
}

/** The curves of a head along the text, in a grid of this class. */
export class HeadCurves extends Drawn {
  constructor(name) {
    super(h("div", { class: name }), (width) => this.shown && headCurves({ ...this.shown, width }));
  }

  /** Show a head of `PageData.head`. */
  show(shown) {
    this.shown = shown;
    this.draw();
  }
}

function headCurves({ group, view, curves, layer, head, width }) {
  const at = rowOf(group, layer, head), queries = view.queries || view.keys;
  const slice = (name) => rowOfCurve(curves[name], at);
  const received = binPeaks(slice("received"), Math.floor(width / 1.5));
  const peaks = received.length < view.n_keys ? ", largest in each column" : "";
  const along = (title, values, unit, more) => curve({ title, series: [{ values, n: view.n_queries }], unit, width, tokens: queries, ...more });
  const parts = [curve({ title: `Received by each key${peaks}`, series: [{ values: received, n: view.n_keys }], width, unit: "%", tokens: view.keys, log: true, bars: true })];
  const reference = { label: "uniform attention", values: rowOfCurve(curves.uniform, layer) };
  if (curves.entropy) parts.push(along("Entropy of each query, nats", slice("entropy"), "nats", { reference }));
  if (curves.distance) parts.push(along("Mean distance of the attended keys, tokens", slice("distance"), "tokens"));
  if (curves.sink) parts.push(along("Weight on the first token", slice("sink"), "%"));
  return parts;
}

/** The most telling head, which is selected first, or that of another type than the head `beside`; null if there is none. */
export function firstHead({ telling, heads, types }, beside = null) {
  const typeOf = (layer, head) => types.type[layer * heads.length + head];
  const found = telling.find((at) => !beside || typeOf(...at) !== typeOf(beside.layer, beside.head));
  return found ? { layer: found[0], head: found[1] } : null;
}

/** How similarities are defined, in words; `maps` as in the answer of the server. */
export const similarityMeaning = (maps) =>
  `1 − the mean Jensen-Shannon divergence of the rows, in bits: 1 for equal maps, 0 for maps without a common key${maps === "pooled" ? "; of the pooled maps" : ""}`;

/** The other heads that are most similar to (layer, head), the nearest first: [{layer, head, value}]. */
export function mostSimilar(group, { layer, head }, values, most) {
  const at = rowOf(group, layer, head), count = group.heads.length;
  return largestFirst(values.map((_, other) => other).filter((other) => other !== at && values[other] !== null), values).slice(0, most)
    .map((other) => ({ layer: Math.floor(other / count), head: other % count, value: values[other] }));
}

/** Rows of the table of heads, those with the largest values first; those without a value last. */
export const largestFirst = (rows, values) => rows.toSorted((a, b) => (values[b] ?? -Infinity) - (values[a] ?? -Infinity) || a - b);
