// The page: its state, and one function per part of it.

const state = { group: PAGE.main, text: 0, statistic: "sink", layer: 0, head: 0, source: "all", from: 0, query: null, sort: "target_share", descending: true, all: false };
const WINDOW = 600; // tokens of a long text that are set at a time
const cache = new Map(); // decoded arrays and maps, by element id
const $ = (id) => document.getElementById(id);
const group = () => PAGE.groups[state.group];
const view = () => group().texts[state.text];
const place = () => `${state.group}-${state.text}`;
const row = (layer = state.layer, head = state.head) => layer * group().heads.length + head;
const headName = (layer = state.layer, head = state.head) => `L${group().layers[layer]} · H${group().heads[head]}`;
const value = (statistic, layer, head) => view().heads[statistic][row(layer, head)];
const tokensOf = (side) => (side === "query" && view().queries) || view().keys;
const statistics = () => Object.keys(PAGE.statistics).filter((name) => view().heads[name].some((x) => x !== null));

async function arrays() {
  const id = `curves-${place()}`;
  if (!cache.has(id)) cache.set(id, await arraysOf(view(), id));
  return cache.get(id);
}

async function map() {
  if (view().maps !== "kept") return null;
  const id = `maps-${place()}`, key = `${id}-${row()}`;
  if (!cache.has(id)) cache.set(id, JSON.parse($(id).textContent));
  if (!cache.has(key)) cache.set(key, await inflated(cache.get(id)[row()]));
  return cache.get(key);
}

/** Replace what an element holds; whoever had the keyboard focus in it keeps it, by its `data-key`. */
function replace(container, ...children) {
  const active = container.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  container.replaceChildren(...children.filter(Boolean));
  const heir = active && container.querySelector(`[data-key="${CSS.escape(active)}"]`);
  if (heir) heir.focus({ preventScroll: true });
}

// ---- header ---------------------------------------------------------------------------------------------

function header() {
  const { attrs } = PAGE, v = view(), g = group();
  $("model").textContent = attrs.model || "Attention profile";
  $("headline").textContent = v.headline.replaceAll(" %", "\u00a0%");
  // The preview in the attributes is of the first text; any other is read back from its tokens.
  const preview = ((state.text === 0 && attrs.text_preview) || v.keys.slice(0, 60).join("")).trim().replace(/\s+/g, " ");
  const cut = v.n_keys > 60 || preview.length > 220; // a preview cut inside a word loses the rest of the word
  
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

function short(number) {
  const scales = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [scale, mark] = scales.find(([size]) => number >= size) || [1, ""];
  return `${(number / scale).toPrecision(3)} ${mark}`;
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

/** A row of radio buttons that look like one control. */
function choice(label, options, chosen, onchange) {
  const name = `choice-${label}`;
  return h("fieldset", { class: "choice" }, h("legend", {}, label),
    options.map(([id, text]) => h("label", {},
      h("input", { type: "radio", name, value: id, "data-key": `${name}-${id}`, checked: String(id) === String(chosen), onchange: (event) => onchange(event.target.value) }), h("span", {}, text))));
}

function tiles() {
  $("tiles").replaceChildren(...view().findings.map(({ value: figure, label, detail }) =>
    h("li", {}, h("strong", {}, figure), h("span", {}, label), h("small", {}, detail.replaceAll(" %", "\u00a0%").replaceAll(" × ", "\u00a0×\u00a0")))));
}

// ---- every head -----------------------------------------------------------------------------------------

function scaleOf(statistic) {
  const values = view().heads[statistic].filter((x) => x !== null);
  const { unit } = PAGE.statistics[statistic];
  return unit === "ratio" ? 1 : Math.max(...values, unit === "%" ? 0.1 : 1e-9); // next to nothing should look like it
}

function overview() {
  const available = statistics();
  if (!available.includes(state.statistic)) state.statistic = available[0];
  const { meaning, unit } = PAGE.statistics[state.statistic];
  const top = scaleOf(state.statistic);
  replace(
    $("overview-controls"),
    h("label", {}, "Colour by ", h("select", { id: "statistic", "data-key": "statistic", onchange: (event) => { state.statistic = event.target.value; overview(); } },
      available.map((name) => h("option", { value: name, selected: name === state.statistic }, PAGE.statistics[name].label)))),
    legend({ low: "0", high: written(top, unit) }),
    h("p", { class: "meaning" }, meaning.replace("the local window", `±${group().window} tokens`)),
  );
  const { layers, heads } = group();
  const grid = h("div", { class: "grid", role: "grid", "aria-label": `${PAGE.statistics[state.statistic].label} of every head; arrow keys move`, onkeydown: gridKeys,
    style: { "grid-template-columns": `auto repeat(${heads.length}, minmax(${heads.length > 16 ? 15 : 24}px, 1fr))` } });
  if (heads.length > 16) grid.classList.add("tight");
  grid.append(h("div", { role: "row", class: "row" }, h("span", { class: "corner" }), heads.map((head, index) => h("span", { role: "columnheader", class: "column" }, heads.length > 16 && index % 4 ? "" : String(head)))));
  layers.forEach((layer, l) => {
    grid.append(h("div", { role: "row", class: "row" }, h("span", { role: "rowheader", class: "rowhead" }, String(layer)),
      heads.map((head, k) => {
        const x = value(state.statistic, l, k), colour = ramp(x === null ? 0 : x / top), here = l === state.layer && k === state.head;
        return h("button", {
          type: "button", role: "gridcell", "data-layer": l, "data-head": k, tabindex: here ? 0 : -1, "aria-selected": here ? "true" : "false",
          "aria-label": `Layer ${layer}, head ${head}: ${written(x, unit)}; ${value("goes_to", l, k)}`,
          "data-tip": `Layer ${layer} · head ${head}\n${PAGE.statistics[state.statistic].label} ${written(x, unit)}\n${value("goes_to", l, k)}`,
          style: { background: css(colour), color: inkOn(colour) },
          onclick: () => select(l, k),
        }, x === null ? "–" : h("span", {}, cellText(x, unit)));
      })));
  });
  $("grid-box").replaceChildren(h("span", { class: "axis" }, "head →"), grid);
  byLayer();
}

function cellText(x, unit) {
  if (unit === "%") return (100 * x).toFixed(0);
  if (unit === "ratio") return x.toFixed(2).replace(/^0/, "");
  return x >= 9.95 ? (x >= 9999 ? `${(x / 1000).toFixed(0)}k` : x.toFixed(0)) : x.toFixed(1);
}

function gridKeys(event) {
  const { layers, heads } = group();
  const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -heads.length], End: [0, heads.length] }[event.key];
  if (!move) return;
  event.preventDefault();
  const clamp = (x, length) => Math.min(Math.max(x, 0), length - 1);
  select(clamp(state.layer + move[0], layers.length), clamp(state.head + move[1], heads.length));
  document.querySelector('.grid [tabindex="0"]').focus();
}

function select(layer, head) {
  Object.assign(state, { layer, head, query: null });
  for (const cell of document.querySelectorAll(".grid button")) {
    const here = +cell.dataset.layer === layer && +cell.dataset.head === head;
    cell.tabIndex = here ? 0 : -1;
    cell.setAttribute("aria-selected", here);
  }
  return Promise.all([card(), reading()]);
}

function byLayer() {
  const { layers, heads } = group();
  const { shares } = view();
  const means = layers.map((_, l) => Object.fromEntries(PAGE.destinations.map(({ name }) => [name, heads.reduce((sum, _, k) => sum + shares[name][row(l, k)], 0) / heads.length])));
  const used = PAGE.destinations.filter(({ name }) => means.some((mean) => mean[name] > 0.0005));
  $("by-layer").replaceChildren(
    h("h3", {}, "Where the weight goes, by layer"),
    h("div", { class: layers.length > 16 ? "layers tight" : "layers" }, layers.map((layer, l) => [h("span", { class: "rowhead" }, layers.length > 16 && l % 4 ? "" : String(layer)), stack(means[l], { window: group().window, label: `Layer ${layer}` })])),
    keyOf(used.map((part) => [part.name === "nearby" ? `nearby (±${group().window})` : part.label, destinationColour(part)])),
  );
}

async function card() {
  const v = view(), g = group(), at = row(), wanted = `${place()}/${at}`;
  card.wanted = wanted;
  const [curves, bytes] = await Promise.all([arrays(), map()]);
  if (card.wanted !== wanted) return; // another head was chosen meanwhile
  const number = (name) => v.heads[name][at];
  const numbers = ["entropy", "entropy_ratio", "participation", "sink", "sink_share", "self", "previous", "next", "local", "distance", "spread", "top_key_share"].filter((name) => number(name) !== null);
  const step = (by) => {
    const total = g.layers.length * g.heads.length, next = (at + by + total) % total;
    select(Math.floor(next / g.heads.length), next % g.heads.length);
  };
  const shares = Object.fromEntries(PAGE.destinations.map(({ name }) => [name, v.shares[name][at]]));
  replace(
    $("card"),
    h("header", {},
      h("div", {}, h("h3", {}, `Layer ${g.layers[state.layer]} · head ${g.heads[state.head]}`), h("p", { class: "module" }, g.modules[state.layer])),
      h("div", { class: "steps" },
        h("button", { type: "button", "data-key": "back", class: "quiet", "aria-label": "Previous head", onclick: () => step(-1) }, "←"),
        h("button", { type: "button", "data-key": "on", class: "quiet", "aria-label": "Next head", onclick: () => step(1) }, "→"))),
    h("p", { class: "goes" }, number("goes_to")),
    stack(shares, { window: g.window, legend: true, label: "Where the weight goes" }),
    h("dl", { class: "numbers" }, numbers.map((name) => {
      const { label, unit, meaning } = PAGE.statistics[name];
      return h("div", { "data-tip": meaning }, h("dt", {}, name === "local" ? `Local ±${g.window}` : label), h("dd", {}, written(number(name), unit)));
    }), h("div", { "data-tip": "the key that receives most" }, h("dt", {}, "Most attended"), h("dd", {}, `${named(v.keys[number("top_key")])} @ ${integer(number("top_key"))}`))),
  );
  detail(curves, bytes);
}

/** What a head does along the text: its dense map where there is one, and its curves. */
function detail(curves, bytes) {
  const v = view(), g = group(), at = row(), queries = tokensOf("query");
  const box = h("div", { class: "curves" });
  $("detail").classList.toggle("mapped", Boolean(bytes));
  replace(
    $("detail"),
    bytes ? denseMap({ bytes, queries, keys: v.keys, label: `Attention map of layer ${g.layers[state.layer]}, head ${g.heads[state.head]}` }) : null,
    box,
    bytes ? null : mapNote(v),
  );
  const columns = getComputedStyle(box).gridTemplateColumns.split(" ");
  const width = Math.max(Math.floor(parseFloat(columns[0])), 240);
  const slice = (name) => { const { values, shape } = curves[name]; return values.subarray(at * shape[2], (at + 1) * shape[2]); };
  const received = binPeaks(slice("received"), Math.floor(width / 1.5));
  const peaks = received.length < v.n_keys ? ", largest in each column" : "";
  const parts = [curve({ title: `Received by each key${peaks}`, values: received, n: v.n_keys, width, unit: "%", tokens: v.keys, log: true, bars: true })];
  const entropy = slice("entropy");
  const uniform = curves.uniform.values.subarray(state.layer * entropy.length, (state.layer + 1) * entropy.length);
  parts.push(curve({ title: "Entropy of each query, nats", values: entropy, n: v.n_queries, width, unit: "nats", tokens: queries,
    reference: { label: "uniform attention", values: uniform } }));
  if (curves.distance) parts.push(curve({ title: "Mean distance to what it attends to, tokens", values: slice("distance"), n: v.n_queries, width, unit: "tokens", tokens: queries }));
  parts.push(curve({ title: "Weight on the first token", values: slice("sink"), n: v.n_queries, width, unit: "%", tokens: queries }));
  box.replaceChildren(...parts);
}

function mapNote(v) {
  return h("p", { class: "note" }, v.maps === "none"
    ? "No dense map: this text is longer than map_tokens, up to which the profiler keeps them. Every other number is exact all the same."
    : "The dense maps of this text are in the profile but too large for this page: use profile.plot.map(layer, head).");
}

// ---- the text -------------------------------------------------------------------------------------------

/** Received share of every token for the chosen source, and what to call it. */
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
  const asks = state.query !== null;
  const values = asks ? Float32Array.from(bytes.subarray(state.query * n, (state.query + 1) * n), (byte) => byte / 255) : shading(curves);
  const positive = Array.from(values).filter((x) => x > 0).sort((a, b) => a - b);
  const high = positive.at(-1) || 1, low = Math.min(positive[Math.floor(positive.length * 0.1)] || high / 8, high / 8);
  const level = (x) => (x <= 0 ? 0 : Math.log(Math.max(x, low) / low) / Math.log(high / low));
  const to = Math.min(state.from + WINDOW, n);
  const words = [];
  for (let i = state.from; i < to; i++) {
    const token = v.keys[i], colour = ramp(level(values[i])), lead = token.match(/^\s*/)[0], body = token.slice(lead.length);
    if (lead) words.push(lead.includes("\n") ? h("br") : " ");
    words.push(h("span", { class: i === state.query && !v.queries ? "token asked" : "token", "data-at": i, style: { background: css(colour), color: inkOn(colour) } }, body || (token.includes("\n") ? "⏎" : "␣")));
  }
  const readout = h("output", { class: "readout" }, asks ? askedLine(queries) : hint(v, bytes));
  const text = h("div", { class: "text", lang: "und",
    onpointerover: (event) => {
      const at = event.target.dataset && event.target.dataset.at;
      if (at === undefined) return;
      const share = values[+at];
      readout.textContent = asks ? `${named(queries[state.query])} gives “${named(v.keys[at])}” (position ${integer(+at)}) ${percent(share)} of its weight`
        : `“${named(v.keys[at])}” at position ${integer(+at)} receives ${percent(share)} of the attention, ${(share * n).toPrecision(2)} × an equal share`;
    },
    onpointerleave: () => { readout.textContent = asks ? askedLine(queries) : hint(v, bytes); },
    onclick: (event) => {
      const at = event.target.dataset && event.target.dataset.at;
      if (at === undefined || !bytes || v.queries) return;
      state.query = state.query === +at ? null : +at;
      reading();
    } }, words);
  const sources = [["all", "All heads"], ["layer", `Layer ${g.layers[state.layer]}`], ["head", headName()]];
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

const askedLine = (queries) => `Shaded: where “${named(queries[state.query])}” (position ${integer(state.query)}) of ${headName()} looks. Select it again to go back.`;

function hint(v, bytes) {
  if (bytes && !v.queries) return "Select a token to see where this head looks from it.";
  if (state.source === "head" && v.bins.received < v.n_keys) return `Stored as ${integer(v.bins.received)} means of ${(v.n_keys / v.bins.received).toFixed(1)} tokens for single heads.`;
  return "Point at a token for its share.";
}

/** For attention between two texts: choose the query whose weights shade the keys. */
function queryChooser(queries) {
  return h("label", { class: "asker" }, "Seen from ", h("select", { "data-key": "asker", onchange: (event) => { state.query = event.target.value === "" ? null : +event.target.value; reading(); } },
    h("option", { value: "" }, "all queries"),
    queries.map((token, index) => h("option", { value: index, selected: index === state.query }, `${index} ${named(token)}`))));
}

/** Received attention of each layer along the whole text; a click moves the window. */
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
    h("figcaption", {}, h("span", {}, "The whole text, layer by layer"), h("small", {}, `rows: layer ${layers[0]} (top) to ${layers.at(-1)} · columns: positions 0 to ${integer(n - 1)}${n > 900 ? ", the largest share in each" : ""}${n > WINDOW ? " · select a place to read it" : ""}`)),
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
  const names = ["target_share", "entropy_ratio", "sink", "previous", "self", "next", "local", "distance", "participation"].filter((name) => columns[name].some((x) => x !== null));
  const order = columns.entropy.map((_, index) => index);
  if (state.sort === "head") { if (state.descending) order.reverse(); }
  else order.sort((a, b) => {
    const [x, y] = [columns[state.sort][a], columns[state.sort][b]];
    if (x === null || y === null) return (x === null) - (y === null) || a - b; // heads without the value come last
    return (state.descending ? y - x : x - y) || a - b;
  });
  const heading = (name, label) => h("th", { scope: "col", "aria-sort": state.sort === name ? (state.descending ? "descending" : "ascending") : "none" },
    h("button", { type: "button", "data-key": `sort-${name}`, onclick: () => {
      state.descending = state.sort === name ? !state.descending : name !== "head";
      state.sort = name;
      headTable();
    } }, label));
  const label = (name) => (name === "target_share" ? "Goes to" : name === "local" ? `Local ±${g.window}` : PAGE.statistics[name].label);
  const rows = (state.all ? order : order.slice(0, shown)).map((index) => {
    const l = Math.floor(index / g.heads.length), k = index % g.heads.length;
    return h("tr", {}, h("th", { scope: "row" }, h("button", { type: "button", class: "link", onclick: () => { select(l, k); $("heads").scrollIntoView({ block: "start" }); } }, headName(l, k))),
      names.map((name) => (name === "target_share" ? h("td", { class: "words" }, columns.goes_to[index]) : h("td", {}, written(columns[name][index], PAGE.statistics[name].unit)))));
  });
  replace(
    $("head-table"),
    h("p", { class: "meaning" }, "By the share of their weight that goes to one target. Select a column to sort by it."),
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
    h("p", { class: "meaning" }, "All occurrences together; share of all attention, mean over heads."),
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
    h("dl", {}, statistics().map((name) => [h("dt", {}, PAGE.statistics[name].label), h("dd", {}, PAGE.statistics[name].meaning.replace("the local window", `±${g.window} tokens`))])),
    h("div", {},
      h("p", {}, "Every number of a head is a mean over the queries of the text, computed exactly from all of its attention weights; nothing is sampled. ",
        g.causal ? "In causal attention, first token and previous token leave out the first query, which sees nothing but itself. " : "",
        "Weights add up to one for each query, so a share of all attention is a mean over queries."),
      h("p", {}, `Where the weight goes counts each key once, under the first name that fits: first token, other special tokens, self, previous, next, nearby (within ${g.window} tokens), elsewhere. `,
        v.maps === "none" ? `Only one border is not exact: for queries with a special token 2 to ${g.window} places away, the rest of the neighbourhood counts as elsewhere.` : ""),
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
  header(); switches(); tiles(); overview(); headTable(); tokenTable(); about();
  return Promise.all([card(), reading()]);
}

/** Curves are drawn to the pixel: draw them again when their place has another width. */
function redrawnToFit() {
  let width = $("detail").clientWidth, later;
  new ResizeObserver(() => {
    if ($("detail").clientWidth === width) return;
    width = $("detail").clientWidth;
    clearTimeout(later);
    later = setTimeout(card, 100);
  }).observe($("detail"));
}

/** The head to open with: the one with the clearest target. */
function telling() {
  const shares = view().heads.target_share;
  const best = shares.reduce((most, share, index) => ((share ?? -1) > (shares[most] ?? -1) ? index : most), 0);
  Object.assign(state, { layer: Math.floor(best / group().heads.length), head: best % group().heads.length });
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
  telling(); theme(); tooltips();
  everything().then(() => { redrawnToFit(); document.documentElement.dataset.ready = "1"; }, trouble);
} catch (error) {
  trouble(error);
}
