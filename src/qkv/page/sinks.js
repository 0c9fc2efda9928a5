// Figures about attention sinks, for the report and the viewer: heads as dots by layer, the residual stream by depth, and
// a table of the tokens that are sinks.

import { Drawn, keyOf, REFERENCE, TICK, verticalAxis } from "./charts.js";
import { h, svg } from "./dom.js";
import { joined } from "./findings.js";
import { headTitle } from "./heads.js";
import { truncated, integer, named, percent, written } from "./numbers.js";

const SINK_THRESHOLD = 0.3; // a head has a sink if the mean weight on it is larger (sink score of Gu et al. 2025)
const KINDS_OF_TEXT = [["alpha_first", "this text"], ["alpha_random", "random tokens"], ["alpha_repeated", "one token repeated"]];
const BEFORE_COLOUR = "var(--accent)", AFTER_COLOUR = "var(--second)";

/** Whether two groups have the same numbers of layers and heads. */
export const sameSize = (a, b) => a.layers.length === b.layers.length && a.heads.length === b.heads.length;

/** The model's own weight of each head on the first token; null if it equals the share of the row in every head. */
function undividedWeight(group) {
  const { weight_first: weights, share_first: shares } = group.sinks ?? {};
  if (!weights || !shares || !weights.some((x, at) => x !== null && Math.abs(x - shares[at]) > 1e-4)) return null;
  return weights;
}

/**
 * Figures about the sinks of `page.groups[g]`, as elements. `after`: {group, name} of the same size to overlay; `name`
 * then labels the page. `chosen`: the selected head {layer, head}, which is marked. `select(layer, head)` is called for
 * clicks and Enter.
 */
export function sinkFigures(page, g, { name = "", after = null, chosen = null, select = null } = {}) {
  const group = page.groups[g], more = { group, names: [name, after?.name], chosen, select };
  const both = (read) => [read(group), after && read(after.group)];
  const scores = (column) => both((one) => one.sinks?.[column] ?? null);
  const charts = [
    byLayerChart({ ...more, title: "Weight on the first token", note: "mean share of the row, later queries · dashed: 30 %", values: both((one) => one.sink), unit: "%", reference: SINK_THRESHOLD }),
    byLayerChart({ ...more, title: "Weight on the first token, first 64 queries", note: "mean share of the row · dashed: 30 %", values: scores("alpha_first"), unit: "%", reference: SINK_THRESHOLD }),
    byLayerChart({ ...more, title: "Norm of the first token’s value", note: "relative to the mean of the other tokens · logarithmic", values: scores("value_norm_first"), unit: "×", reference: 1, log: true }),
    byLayerChart({ ...more, title: "Contribution of the first token", note: "norm of weight × value, share of the sum over keys", values: scores("contribution_first"), unit: "%" }),
    byLayerChart({ ...more, title: "Undivided weight on the first token", note: "of layers whose rows do not sum to 1, before they are divided by their sums", values: both(undividedWeight), unit: "" }),
    byLayerChart({ ...more, title: "Norm of the first token’s key", note: "relative to the mean of the other tokens · logarithmic", values: scores("key_norm_first"), unit: "×", reference: 1, log: true }),
    byLayerChart({ ...more, title: "Weight on no token", note: "on the learned sink, or on the term 1 of “off by one”", values: scores("learned_sink"), unit: "%" }),
    kindsChart(more, after),
    depthChart(more, after),
  ].filter(Boolean);
  const tables = [[group, name], after && [after.group, after.name]].filter(Boolean)
    .map(([one, of]) => sinkTokenTable(one, after ? of : "", page.groups[g].texts.length > 1)).filter(Boolean);
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
function byLayerChart({ group, names, values, ...rest }) {
  const series = values.map((column, s) => column && {
    name: names[s], paired: true, colour: s ? AFTER_COLOUR : BEFORE_COLOUR,
    columns: group.layers.map((_, l) => group.heads.map((_, k) => ({ at: l * group.heads.length + k, value: column[l * group.heads.length + k] })).filter(({ value }) => value !== null)),
  }).filter((one) => one && one.columns.some((column) => column.length));
  if (!series.length) return null;
  if (group.types.type.length === 1) return h("p", {}, `${rest.title}: `, h("b", {}, series.map(({ columns }) => formatted(columns[0][0].value, rest.unit)).join(" → ")), h("small", {}, ` · ${rest.note.replace(/ · (dashed|logarithmic).*/, "")}`)); // one dot is no chart
  return dotChart({ group, series, columns: group.layers.map(String), axis: "layer", nameOf: (at) => titleOf(group, at), ...rest });
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
    group, series, chosen, select, unit: "%", reference: SINK_THRESHOLD, title: "First token, on three kinds of text", note: `first 64 queries · dashed: ${percent(SINK_THRESHOLD)}; below: heads above it`,
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
 * paired}]; the series with `paired` are one quantity before and after. `nameOf(at, column, series)` names a dot; `below`
 * are labels under the names of the columns. Arrow keys move between the dots of the first series; Enter selects one.
 */
function dotChart({ group, series, columns, title, note, unit, nameOf, axis = "", below = null, reference = null, log = false, chosen = null, select = null }) {
  const all = series.flatMap((one) => one.columns.flat().map(({ value }) => value)).filter((x) => !log || x > 0);
  const place = chosen === null ? -1 : chosen.layer * group.heads.length + chosen.head;
  const readout = h("output", { "aria-live": "polite" }), aside = h("small", {}, note);
  const means = series[0].columns.map((column) => (column.length ? column.reduce((sum, { value }) => sum + value, 0) / column.length : null));
  const summary = columns.length <= 12 ? means.map((mean, c) => `${columns[c]}: ${formatted(mean, unit)}`).join(", ") : `from ${formatted(Math.min(...all), unit)} to ${formatted(Math.max(...all), unit)}`;
  let dots = [], show = () => {}, current = null;
  const box = h("div", { class: "sink-chart", tabindex: 0, "data-key": `chart-${title}`, role: "application", "aria-roledescription": "chart", "aria-label": `${title}${axis ? ` by ${axis}` : ""}. Mean ${summary}. Arrow keys move between dots.` });
  const point = (dot) => { current = dot; show(dot); };

  const draw = (width) => {
    let low = 0, high = Math.max(...all, unit === "%" ? 0.4 : 0, reference ?? 0, 1e-9);
    if (log) { low = Math.min(...all, reference ?? Infinity) / 1.25; high *= 1.25; }
    const height = 214, right = 8, top = 8, bottom = axis || below ? 34 : 20, tall = height - top - bottom;
    const { y, names, rules } = verticalAxis({ low, high, log, unit, top, tall, count: 4 });
    const left = Math.max(38, 12 + 6.4 * Math.max(...names.map(({ length }) => length))), inner = width - left - right, step = inner / columns.length;
    const single = series.every((one) => one.columns.every((column) => column.length <= 1));
    const share = 0.62 / series.length, radius = Math.min(3.4, Math.max(1.6, (step * share) / 4));
    dots = [];
    const marks = series.flatMap((one, s) => {
      const middle = (c) => left + step * (c + 0.5 + (single ? 0 : (s - (series.length - 1) / 2) * share * 1.15));
      // Lines run through the centres of the columns, so that two series can be compared.
      const through = one.columns.map((column, c) => (column.length ? [axis ? left + step * (c + 0.5) : middle(c), y(column.reduce((sum, { value }) => sum + value, 0) / column.length)] : null)).filter(Boolean);
      const circles = one.columns.flatMap((column, c) => column.slice().sort((a, b) => a.value - b.value).map(({ at, value }, i) => {
        // Spread the dots sideways, so that equal values do not cover one another.
        const x = middle(c) + (single ? 0 : (((i * 0.618) % 1) - 0.5) * step * share);
        const dot = { x, y: y(value), at, value, column: c, s };
        dots.push(dot);
        const here = at === place && !single;
        return svg("circle", { cx: x, cy: dot.y, r: here ? radius + 1 : radius, fill: one.colour, "fill-opacity": single || here ? 1 : 0.62, stroke: here ? "var(--ink)" : "none", "stroke-width": 1.6 });
      }));
      const line = axis
        ? svg("path", { d: through.map(([x, up], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${up.toFixed(1)}`).join(""), fill: "none", stroke: one.colour, "stroke-width": 1.8, "stroke-linejoin": "round" })
        : through.map(([x, up]) => svg("line", { x1: x - (step * share) / 2, x2: x + (step * share) / 2, y1: up, y2: up, stroke: one.colour, "stroke-width": 2.2 }));
      return single ? [line, circles] : [circles, line];
    });
    const every = axis ? Math.max(1, Math.ceil(((columns.at(-1).length * 6.5 + 8) * columns.length) / inner)) : 1;
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
      marks,
      columns.map((column, c) => (c % every ? null : svg("text", { ...TICK, x: left + step * (c + 0.5), y: top + tall + 15, "text-anchor": "middle" }, column))),
      below ? below.map((word, c) => svg("text", { ...TICK, x: left + step * (c + 0.5), y: top + tall + 29, "text-anchor": "middle" }, word)) : null,
      axis ? svg("text", { ...TICK, x: width - right, y: height - 4, "text-anchor": "end" }, `${axis} →`) : null,
      ring);
  };

  /** The name of a dot and its value, before and after if there are both. */
  function readoutOf(dot) {
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
function sinkTokenTable(group, name, several) {
  const found = group.sink_tokens;
  if (!found) return null;
  const lengths = found.value_norm, title = name ? `Tokens that are sinks, ${name}` : "Tokens that are sinks";
  const caption = h("figcaption", { style: { display: "block" } }, h("div", {}, title), h("small", {}, `mean weight above ${percent(SINK_THRESHOLD)}, over all queries that can attend to the token`));
  if (!found.token.length) return h("figure", {}, caption, h("p", { class: "note" }, "None: no token has such a score in any head."));
  return h("figure", { class: "sink-tokens", style: { "min-width": 0 } }, caption,
    h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": title }, h("table", { class: "token-table" },
      h("thead", {}, h("tr", {}, ["Token", several ? "Text" : null, "Position", "Heads", "Layers", "Largest weight", lengths ? "Value norm" : null].filter(Boolean).map((word) => h("th", { scope: "col" }, word)))),
      h("tbody", {}, found.token.map((token, i) => h("tr", {},
        h("th", { scope: "row" }, h("code", { title: named(token) }, named(token))),
        several ? h("td", {}, integer(found.text[i] + 1)) : null,
        h("td", {}, integer(found.position[i])), h("td", {}, integer(found.heads[i])), h("td", {}, found.layers[i]), h("td", {}, percent(found.alpha[i])),
        lengths ? h("td", {}, formatted(lengths[i], "×")) : null))))));
}
