// The report: its state, and one function per part of the page. All data is in the HTML file.

import { integer, named, percent, short, written } from "./numbers.js";
import { looks, themeButton, useLooks } from "./colour.js";
import { HeadCurves, KIND, allHeads, factsOf, headCard, headName, headTitle, labelOf, largestFirst, markHead, meaningOf, openingWords, statisticsOf, firstHead, stepped, textChoosers } from "./heads.js";
import { h, onUncaught, replace, tooltips } from "./dom.js";
import { download, pictureOf, pngOf } from "./export.js";
import { findingTiles, leadOf } from "./findings.js";
import { MapsSection } from "./maps_section.js";
import { Reading } from "./reading.js";
import { sinkFigures } from "./sinks.js";
import { announceState, begin, counted } from "./state.js";
import { PageData } from "./data.js";

const $ = (id) => document.getElementById(id);
const PAGE = JSON.parse($("page").textContent);
useLooks(PAGE);

const state = { group: PAGE.main, text: 0, statistic: "sink", layer: 0, head: 0, sort: "type", descending: true, all: false };
const group = () => PAGE.groups[state.group];
const view = () => group().texts[state.text];

const data = new PageData(PAGE, (id) => $(id).textContent);
/** The maps of the text, or null if the report has none. */
const storedMaps = () => data.maps(state.group, state.text);

// ---- header ---------------------------------------------------------------------------------------------

function header() {
  const { attrs } = PAGE, v = view(), g = group();
  $("model").textContent = attrs.model || "Attention profile";
  $("headline").textContent = leadOf(v);
  // The preview in the attributes is of the first text; for other texts, join the tokens.
  const question = v.turns.length > 0 && openingWords(v, 60);
  const preview = question || ((state.text === 0 && attrs.text_preview) || v.keys.slice(0, 60).join("")).trim().replace(/\s+/g, " ");
  const quoted = (text, more) => `“${more || text.length > 220 ? `${text.slice(0, 220).replace(/ \S*$/, "")} …` : text}”`;
  const read = v.queries?.slice(0, 60).join("").trim().replace(/\s+/g, " ");
  $("preview").textContent = [quoted(preview, !question && v.n_keys > 60), read && quoted(read, v.n_queries > 60)].filter(Boolean).join(" → "); // keys → queries: source → target
  $("heads").hidden = $("specialised").hidden = g.types.type.length === 1; // of one head, the card has all
  const facts = [
    [v.n_queries === v.n_keys ? "tokens" : "queries × keys", v.n_queries === v.n_keys ? integer(v.n_keys) : `${integer(v.n_queries)} × ${integer(v.n_keys)}`],
    ["layers × heads", `${g.layers.length} × ${g.heads.length}`],
    ...Object.entries(factsOf(PAGE, g, v)),
    ["peak memory", attrs.peak_memory_bytes && `${short(attrs.peak_memory_bytes)}B`],
    ["date", attrs.created && attrs.created.slice(0, 10)],
  ];
  $("facts").replaceChildren(...facts.filter(([, fact]) => fact).map(([name, fact]) => h("div", {}, h("dt", {}, name), h("dd", {}, fact))));
  $("foot").replaceChildren(
    ...[
      attrs.command && h("p", {}, h("code", {}, attrs.command)),
      h("p", {}, [...Object.entries(attrs.versions || {}).map(([name, version]) => `${name} ${version}`), attrs.native_library].filter(Boolean).join(" · ")),
      attrs.unobserved && attrs.unobserved.length ? h("p", {}, `Not observed: ${attrs.unobserved.map(String).join(", ")}.`) : "",
    ].filter(Boolean),
  );
}

function switches() {
  const change = (changes) => { Object.assign(state, changes); everything(); };
  const parts = textChoosers(PAGE.groups, state.group, state.text,
    (to) => change({ group: to, text: Math.min(state.text, PAGE.groups[to].texts.length - 1), ...firstHead(PAGE.groups[to]) }), (text) => change({ text }));
  $("switches").hidden = !parts.length;
  replace($("switches"), ...parts);
}

function tiles() {
  const { layers, heads } = group();
  $("tiles").replaceChildren(...findingTiles(view().findings, {
    open: async (layer, head) => {
      await select(layers.indexOf(layer), heads.indexOf(head));
      $("one").scrollIntoView({ block: "start" });
    },
    show: ({ heads: chosen, statistic }) => {
      if (chosen.length && storedMaps()) mapsSection.set({ chosen, sort: "layer" });
      else if (statistic in view().heads) { state.statistic = statistic; overview(); }
      $(chosen.length ? "maps" : "heads").scrollIntoView({ block: "start" });
    },
  }));
}

// ---- every head -----------------------------------------------------------------------------------------

function overview() {
  const available = [...statisticsOf(view()), KIND], { layer, head } = state;
  if (!available.includes(state.statistic)) state.statistic = available[0];
  const choose = (statistic) => { state.statistic = statistic; overview(); };
  const { controls, grid, layers } = allHeads({ page: PAGE, group: group(), view: view(), statistic: state.statistic, layer, head, choose, select });
  replace($("overview-controls"), ...controls);
  replace($("grid-box"), ...grid);
  replace($("by-layer"), ...layers);
}

function select(layer, head) {
  Object.assign(state, { layer, head });
  markHead($("grid-box").querySelector(".grid"), layer, head);
  return selected();
}

/** The selection as the end of the address: "L17H4", with the kind of attention and the text if there are several. */
function addressOfHead() {
  const { layers, heads, name, texts } = group(), parts = [PAGE.groups.length > 1 && name, texts.length > 1 && `text${state.text + 1}`];
  return [...parts.filter(Boolean), `L${layers[state.layer]}H${heads[state.head]}`].join("-");
}

/** Select what the address names, if it exists; returns whether it does. */
function readAddress() {
  const found = /^#(?:([a-z]+)-)?(?:text(\d+)-)?L(\d+)H(\d+)$/.exec(location.hash);
  if (!found) return false;
  const [, name, text = 1, ...ids] = found, g = name ? PAGE.groups.findIndex((one) => one.name === name) : PAGE.main, one = PAGE.groups[g];
  const at = { group: g, text: text - 1, layer: one?.layers.indexOf(+ids[0]), head: one?.heads.indexOf(+ids[1]) };
  if (!one?.texts[at.text] || at.layer < 0 || at.head < 0) return false;
  Object.assign(state, at);
  return true;
}

let selections = 0; // counts selections, so that a slow one cannot replace a later one

/** Show the selected head in all parts of the page. */
async function selected() {
  const selection = ++selections, { layer, head } = state, shown = await data.head(state.group, state.text, layer, head);
  if (selection !== selections) return;
  history.replaceState(null, "", `#${addressOfHead()}`);
  const step = (by) => { const to = stepped(shown.group, layer, head, by); select(to.layer, to.head); };
  replace($("card"), headCard({ ...shown, step }));
  $("detail").firstChild.textContent = `${headTitle(shown.group, layer, head)} along the text`;
  alongText.show(shown);
  $("maps").hidden = $("big-map").hidden = !shown.maps;
  await Promise.all([shown.maps && mapsSection.show(shown), textReading.show(shown)]);
}

const mapsSection = new MapsSection({ onselect: (layer, head) => select(layer, head), ontrouble: (error) => trouble(error) });
const textReading = new Reading();
const alongText = new HeadCurves("curves");
$("detail").append(h("h3"), alongText.element);
$("maps").append(mapsSection.wall.box, mapsSection.wall.controls);
$("big-map").append(mapsSection.mapBox);
$("reading").append(textReading.element);
$("text").append(textReading.pane);

/** Show a token in the text. */
async function reveal(text, position) {
  if (text !== state.text) { state.text = text; await everything(); }
  textReading.reveal(position);
  $("text").scrollIntoView({ block: "center" });
}

function sinks() {
  const parts = sinkFigures(PAGE, state.group, { select: (layer, head) => { select(layer, head); $("one").scrollIntoView({ block: "start" }); }, reveal });
  $("sinks").hidden = !parts.length;
  $("sink-figures").replaceChildren(...parts);
}

// ---- tables ---------------------------------------------------------------------------------------------

function headTable() {
  const { heads: columns } = view(), g = group(), shown = 12;
  const names = ["type", "target_share", ...statisticsOf(view()).filter((name) => looks.statistics[name].table)];
  const order = columns.entropy.map((_, index) => index);
  if (state.sort === "type") order.splice(0, order.length, ...bestOfTypes(g));
  else if (state.sort === "head") { if (state.descending) order.reverse(); }
  else order.splice(0, order.length, ...largestFirst(order, columns[state.sort].map((x) => (x === null || state.descending ? x : -x)))); // heads without this value come last
  const heading = (name, label) => h("th", { scope: "col", "aria-sort": state.sort === name ? (state.descending ? "descending" : "ascending") : "none" },
    h("button", { type: "button", "data-key": `sort-${name}`, onclick: () => {
      state.descending = state.sort === name ? !state.descending : name !== "head";
      state.sort = name;
      headTable();
    } }, label));
  const label = (name) => (name === "type" ? "Type" : name === "target_share" ? "Attends to" : labelOf(g, name));
  const rows = (state.all ? order : order.slice(0, shown)).map((index) => {
    const l = Math.floor(index / g.heads.length), k = index % g.heads.length;
    return h("tr", {}, h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => { select(l, k); $("one").scrollIntoView({ block: "start" }); } }, headName(g, l, k))),
      names.map((name) => (name === "type" ? h("td", { class: "words" }, g.types.type[index]) : name === "target_share" ? h("td", { class: "words" }, columns.goes_to[index]) : h("td", {}, written(columns[name][index], looks.statistics[name].unit)))));
  });
  replace(
    $("head-table"),
    h("p", { class: "meaning" }, "First the two clearest heads of each type. Select a column to sort by it."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of heads" }, h("table", {},
      h("thead", {}, h("tr", {}, heading("head", "Head"), names.map((name) => heading(name, label(name))))),
      h("tbody", {}, rows))),
    order.length > shown ? h("button", { type: "button", class: "quiet more", "data-key": "more", onclick: () => { state.all = !state.all; headTable(); } }, state.all ? "Show fewer" : `Show all ${integer(order.length)} heads`) : "",
  );
}

/** All rows, first the two with the largest scores of each type; the types in the order of the key. */
function bestOfTypes({ types }) {
  const rows = types.type.map((_, row) => row), best = PAGE.roles.filter(({ name }) => types[name]).flatMap(({ name }) => largestFirst(rows.filter((row) => types.type[row] === name), types[name]).slice(0, 2));
  return [...best, ...rows.filter((row) => !best.includes(row))];
}

function tokenTable() {
  const { tokens } = view(), most = tokens.share[0] || 1;
  $("token-table").replaceChildren(
    h("h3", {}, "Most attended tokens"),
    h("p", { class: "meaning" }, "All occurrences together: share of all attention, mean over heads."),
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Table of tokens" }, h("table", { class: "token-table" },
      h("thead", {}, h("tr", {}, ["Token", "Share", "Times", "Lift"].map((name) => h("th", { scope: "col", "data-tip": name === "Lift" ? "share of the attention / share of the text" : null }, name)))),
      h("tbody", {}, tokens.token.slice(0, 12).map((token, index) => h("tr", {},
        h("th", { scope: "row" }, h("button", { type: "button", class: "link", "data-tip": "show it in the text", onclick: () => reveal(state.text, tokens.position[index]) }, h("code", {}, named(token)))),
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
        !v.has_weights ? `There is one exception to exactness: for queries with a special token 2 to ${g.window} places away, the rest of the neighbourhood counts as elsewhere.` : ""),
      h("p", {}, `Curves are stored in 16 bits (steps of 1/65,533 of their range)${binned ? `; for this length they are means: ${integer(v.bins.curve)} along the queries, ${integer(v.bins.received)} along the keys of each head` : ""}. `,
        storedMaps() ? "The small maps show the largest weight of each bin. " : "", storedMaps()?.precision)),
  );
}

// ---- start -----------------------------------------------------------------------------------------------

function everything() {
  header(); switches(); tiles(); overview(); sinks(); headTable(); tokenTable(); about();
  return selected();
}

/** Buttons that save the figures of a section as they look. */
function saves(section, title, ...parts) {
  const save = (kind) => async () => {
    const drawing = pictureOf({ title: `${PAGE.attrs.model || "Attention profile"} · ${title}`, elements: parts.map((part) => part()).filter((part) => part.getClientRects().length) });
    download(`${title.replace(/\W+/g, "-")}.${kind}`, kind === "svg" ? new Blob([drawing], { type: "image/svg+xml" }) : await pngOf(drawing));
  };
  $(section).append(h("p", { class: "saves" }, `Save ${title} as `, ["svg", "png"].map((kind) => h("button", { type: "button", class: "link", "data-kind": kind, onclick: save(kind) }, kind.toUpperCase()))));
}

function trouble(error) {
  const text = typeof DecompressionStream === "undefined"
    ? "This browser cannot unpack the report's data (it lacks DecompressionStream). Please open it in a browser of 2023 or later."
    : `This report could not be shown: ${error && error.message ? error.message : error}`;
  $("trouble").textContent = text;
  $("trouble").hidden = false;
  begin()();
}

announceState(document.documentElement, () => !$("trouble").hidden);
onUncaught(trouble);
try {
  if (!readAddress()) Object.assign(state, firstHead(group()));
  addEventListener("hashchange", () => { if (readAddress()) counted(everything()).catch(trouble); });
  saves("maps", "the maps of all heads", () => mapsSection.wall.box, () => mapsSection.wall.controls);
  saves("one", "this head", () => $("big-map"), () => $("card"), () => $("detail"));
  saves("heads", "every head", () => $("grid-box"), () => $("by-layer"));
  saves("sinks", "these figures", () => $("sink-figures"));
  saves("read", "the text", () => $("reading"), () => $("text"));
  themeButton($("theme"), () => { everything(); mapsSection.recolour(); });
  tooltips(document, $("tip"));
  counted(everything()).catch(trouble);
} catch (error) {
  trouble(error);
}
