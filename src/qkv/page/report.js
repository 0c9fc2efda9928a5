// The report: its state, and one function per part of the page. All data is in the HTML file.

import { binPeaks, binStart, integer, named, percent, short, visible, written } from "./numbers.js";
import { binnedMap, choice, denseMap, legend, paint } from "./charts.js";
import { css, inkOn, isDark, looks, ramp, useLooks } from "./colour.js";
import { decodedArrays, inflated } from "./data.js";
import { KIND, cellsOf, headCard, headCurves, headGrid, headName, headTitle, kindCells, kindKey, kindsOf, labelOf, layerShares, markHead, meaningOf, rowOf, scaleOf, statisticsOf, firstHead } from "./heads.js";
import { h, replace } from "./dom.js";
import { findingTiles } from "./findings.js";
import { pooledMap } from "./pools.js";
import { sinkFigures } from "./sinks.js";
import { wall } from "./wall.js";

const $ = (id) => document.getElementById(id);
const PAGE = JSON.parse($("page").textContent);
useLooks(PAGE);

const state = { group: PAGE.main, text: 0, statistic: "sink", layer: 0, head: 0, source: "all", wall: "layer", pool: "largest", from: 0, query: null, sort: "target_share", descending: true, all: false };
const WINDOW = 600; // tokens of a long text that are shown at a time
const cache = new Map(); // element id → decoded arrays or maps
const group = () => PAGE.groups[state.group];
const view = () => group().texts[state.text];
const place = () => `${state.group}-${state.text}`;
const row = () => rowOf(group(), state.layer, state.head);
const tokensOf = (side) => (side === "query" && view().queries) || view().keys;

async function arrays() {
  const id = `curves-${place()}`;
  if (!cache.has(id)) cache.set(id, decodedArrays(view().arrays, await inflated($(id).textContent)));
  return cache.get(id);
}

/** All weights of a head, as bytes; null if the report does not have them. */
async function map(at = row()) {
  if (view().maps !== "kept") return null;
  const id = `maps-${place()}`, key = `${id}-${at}`;
  if (!cache.has(id)) cache.set(id, JSON.parse($(id).textContent));
  if (!cache.has(key)) cache.set(key, inflated(cache.get(id)[at]));
  return cache.get(key);
}

// ---- header ---------------------------------------------------------------------------------------------

function header() {
  const { attrs } = PAGE, v = view(), g = group();
  $("model").textContent = attrs.model || "Attention profile";
  $("headline").textContent = v.headline.replaceAll(" %", "\u00a0%");
  // The preview in the attributes is of the first text; for other texts, join the tokens.
  const preview = ((state.text === 0 && attrs.text_preview) || v.keys.slice(0, 60).join("")).trim().replace(/\s+/g, " ");
  const cut = v.n_keys > 60 || preview.length > 220; // a truncated preview drops a word that was cut
  $("preview").textContent = `“${cut ? `${preview.slice(0, 220).replace(/ \S*$/, "")} …` : preview}”`;
  const facts = [
    [v.n_queries === v.n_keys ? "tokens" : "queries × keys", v.n_queries === v.n_keys ? integer(v.n_keys) : `${integer(v.n_queries)} × ${integer(v.n_keys)}`],
    ["layers × heads", `${g.layers.length} × ${g.heads.length}`],
    ["attention", g.causal ? "causal" : v.queries ? "cross" : "bidirectional"],
    ["parameters", attrs.parameters && short(attrs.parameters)],
    ["dtype", attrs.dtype],
    ["measured in", attrs.seconds && `${attrs.seconds.toFixed(attrs.seconds < 10 ? 2 : 0)} s`],
    ["peak memory", attrs.peak_memory_bytes && `${short(attrs.peak_memory_bytes)}B`],
    ["date", attrs.created && attrs.created.slice(0, 10)],
  ];
  $("facts").replaceChildren(...facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact))));
  $("foot").replaceChildren(
    ...[
      attrs.command && h("p", {}, h("code", {}, attrs.command)),
      h("p", {}, Object.entries(attrs.versions || {}).map(([name, version]) => `${name} ${version}`).join(" · ")),
      attrs.unobserved && attrs.unobserved.length ? h("p", {}, `Not observed: ${attrs.unobserved.map(String).join(", ")}.`) : "",
    ].filter(Boolean),
  );
}

function switches() {
  const parts = [];
  if (PAGE.groups.length > 1)
    parts.push(choice("Attention", PAGE.groups.map((g, index) => [index, g.name]), state.group, (index) => {
      Object.assign(state, { group: +index, text: Math.min(state.text, PAGE.groups[index].texts.length - 1), layer: 0, head: 0, from: 0, query: null });
      if (state.source !== "all") state.source = "all";
      everything();
    }));
  if (group().texts.length > 1)
    parts.push(h("label", {}, "Text ", h("select", { "data-key": "text", onchange: (event) => { Object.assign(state, { text: +event.target.value, from: 0, query: null }); everything(); } },
      group().texts.map((text, index) => h("option", { value: index, selected: index === state.text }, `${index + 1}. ${text.keys.slice(0, 8).join("").trim()} …`)))));
  $("switches").hidden = !parts.length;
  replace($("switches"), ...parts);
}

function tiles() {
  const { layers, heads } = group();
  $("tiles").replaceChildren(...findingTiles(view().findings, async (layer, head) => {
    await select(layers.indexOf(layer), heads.indexOf(head));
    $("card").scrollIntoView({ block: "center" });
  }));
}

// ---- every head -----------------------------------------------------------------------------------------

function overview() {
  const available = [...statisticsOf(view()), KIND];
  if (!available.includes(state.statistic)) state.statistic = available[0];
  const kinds = state.statistic === KIND, name = (statistic) => (statistic === KIND ? "Type of head" : labelOf(group(), statistic));
  replace(
    $("overview-controls"),
    h("label", {}, "Colour by ", h("select", { id: "statistic", "data-key": "statistic", onchange: (event) => { state.statistic = event.target.value; overview(); } },
      available.map((id) => h("option", { value: id, selected: id === state.statistic }, name(id))))),
    kinds ? null : legend(scaleOf(view(), state.statistic)),
    h("p", { class: "meaning" }, kinds ? "the first type whose criterion the head meets, over all texts" : meaningOf(group(), state.statistic)),
  );
  const { layer, head } = state;
  const cells = kinds ? kindCells(PAGE, group(), view()) : cellsOf(group(), view(), state.statistic);
  const grid = headGrid({ group: group(), cells, layer, head, label: `${name(state.statistic)} of every head`, select });
  $("grid-box").replaceChildren(h("span", { class: "axis" }, "head →"), grid, kinds ? kindKey(PAGE, group()) : "");
  $("by-layer").replaceChildren(h("h3", {}, "Where the weight goes, by layer"), ...layerShares(group(), view()));
}

function select(layer, head) {
  Object.assign(state, { layer, head, query: null });
  markHead($("grid-box").querySelector(".grid"), layer, head);
  if ($("wall").firstChild) markHead($("wall").firstChild, layer, head);
  return Promise.all([card(), bigMap(), reading()]);
}

async function card() {
  const v = view(), g = group(), at = row(), wanted = `${place()}/${at}`;
  card.wanted = wanted;
  const curves = await arrays();
  if (card.wanted !== wanted) return; // another head was selected meanwhile
  const step = (by) => {
    const total = g.layers.length * g.heads.length, next = (at + by + total) % total;
    select(Math.floor(next / g.heads.length), next % g.heads.length);
  };
  replace($("card"), headCard({ group: g, view: v, layer: state.layer, head: state.head, step }));
  detail(curves);
}

/** The curves of the selected head along the text. */
function detail(curves) {
  const box = h("div", { class: "curves" });
  replace($("detail"), h("h3", {}, `${headTitle(group(), state.layer, state.head)} along the text`), box);
  const columns = getComputedStyle(box).gridTemplateColumns.split(" ");
  const width = Math.max(Math.floor(parseFloat(columns[0])) || 0, 240); // before the first layout there are no columns
  box.replaceChildren(...headCurves({ group: group(), view: view(), curves, layer: state.layer, head: state.head, width }));
}

// ---- maps -----------------------------------------------------------------------------------------------

/** The pooled map of a head; all its weights if the profile has no pooled maps; null if it has neither. */
async function pooled(layer, head) {
  const about = view().pooled, id = `pools-${place()}`, at = rowOf(group(), layer, head), key = `${id}-${at}`;
  if (!about) {
    const bytes = await map(at);
    return bytes && { rows: tokensOf("query").length, columns: view().n_keys, largest: Float32Array.from(bytes, (byte) => byte / 255) };
  }
  if (!cache.has(id)) cache.set(id, JSON.parse($(id).textContent));
  if (!cache.has(key)) cache.set(key, inflated(cache.get(id)[at]).then((codes) => pooledMap(about, codes)));
  return cache.get(key);
}

function maps() {
  const g = group(), v = view(), { layer, head } = state;
  $("maps").hidden = !v.pooled && v.maps !== "kept";
  if ($("maps").hidden) return;
  const high = v.pooled?.high ?? 1, binned = v.pooled && (v.pooled.bin_queries > 1 || v.pooled.bin_keys > 1);
  const sections = state.wall === "layer" ? null : kindsOf(PAGE, g).map(({ name, count }) => ({
    title: `${name} · ${integer(count)}`,
    rows: g.types.type.map((_, at) => at).filter((at) => g.types.type[at] === name).sort((a, b) => (g.types[name]?.[b] ?? 0) - (g.types[name]?.[a] ?? 0)),
  }));
  replace($("wall-controls"),
    choice("Order by", [["layer", "Layer × head"], ["type", "Type of head"]], state.wall, (order) => { state.wall = order; maps(); }),
    legend({ low: percent(high / 1000), high: percent(high), note: `${binned ? "largest weight of a bin" : "weight"}, logarithmic` }),
    h("p", { class: "meaning" }, `Rows are queries, columns are keys${binned ? `, in bins of ${integer(v.pooled.bin_queries)} × ${integer(v.pooled.bin_keys)} tokens` : ""}. Select a map to enlarge it.`));
  replace($("wall"), wall({
    group: g, high, sections, layer, head, load: pooled, select,
    tip: (l, k) => `${g.types.type[rowOf(g, l, k)]}\n${v.heads.goes_to[rowOf(g, l, k)]}`,
  }));
}

/** The map of the selected head: all weights if the report has them, else its pooled map. */
async function bigMap() {
  const v = view(), g = group(), wanted = `${place()}/${row()}/${state.pool}`;
  bigMap.wanted = wanted;
  const [bytes, bins] = await Promise.all([map(), pooled(state.layer, state.head)]);
  if (bigMap.wanted !== wanted || !bins) return;
  const queries = tokensOf("query"), title = headTitle(g, state.layer, state.head), label = `Attention map of ${title}`;
  replace($("big-map"),
    h("h3", {}, title),
    h("p", { class: "goes" }, v.heads.goes_to[row()], g.types.type[row()] !== "mixed" ? h("span", { class: "kind" }, ` · ${g.types.type[row()]} head`) : null),
    bytes
      ? denseMap({ bytes, queries, keys: v.keys, label })
      : binnedMap({ bins, queries, keys: v.keys, causal: g.causal, label, pool: state.pool, onpool: (pool) => { state.pool = pool; bigMap(); } }),
    bytes ? null : h("p", { class: "note" }, v.maps === "none"
      ? "This text is longer than map_tokens, the limit up to which the profiler keeps every weight. For any part of this map, exact at any zoom, use qkv map or qkv view."
      : "All weights of this text are in the profile but too large for this page: use profile.plot.map(layer, head)."));
}

function sinks() {
  const parts = sinkFigures(PAGE, state.group);
  $("sinks").hidden = !parts.length;
  $("sink-figures").replaceChildren(...parts);
}

// ---- the text -------------------------------------------------------------------------------------------

/** The received share of every token for the selected source. */
function shading(curves) {
  const n = view().n_keys, L = state.layer;
  if (state.source === "all") return curves.mean.values;
  if (state.source === "layer") return curves.layers.values.subarray(L * n, (L + 1) * n);
  const bins = curves.received.shape[2], at = row() * bins, out = new Float32Array(n);
  for (let b = 0; b < bins; b++) out.fill(curves.received.values[at + b], binStart(b, bins, n), binStart(b + 1, bins, n));
  return out;
}

async function reading() {
  const v = view(), g = group(), wanted = `${place()}/${row()}/${state.source}/${state.from}/${state.query}`;
  reading.wanted = wanted;
  const [curves, bytes] = await Promise.all([arrays(), state.source === "head" ? map() : null]);
  if (reading.wanted !== wanted) return;
  const n = v.n_keys, queries = tokensOf("query");
  if (state.query !== null && (!bytes || state.query >= queries.length)) state.query = null;
  const hasQuery = state.query !== null;
  const values = hasQuery ? Float32Array.from(bytes.subarray(state.query * n, (state.query + 1) * n), (byte) => byte / 255) : shading(curves);
  const positive = Array.from(values).filter((x) => x > 0).sort((a, b) => a - b);
  const high = positive.at(-1) || 1, low = Math.min(positive[Math.floor(positive.length * 0.1)] || high / 8, high / 8);
  const level = (x) => (x <= 0 ? 0 : Math.log(Math.max(x, low) / low) / Math.log(high / low));
  const to = Math.min(state.from + WINDOW, n);
  const words = [];
  for (let i = state.from; i < to; i++) {
    const token = v.keys[i], colour = ramp(level(values[i])), lead = token.match(/^\s*/)[0], body = token.slice(lead.length);
    // A token of white space has a mark in the place of its text; its line breaks and indentation come after the mark.
    const broken = lead.includes("\n"), before = broken ? `${"\n".repeat(lead.split("\n").length - 1)}${lead.slice(lead.lastIndexOf("\n") + 1)}` : lead ? " " : "";
    const mark = h("span", { class: i === state.query && !v.queries ? "token asked" : "token", "data-at": i, style: { background: css(colour), color: inkOn(colour) } }, visible(body) || (broken ? "⏎" : "␣"));
    if (body) words.push(before, mark); else words.push(mark, broken ? before : "");
  }
  const readout = h("output", { class: "readout" }, hasQuery ? queryLine(queries) : hint(v, bytes));
  const indented = v.keys.some((token) => /\n[ \t]{2,}/.test(token)); // program code
  const text = h("div", { class: indented ? "text code" : "text", lang: "und",
    onpointerover: (event) => {
      const at = event.target.dataset && event.target.dataset.at;
      if (at === undefined) return;
      const share = values[+at];
      readout.textContent = hasQuery ? `${named(queries[state.query])} gives “${named(v.keys[at])}” (position ${integer(+at)}) ${percent(share)} of its weight`
        : `“${named(v.keys[at])}” at position ${integer(+at)} receives ${percent(share)} of the attention, ${(share * n).toPrecision(2)} × an equal share`;
    },
    onpointerleave: () => { readout.textContent = hasQuery ? queryLine(queries) : hint(v, bytes); },
    onclick: (event) => {
      const at = event.target.dataset && event.target.dataset.at;
      if (at === undefined || !bytes || v.queries) return;
      state.query = state.query === +at ? null : +at;
      reading();
    } }, words);
  const sources = [["all", "All heads"], ["layer", `Layer ${g.layers[state.layer]}`], ["head", headName(g, state.layer, state.head)]];
  replace(
    $("reading"),
    h("div", { class: "controls" },
      choice("Shade by attention received from", sources, state.source, (source) => { Object.assign(state, { source, query: null }); reading(); }),
      legend({ low: percent(low), high: percent(high), note: "share, logarithmic" })),
    strip(curves, v),
    n > WINDOW ? slider(n, to) : "",
    v.queries && bytes ? queryChooser(queries) : "",
    readout,
  );
  $("text").replaceChildren(text);
}

const queryLine = (queries) => `Shaded: the weights of the query “${named(queries[state.query])}” (position ${integer(state.query)}) in ${headName(group(), state.layer, state.head)}. Select it again to go back.`;

function hint(v, bytes) {
  if (bytes && !v.queries) return "Select a token to see its attention weights in this head.";
  if (state.source === "head" && v.bins.received < v.n_keys) return `Stored as ${integer(v.bins.received)} means of ${(v.n_keys / v.bins.received).toFixed(1)} tokens for single heads.`;
  return "Point at a token for its share.";
}

/** For cross-attention: choose the query whose weights shade the keys. */
function queryChooser(queries) {
  return h("label", { class: "asker" }, "Query ", h("select", { "data-key": "asker", onchange: (event) => { state.query = event.target.value === "" ? null : +event.target.value; reading(); } },
    h("option", { value: "" }, "all queries"),
    queries.map((token, index) => h("option", { value: index, selected: index === state.query }, `${index} ${named(token)}`))));
}

/** The attention received in each layer along the whole text; a click moves the window. */
function strip(curves, v) {
  const layers = group().layers, n = v.n_keys;
  const rows = layers.map((_, l) => binPeaks(curves.layers.values.subarray(l * n, (l + 1) * n), 900));
  const all = rows.flatMap((r) => Array.from(r)).filter((x) => x > 0).sort((a, b) => a - b);
  const high = all.at(-1) || 1, low = Math.min(all[Math.floor(all.length * 0.05)] || high / 8, high / 8);
  const canvas = h("canvas", { role: "img", "aria-label": "Received attention by layer and position" });
  paint(canvas, layers.length, rows[0].length, (l, b) => (rows[l][b] > 0 ? Math.log(Math.max(rows[l][b], low) / low) / Math.log(high / low) : 0));
  canvas.style.height = `${Math.min(Math.max(layers.length * 9, 54), 200)}px`;
  const frame = h("i", { class: "frame", hidden: n <= WINDOW, style: { left: `${(100 * state.from) / n}%`, width: `${(100 * Math.min(WINDOW, n)) / n}%` } });
  const box = h("div", { class: "strip-box" }, canvas, frame);
  if (n > WINDOW) box.addEventListener("click", (event) => {
    const bounds = canvas.getBoundingClientRect();
    moveTo(((event.clientX - bounds.left) / bounds.width) * n - WINDOW / 2, n);
  });
  return h("figure", { class: "strip" },
    h("figcaption", {}, h("span", {}, "The whole text, layer by layer"), h("small", {}, `rows: layer ${layers[0]} (top) to ${layers.at(-1)} · columns: positions 0 to ${integer(n - 1)}${n > 900 ? ", the largest share in each" : ""}${n > WINDOW ? " · click to move the window" : ""}`)),
    box);
}

function moveTo(from, n) {
  state.from = Math.round(Math.min(Math.max(from, 0), n - WINDOW));
  reading();
}

function slider(n, to) {
  return h("label", { class: "slider" }, h("span", {}, `Tokens ${integer(state.from)} to ${integer(to - 1)} of ${integer(n)}`),
    h("input", { type: "range", "data-key": "slider", min: 0, max: n - WINDOW, step: 100, value: state.from, onchange: (event) => moveTo(+event.target.value, n) }));
}

// ---- tables ---------------------------------------------------------------------------------------------

function headTable() {
  const { heads: columns } = view(), g = group(), shown = 12;
  const names = ["target_share", ...statisticsOf(view()).filter((name) => looks.statistics[name].table)];
  const order = columns.entropy.map((_, index) => index);
  if (state.sort === "head") { if (state.descending) order.reverse(); }
  else order.sort((a, b) => {
    const [x, y] = [columns[state.sort][a], columns[state.sort][b]];
    if (x === null || y === null) return (x === null) - (y === null) || a - b; // heads without this value come last
    return (state.descending ? y - x : x - y) || a - b;
  });
  const heading = (name, label) => h("th", { scope: "col", "aria-sort": state.sort === name ? (state.descending ? "descending" : "ascending") : "none" },
    h("button", { type: "button", "data-key": `sort-${name}`, onclick: () => {
      state.descending = state.sort === name ? !state.descending : name !== "head";
      state.sort = name;
      headTable();
    } }, label));
  const label = (name) => (name === "target_share" ? "Attends to" : labelOf(g, name));
  const rows = (state.all ? order : order.slice(0, shown)).map((index) => {
    const l = Math.floor(index / g.heads.length), k = index % g.heads.length;
    return h("tr", {}, h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => { select(l, k); $("heads").scrollIntoView({ block: "start" }); } }, headName(g, l, k))),
      names.map((name) => (name === "target_share" ? h("td", { class: "words" }, columns.goes_to[index]) : h("td", {}, written(columns[name][index], looks.statistics[name].unit)))));
  });
  replace(
    $("head-table"),
    h("p", { class: "meaning" }, "Sorted by the share of the weight on one target. Select a column to sort by it."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of heads" }, h("table", {},
      h("thead", {}, h("tr", {}, heading("head", "Head"), names.map((name) => heading(name, label(name))))),
      h("tbody", {}, rows))),
    order.length > shown ? h("button", { type: "button", class: "quiet more", "data-key": "more", onclick: () => { state.all = !state.all; headTable(); } }, state.all ? "Show fewer" : `Show all ${integer(order.length)} heads`) : "",
  );
}

function tokenTable() {
  const { tokens } = view(), most = tokens.share[0] || 1;
  $("token-table").replaceChildren(
    h("h3", {}, "Most attended tokens"),
    h("p", { class: "meaning" }, "All occurrences together: share of all attention, mean over heads."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of tokens" }, h("table", { class: "token-table" },
      h("thead", {}, h("tr", {}, ["Token", "Share", "Times", "Lift"].map((name) => h("th", { scope: "col", "data-tip": name === "Lift" ? "share of the attention / share of the text" : null }, name)))),
      h("tbody", {}, tokens.token.slice(0, 12).map((token, index) => h("tr", {},
        h("th", { scope: "row" }, h("code", {}, token.trim() ? token : JSON.stringify(token))),
        h("td", { class: "barred" }, h("i", { style: { width: `${(100 * tokens.share[index]) / most}%` } }), h("span", {}, percent(tokens.share[index]))),
        h("td", {}, integer(tokens.count[index])), h("td", {}, `${tokens.lift[index] >= 10 ? integer(tokens.lift[index]) : tokens.lift[index].toFixed(1)} ×`)))))),
  );
}

// ---- notes ----------------------------------------------------------------------------------------------

function about() {
  const v = view(), g = group();
  const binned = v.bins.received < v.n_keys || v.bins.curve < v.n_queries;
  $("about").replaceChildren(
    h("dl", {}, statisticsOf(view()).map((name) => [h("dt", {}, looks.statistics[name].label), h("dd", {}, meaningOf(g, name))])),
    h("div", {},
      h("p", {}, "Every number of a head is a mean over the queries of the text, computed exactly from all of its attention weights; nothing is sampled. ",
        "The statistics “first token” and “previous token” leave out the first query of a text, which in causal attention can only attend to itself. ",
        "Weights are shares of their row: they are divided by its sum, in which a learned sink counts as a key, so a share of all attention is a mean over queries."),
      h("p", {}, `Where the weight goes counts each key once, under the first name that fits: first token, other special tokens, self, previous, next, nearby (within ${g.window} tokens), elsewhere. `,
        v.maps === "none" ? `There is one exception to exactness: for queries with a special token 2 to ${g.window} places away, the rest of the neighbourhood counts as elsewhere.` : ""),
      v.pooled ? h("p", {}, "Small maps show the largest weight of each bin, with a relative error of up to 2.3 %.") : "",
      h("p", {}, `Curves are stored in 16 bits (steps of 1/65,533 of their range)${binned ? `; for this length they are means: ${integer(v.bins.curve)} along the queries, ${integer(v.bins.received)} along the keys of each head` : ""}. `,
        v.maps === "kept" ? "Dense maps are stored in steps of 1/255: a weight read from a map is right to 0.2 %." : "")),
  );
}

// ---- tooltips, theme, start -----------------------------------------------------------------------------

function tooltips() {
  const tip = $("tip");
  const show = (target) => {
    tip.replaceChildren(...target.dataset.tip.split("\n").map((line) => h("span", {}, line)));
    tip.hidden = false;
    const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(Math.max(box.left + box.width / 2 - size.width / 2, 8), document.documentElement.clientWidth - size.width - 8)}px`;
    tip.style.top = `${box.top - size.height - 8 > 4 ? box.top - size.height - 8 : box.bottom + 8}px`;
  };
  const over = (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    if (target) show(target); else tip.hidden = true;
  };
  document.addEventListener("pointerover", over);
  document.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) over(event); });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; });
}

function theme() {
  const button = $("theme"), root = document.documentElement;
  const name = () => { button.textContent = isDark() ? "Light theme" : "Dark theme"; };
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); everything(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); everything(); });
  name();
}

function everything() {
  header(); switches(); tiles(); maps(); overview(); sinks(); headTable(); tokenTable(); about();
  return Promise.all([card(), bigMap(), reading()]);
}

/** Draw the curves again when the width changes, because they are drawn to the pixel. */
function redrawOnResize() {
  let width = $("detail").clientWidth, later;
  new ResizeObserver(() => {
    if ($("detail").clientWidth === width) return;
    width = $("detail").clientWidth;
    clearTimeout(later);
    later = setTimeout(card, 100);
  }).observe($("detail"));
}

function trouble(error) {
  const text = typeof DecompressionStream === "undefined"
    ? "This browser cannot unpack the report's data (it lacks DecompressionStream). Please open it in a browser of 2023 or later."
    : `This report could not be shown: ${error && error.message ? error.message : error}`;
  document.documentElement.dataset.error = text;
  $("trouble").textContent = text;
  $("trouble").hidden = false;
}

addEventListener("error", (event) => trouble(event.error || event.message));
addEventListener("unhandledrejection", (event) => trouble(event.reason));
try {
  Object.assign(state, firstHead(group(), view()));
  theme(); tooltips();
  everything().then(() => { redrawOnResize(); document.documentElement.dataset.ready = "1"; }, trouble);
} catch (error) {
  trouble(error);
}
