// Figures about attention sinks, for the report and the viewer: heads as dots by layer, the residual stream by depth, and
// a table of the tokens that are sinks.

import { Drawn, keyOf, REFERENCE, TICK, verticalAxis } from "./charts.js";
import { h, svg } from "./dom.js";
import { joined } from "./findings.js";
import { rowOf } from "./data.js";
import { headTitle } from "./heads.js";
import { truncated, integer, named, percent, written } from "./numbers.js";

const SINK_THRESHOLD = 0.3; // a head has a sink if the mean weight on it is larger (sink score of Gu et al. 2025)
const KINDS_OF_TEXT = [["alpha_first", "this text"], ["alpha_random", "random tokens"], ["alpha_repeated", "one token repeated"]];
const PREFIX = 64, MANY_DOTS = 100, BIN = 0.05; // queries of the sink score; more dots of a column become bars, each of this range of weights
const BEFORE_COLOUR = "var(--accent)", AFTER_COLOUR = "var(--second)";

/** Whether two groups have the same numbers of layers and heads. */
export const sameSize = (a, b) => a.layers.length === b.layers.length && a.heads.length === b.heads.length;

/**
 * Figures about the sinks of `page.groups[g]`, as elements. `after`: {group, name} of the same size to overlay; `name`
 * then labels the page. `chosen`: the selected head {layer, head}, which is marked. `select(layer, head)` is called for
 * clicks and Enter, `reveal(text, position)` for clicks on a token.
 */
export function sinkFigures(page, g, { name = "", after = null, chosen = null, select = null, reveal = null } = {}) {
  const group = page.groups[g], more = { group, names: [name, after?.name], chosen, select };
  const both = (read) => [read(group), after && read(after.group)];
  const scores = (column) => both((one) => one.sinks?.[column] ?? null);
  const charts = [
    byLayerChart({ ...more, title: "Weight on the first token", note: "mean share of the row, later queries · dashed: 30 %", values: both((one) => one.sink), unit: "%", reference: SINK_THRESHOLD }),
    group.texts.some((text) => text.n_queries > PREFIX) && byLayerChart({ ...more, title: "Weight on the first token, first 64 queries", note: "mean share of the row · dashed: 30 %", values: scores("alpha_first"), unit: "%", reference: SINK_THRESHOLD }),
    valueChart(more, after),
    byLayerChart({ ...more, title: "Contribution of the first token", note: "norm of weight × value, share of the sum over keys", values: scores("contribution_first"), unit: "%" }),
    byLayerChart({ ...more, title: "Norm of the first token’s key", note: "relative to the mean of the other tokens · logarithmic", values: scores("key_norm_first"), unit: "×", reference: 1, log: true, once: true }),
    byLayerChart({ ...more, title: "Weight on no token", note: "on the learned sink, or on the term 1 of “off by one”", values: scores("learned_sink"), unit: "%" }),
    kindsChart(more, after),
    depthChart(more, after),
  ].filter(Boolean);
  const tables = [[group, name], after && [after.group, after.name]].filter(Boolean)
    .map(([one, of], s) => sinkTokenTable(one, after ? of : "", page.groups[g].texts.length > 1, s ? null : reveal)).filter(Boolean);
  return [
    h("div", { class: "sink-lead", style: { "max-width": "76em", "margin-bottom": "4px" } },
      h("p", {}, after ? h("b", {}, `${name}: `) : null, joined(group.sink_sentence)), after ? h("p", {}, h("b", {}, `${after.name}: `), joined(after.group.sink_sentence)) : null),
    h("p", { class: "meaning" }, group.types.type.length > 1 ? "Each dot is a head; the line is the mean of each layer’s heads." : null, chosen ? " Ringed: the selected head." : null),
    after ? keyOf([[name, BEFORE_COLOUR], [after.name, AFTER_COLOUR]]) : null,
    h("div", { class: "sink-figures", style: { display: "grid", "grid-template-columns": "repeat(auto-fill, minmax(min(100%, 340px), 1fr))", gap: "26px 40px", "margin-top": "18px", "align-items": "start" } },
      charts, tables),
  ].filter(Boolean);
}

const titleOf = (group, at) => headTitle(group, Math.floor(at / group.heads.length), at % group.heads.length);
const times = (x) => `${written(x, "ratio")} ×`;
const formatted = (x, unit) => (x === null ? "–" : unit === "%" ? percent(x) : unit === "×" ? times(x) : written(x, "ratio"));

/** A dot per head, by layer. `values`: [before, after], each null or an array indexed by layer × heads + head. */
function byLayerChart({ group, names, values, once = false, ...rest }) {
  const place = rest.chosen ? rowOf(group, rest.chosen.layer, rest.chosen.head) : -1;
  // Heads of one key group have one key: `once` draws it once, for the chosen head if it is among them.
  const own = (dot, k, column) => dot.value !== null && !(once && column.some(({ at, value }, j) => value === dot.value && j !== k && (at === place || (j < k && dot.at !== place))));
  const series = values.map((column, s) => column && {
    name: names[s], paired: true, colour: s ? AFTER_COLOUR : BEFORE_COLOUR,
    columns: group.layers.map((_, l) => group.heads.map((_, k) => ({ at: rowOf(group, l, k), value: column[rowOf(group, l, k)] })).filter(own)),
  }).filter((one) => one && one.columns.some((column) => column.length));
  if (!series.length) return null;
  if (group.types.type.length === 1) return h("p", {}, `${rest.title}: `, h("b", {}, series.map(({ columns }) => formatted(columns[0][0].value, rest.unit)).join(" → ")), h("small", {}, ` · ${rest.note.replace(/ · (dashed|logarithmic).*/, "")}`)); // one dot is no chart
  return dotChart({ group, series, columns: group.layers.map(String), axis: "layer", nameOf: (at) => titleOf(group, at), ...rest });
}

/** The norm of the first token's value against the weight on it: values of sinks are short. */
function valueChart({ group, names, ...more }, after) {
  const columns = (one, chosen) => [(one.sinks?.value_norm_first ?? []).map((value, at) => ({ at, value, across: one.sinks.alpha_first?.[at] ?? null })).filter(({ value, across }) => value !== null && across !== null && chosen(across))];
  const series = (after ? [[names[0], BEFORE_COLOUR, group, () => true], [names[1], AFTER_COLOUR, after.group, () => true]]
    : [["others", BEFORE_COLOUR, group, (across) => across <= SINK_THRESHOLD], ["sinks", "var(--first)", group, (across) => across > SINK_THRESHOLD]])
    .map(([name, colour, one, chosen]) => ({ name, colour, paired: Boolean(after), columns: columns(one, chosen) }));
  if (series.every((one) => !one.columns[0].length) || group.types.type.length === 1) return null;
  return dotChart({ group, series, ...more, log: true, unit: "×", reference: 1, title: "The value that a sink adds", note: `its norm / mean of the others${after ? "" : " · orange: heads with a sink"}`,
    axis: "weight on the first token", across: true, columns: [0, 0.25, 0.5, 0.75, 1].map(percent), nameOf: (at, _, one) => `${titleOf(group, at)} · ${percent(one.columns[0].find((dot) => dot.at === at).across)}` });
}

/** Sink scores of the first token on different kinds of text. */
function kindsChart({ group, names, chosen, select }, after) {
  const kinds = KINDS_OF_TEXT.filter(([column]) => group.sinks?.[column]);
  if (kinds.length < 2) return null;
  const series = [group, after?.group].filter((one) => one?.sinks).map((one, s) => ({
    name: names[s], paired: true, colour: s ? AFTER_COLOUR : BEFORE_COLOUR,
    columns: kinds.map(([column]) => (one.sinks[column] ?? []).map((value, at) => ({ at, value })).filter(({ value }) => value !== null)),
  }));
  const count = (column) => series.map((one) => one.columns[column].filter(({ value }) => value > SINK_THRESHOLD).length).join(" → ");
  return dotChart({
    group, series, chosen, select, unit: "%", reference: SINK_THRESHOLD, title: "First token, on three kinds of text", note: `${group.types.type.length > MANY_DOTS ? "bars: heads, " : ""}first 64 queries · below: heads above ${percent(SINK_THRESHOLD)}`,
    columns: kinds.map(([, kind]) => kind), below: kinds.map((_, column) => `${count(column)} of ${group.layers.length * group.heads.length}`),
    nameOf: (at) => titleOf(group, at),
  });
}

/** The largest and the median activation of the residual stream by depth. */
function depthChart({ group, names }, after) {
  const stream = group.residual;
  if (!stream) return null;
  const line = (values, name, colour, of) => ({ name, paired: Boolean(of), colour, of, columns: values.map((value, at) => (value === null || value <= 0 ? [] : [{ at, value }])) });
  const later = after?.group.residual?.largest.length === stream.largest.length ? after.group.residual : null;
  const series = [
    line(stream.largest, later ? names[0] : "largest |h|", BEFORE_COLOUR, stream),
    later && line(later.largest, names[1], AFTER_COLOUR, later),
    line(stream.median, "median |h|", "var(--soft)", null),
  ].filter(Boolean);
  const massive = stream.massive.some((count) => count > 0);
  return dotChart({
    group, series, log: true, unit: "", title: "Largest activation by depth",
    note: `grey: median · ${massive ? "some" : "none"} massive (> ${integer(stream.above)}, ≥ ${integer(stream.times)} medians)`,
    columns: stream.largest.map((_, depth) => String(depth)), axis: "layers passed",
    nameOf: (depth, _, { of }) => `depth ${depth}${of ? ` · “${truncated(named(of.token[depth]), 12)}” at ${integer(of.position[depth])}, dimension ${of.dimension[depth]} · ${integer(of.largest[depth] / (of.median[depth] || 1))} medians` : ", median"}`,
  });
}

/**
 * Dots in columns with a line through the means of the columns. `series`: [{name, colour, columns: [[{at, value}]],
 * paired}]; the series with `paired` are one quantity before and after. `across`: the dots have a place `across` from 0 to 1, too,
 * and `columns` are the names of its axis. `nameOf(at, column, series)` names a dot; `below`
 * are labels under the names of the columns. Arrow keys move between the dots of the first series; Enter selects one.
 */
function dotChart({ group, series, columns, title, note, unit, nameOf, axis = "", below = null, reference = null, log = false, across = false, chosen = null, select = null }) {
  const all = series.flatMap((one) => one.columns.flat().map(({ value }) => value)).filter((x) => !log || x > 0);
  const place = chosen === null ? -1 : chosen.layer * group.heads.length + chosen.head;
  const readout = h("output", { "aria-live": "polite" }), aside = h("small", {}, note);
  const means = series[0].columns.map((column) => (column.length ? column.reduce((sum, { value }) => sum + value, 0) / column.length : null));
  const summary = columns.length <= 12 && !across ? means.map((mean, c) => `${columns[c]}: ${formatted(mean, unit)}`).join(", ") : `from ${formatted(Math.min(...all), unit)} to ${formatted(Math.max(...all), unit)}`;
  let dots = [], show = () => {}, current = null;
  const box = h("div", { class: "sink-chart", tabindex: 0, "data-key": `chart-${title}`, role: "application", "aria-roledescription": "chart", "aria-label": `${title}${axis ? ` by ${axis}` : ""}. Mean ${summary}. Arrow keys move between dots.` });
  const point = (dot) => { current = dot; show(dot); };

  const draw = (width) => {
    let low = 0, high = Math.max(...all, unit === "%" ? 0.4 : 0, reference ?? 0, 1e-9);
    if (log) { low = Math.min(...all, reference ?? Infinity) / 1.25; high *= 1.25; }
    const height = 214, right = across ? 20 : 8, top = 8, bottom = axis || below ? 34 : 20, tall = height - top - bottom;
    const { y, names, rules } = verticalAxis({ low, high, log, unit, top, tall, count: 4 });
    const left = Math.max(38, 12 + 6.4 * Math.max(...names.map(({ length }) => length))), inner = width - left - right, step = inner / columns.length, columnAt = (c) => left + (across ? (inner * c) / (columns.length - 1) : step * (c + 0.5));
    const single = !across && series.every((one) => one.columns.every((column) => column.length <= 1));
    dots = [];
    // Bars of the numbers of heads, instead of dots that hide one another.
    const dense = !axis && series.some((one) => one.columns.some((column) => column.length > MANY_DOTS));
    const share = (dense ? 0.8 : 0.62) / series.length, radius = Math.min(across ? 2.4 : 3.4, Math.max(1.6, (step * share) / 4));
    const binsOf = (column) => [...Map.groupBy(column.toSorted((a, b) => a.value - b.value), ({ value }) => Math.min(Math.floor(value / BIN), 1 / BIN - 1))];
    const most = dense && Math.max(...series.flatMap((one) => one.columns.flatMap((column) => binsOf(column).map(([, heads]) => heads.length))));
    const bars = (one, s, column, c, from, room) => binsOf(column).map(([bin, heads]) => {
      const [bottom, top] = [y(bin * BIN), y((bin + 1) * BIN)], long = (room * heads.length) / most;
      dots.push({ x: from + long, y: (top + bottom) / 2, at: heads.at(-1).at, column: c, s, words: `${integer(heads.length)} ${heads.length === 1 ? "head" : "heads"} from ${percent(bin * BIN)} to ${percent((bin + 1) * BIN)}` });
      return svg("rect", { x: from, y: top + 0.5, width: long, height: bottom - top - 1, fill: one.colour, "fill-opacity": 0.62 });
    });
    const marks = series.flatMap((one, s) => {
      const middle = (c) => left + step * (c + 0.5 + (single ? 0 : (s - (series.length - 1) / 2) * share * 1.15));
      // Lines run through the centres of the columns, so that two series can be compared.
      const through = across ? [] : one.columns.map((column, c) => (column.length ? [axis ? left + step * (c + 0.5) : middle(c), y(column.reduce((sum, { value }) => sum + value, 0) / column.length)] : null)).filter(Boolean);
      const circles = one.columns.flatMap((column, c) => dense ? bars(one, s, column, c, middle(c) - (step * share) / 2, step * share) : column.slice().sort((a, b) => a.value - b.value).map(({ at, value, across: along }, i) => {
        // Spread the dots sideways, so that equal values do not cover one another.
        const x = across ? left + inner * along : middle(c) + (single ? 0 : (((i * 0.618) % 1) - 0.5) * step * share);
        const dot = { x, y: y(value), at, value, column: c, s };
        dots.push(dot);
        const here = at === place && !single;
        return svg("circle", { cx: x, cy: dot.y, r: here ? radius + 1 : radius, fill: one.colour, "fill-opacity": single || here ? 1 : 0.62, stroke: here ? "var(--ink)" : "none", "stroke-width": 1.6 });
      }));
      const line = axis
        ? svg("path", { d: through.map(([x, up], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${up.toFixed(1)}`).join(""), fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round" })
        : through.map(([x, up]) => svg("line", { x1: x - (step * share) / 2, x2: x + (step * share) / 2, y1: up, y2: up, stroke: dense ? "var(--ink)" : one.colour, "stroke-width": 2.2 }));
      return single ? [line, circles] : [circles, line];
    });
    const every = axis && !across ? Math.max(1, Math.ceil(((columns.at(-1).length * 6.5 + 8) * columns.length) / inner)) : 1;
    const ring = svg("circle", { r: radius + 3.5, fill: "none", stroke: "var(--ink)", "stroke-width": 1.6, visibility: "hidden" });
    show = (dot) => {
      readout.textContent = dot ? readoutOf(dot) : "";
      aside.hidden = Boolean(dot); // both share one line, so that the layout does not move
      ring.setAttribute("visibility", dot ? "visible" : "hidden");
      if (dot) { ring.setAttribute("cx", dot.x); ring.setAttribute("cy", dot.y); }
    };
    current = null;
    return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
      rules(left, width - right),
      reference === null ? null : svg("line", { ...REFERENCE, x1: left, x2: width - right, y1: y(reference), y2: y(reference) }),
      across ? svg("line", { ...REFERENCE, x1: left + inner * SINK_THRESHOLD, x2: left + inner * SINK_THRESHOLD, y1: top, y2: top + tall }) : null,
      marks,
      columns.map((column, c) => (c % every ? null : svg("text", { ...TICK, x: columnAt(c), y: top + tall + 15, "text-anchor": "middle" }, column))),
      below ? below.map((word, c) => svg("text", { ...TICK, x: left + step * (c + 0.5), y: top + tall + 29, "text-anchor": "middle" }, word)) : null,
      axis ? svg("text", { ...TICK, x: width - right, y: height - 4, "text-anchor": "end" }, `${axis} →`) : null,
      ring);
  };

  /** The name of a dot and its value, before and after if there are both. */
  function readoutOf(dot) {
    if (dot.words) return dot.words;
    const compared = series[dot.s].paired ? series.filter((one) => one.paired) : [series[dot.s]];
    const values = compared.map((one) => one.columns[dot.column].find(({ at }) => at === dot.at)?.value ?? null);
    return `${nameOf(dot.at, dot.column, series[dot.s])} · ${values.map((x) => formatted(x, unit)).join(" → ")}`;
  }

  const nearest = (event) => {
    const frame = box.firstChild.getBoundingClientRect();
    const [px, py] = [event.clientX - frame.left, event.clientY - frame.top];
    return dots.reduce((best, dot) => { const far = Math.hypot(dot.x - px, dot.y - py); return far < best.far ? { dot, far } : best; }, { dot: null, far: 28 }).dot;
  };
  const chooseHead = (dot) => { if (dot && select) select(Math.floor(dot.at / group.heads.length), dot.at % group.heads.length); };
  box.addEventListener("pointermove", (event) => point(nearest(event)));
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("blur", () => point(null));
  box.addEventListener("click", (event) => chooseHead(nearest(event)));
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { chooseHead(current); return; }
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    const own = dots.filter(({ s }) => s === (current?.s ?? 0)), here = current ?? own.find(({ at }) => at === place);
    if (!here) return point(own[0] ?? null);
    const column = own.filter((dot) => dot.column === here.column); // in ascending order
    const along = column.indexOf(here) + (event.key === "ArrowUp" ? 1 : -1);
    if (event.key === "ArrowUp" || event.key === "ArrowDown") return point(column[Math.min(Math.max(along, 0), column.length - 1)]);
    const next = own.filter((dot) => dot.column === here.column + (event.key === "ArrowRight" ? 1 : -1));
    const same = next.find(({ at }) => at % group.heads.length === here.at % group.heads.length);
    point(same ?? next[0] ?? here);
  });
  new Drawn(box, (width) => [draw(width)]);
  return h("figure", { class: "sink-figure", style: { "min-width": 0 } },
    h("figcaption", { style: { display: "block" } }, h("div", { class: "sink-title" }, title), h("div", { style: { height: "20px", overflow: "hidden", "white-space": "nowrap", "text-overflow": "ellipsis" } }, aside, readout)), box);
}

/** The tokens that are a sink in at least one head. */
function sinkTokenTable(group, name, several, reveal) {
  const found = group.sink_tokens;
  if (!found) return null;
  const lengths = found.value_norm, title = name ? `Tokens that are sinks, ${name}` : "Tokens that are sinks";
  const caption = h("figcaption", { style: { display: "block" } }, h("div", {}, title), h("small", {}, `mean weight above ${percent(SINK_THRESHOLD)}, over all queries that can attend to the token`));
  if (!found.token.length) return h("figure", {}, caption, h("p", { class: "note" }, "None: no token has such a score in any head."));
  return h("figure", { class: "sink-tokens", style: { "min-width": 0 } }, caption,
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": title }, h("table", { class: "token-table" },
      h("thead", {}, h("tr", {}, ["Token", several ? "Text" : null, "Position", "Heads", "Layers", "Largest weight", lengths ? "Value norm" : null].filter(Boolean).map((word) => h("th", { scope: "col" }, word)))),
      h("tbody", {}, found.token.map((token, i) => h("tr", {},
        h("th", { scope: "row" }, h(reveal ? "button" : "span", { class: reveal && "link", "data-tip": `${named(token)}${reveal ? "\nshow it in the text" : ""}`, onclick: () => reveal?.(found.text[i], found.position[i]) }, h("code", {}, named(token)))),
        several ? h("td", {}, integer(found.text[i] + 1)) : null,
        h("td", {}, integer(found.position[i])), h("td", {}, integer(found.heads[i])), h("td", {}, found.layers[i]), h("td", {}, percent(found.alpha[i])),
        lengths ? h("td", {}, formatted(lengths[i], "×")) : null))))));
}
