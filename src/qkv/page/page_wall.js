// All maps: the attention map of every head at once, sorted and filtered; a click opens one.

import { choice, legend } from "./charts.js";
import { h, replace } from "./dom.js";
import { bySimilarity, headName, kindsOf, labelOf, rowOf, similarityMeaning, statisticsOf } from "./heads.js";
import { integer, percent, written } from "./numbers.js";
import { looks } from "./colour.js";
import { wall } from "./wall.js";

const ORDERS = [["layer", "Layer × head"], ["type", "Type"], ["value", "Statistic"], ["similar", "Similarity"]];

/** Keys of its state: `sort`, one of ORDERS; `by`, a statistic; `only`, a type of head. */
export function mount(root, app) {
  const controls = h("div", { class: "controls wall-controls" }), note = h("p", { class: "meaning wall-note" }), box = h("div", { class: "wall-page" });
  root.append(h("h2", {}, "All maps"), controls, note, box);

  const here = () => {
    const { page } = app.opened(), group = page.groups[app.state.group];
    return { page, group, view: group.texts[app.state.text] };
  };
  let drawings = 0; // counts drawings, so that a slow one cannot replace a later one
  const similar = () => app.opened().similar(app.state.group, app.state.text, app.state.layer, app.state.head);

  async function draw() {
    const drawing = ++drawings;
    const { page, group, view } = here(), { state } = app, kinds = kindsOf(page, group), statistics = statisticsOf(view);
    const order = ORDERS.some(([id]) => id === state.sort) ? state.sort : "layer", by = statistics.includes(state.by) ? state.by : statistics[0];
    const only = kinds.some(({ name }) => name === state.only) ? state.only : null;
    const about = view.pooled;
    replace(controls,
      choice("Order by", ORDERS, order, (sort) => app.go({ sort })),
      order === "value" ? h("label", {}, "Statistic ", h("select", { "data-key": "by", onchange: (event) => app.go({ by: event.target.value }) }, statistics.map((name) => h("option", { value: name, selected: name === by }, labelOf(group, name))))) : null,
      h("label", {}, "Show ", h("select", { "data-key": "only", onchange: (event) => app.go({ only: event.target.value || null }) },
        h("option", { value: "" }, `all ${integer(group.types.type.length)} heads`), kinds.map(({ name, count }) => h("option", { value: name, selected: name === only }, `${name} (${count})`)))),
      about ? legend({ low: percent(about.high / 1000), high: percent(about.high), note: "largest weight of a bin, logarithmic" }) : null);
    if (!about) {
      note.textContent = "";
      replace(box, h("p", { class: "note" }, "This profile holds no small maps: it was made with map_bins=0, or its weights came from elsewhere. Open the model itself instead."));
      return;
    }
    const alike = order === "similar" ? await similar() : null;
    if (drawing !== drawings) return;
    const bins = about.bin_queries > 1 || about.bin_keys > 1 ? `, in bins of ${integer(about.bin_queries)} × ${integer(about.bin_keys)} tokens` : "";
    note.textContent = `Rows are queries, columns are keys${bins}. Click a map to open it.${order === "similar" ? ` The heads with the most similar maps come first. Similarity is ${similarityMeaning(alike.maps)}.` : ""}`;
    const { type } = group.types, chosen = type.map((_, at) => at).filter((at) => !only || type[at] === only);
    replace(box, wall({
      group, high: about.high, layer: state.layer, head: state.head, load: (l, k) => app.opened().maps(state.group, state.text).small(rowOf(group, l, k)), sections: sectionsOf(order, { group, view, kinds, chosen, by, only, state, alike }),
      tip: (l, k) => [type[rowOf(group, l, k)], view.heads.goes_to[rowOf(group, l, k)], order === "value" ? `${labelOf(group, by)} ${written(view.heads[by][rowOf(group, l, k)], looks.statistics[by].unit)}` : null, alike && `similarity ${written(alike.values[rowOf(group, l, k)], "")}`].filter(Boolean).join("\n"),
      beside: (l, k) => (alike ? written(alike.values[rowOf(group, l, k)], "") : order === "value" ? written(view.heads[by][rowOf(group, l, k)], looks.statistics[by].unit) : ""),
      select: (layer, head) => app.go({ layer, head }, { replace: true }),
      open: (layer, head) => app.go({ page: "map", layer, head }),
    }));
  }

  return {
    update(changed) {
      if (["page", "source", "group", "text", "sort", "by", "only"].some((key) => changed.has(key))) draw();
    },
    recolour: draw,
  };
}

function sectionsOf(order, { group, view, kinds, chosen, by, only, state, alike }) {
  if (order === "layer") {
    if (!only) return null;
    return group.layers.map((layer, l) => ({ title: `Layer ${layer}`, rows: chosen.filter((at) => Math.floor(at / group.heads.length) === l) })).filter(({ rows }) => rows.length);
  }
  const scoreOf = (name) => (at) => group.types[name]?.[at] ?? 0;
  if (order === "type")
    return kinds.filter(({ name }) => !only || name === only)
      .map(({ name }) => ({ title: name, rows: chosen.filter((at) => group.types.type[at] === name).sort((a, b) => scoreOf(name)(b) - scoreOf(name)(a)) }));
  if (order === "value") return [{ title: `${labelOf(group, by)}, largest first`, rows: chosen.toSorted((a, b) => (view.heads[by][b] ?? -Infinity) - (view.heads[by][a] ?? -Infinity)) }];
  return [{ title: `Like ${headName(group, state.layer, state.head)}`, rows: bySimilarity(chosen, alike.values) }];
}
