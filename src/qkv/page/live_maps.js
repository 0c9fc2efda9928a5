// The attention maps of one head of a live model, as trained and with the edits, and its statistics.

import { cellMap, legend, markCell, paint } from "./charts.js";
import { h } from "./dom.js";
import { headAt, longName } from "./live_edits.js";
import { quoted } from "./live_next.js";
import { percent, written } from "./numbers.js";

/** Two maps that share a crosshair, and the statistics beside them. */
export function liveMaps(answer) {
  const { tokens, maps, at, edited } = answer, n = tokens.length, [layer, head] = headAt(at);
  const top = Math.max(...maps.map((map) => map.reduce((most, weight) => Math.max(most, weight), 0)), 1e-9);
  const readout = h("output", { class: "readout", "aria-live": "polite" }, "Point at a cell, or focus a map and use the arrow keys.");
  const boxes = [];
  const onmove = (query, key) => {
    for (const box of boxes) markCell(box, [query, key], n, n);
    const [before, after] = maps.map((map) => map[query * n + key]);
    readout.replaceChildren(`query ${query} `, h("b", {}, quoted(tokens[query])), ` → key ${key} `, h("b", {}, quoted(tokens[key])),
      key > query && !before && !after ? ": masked" : `: ${percent(before)}${edited ? ` → ${percent(after)}` : ""}`);
  };
  const figure = (title, map) => {
    const canvas = h("canvas", {}), box = cellMap({ canvas, rows: n, columns: n, label: `${title}: ${longName(at)}, ${n} queries by ${n} keys`, onmove });
    paint(canvas, n, n, (row, column) => Math.sqrt(map[row * n + column] / top));
    box.classList.add("live-map");
    boxes.push(box);
    return h("figure", {}, h("figcaption", {}, h("span", {}, title)), box);
  };
  const change = (name, unit) => [...new Set(["before", "after"].slice(0, edited ? 2 : 1).map((when) => written(answer[name][when][layer][head], unit)))].join(" → ");
  const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));
  return [
    figure("As trained", maps[0]),
    figure(edited ? "With the edits" : "With edits (none yet)", maps[1]),
    h("div", { class: "live-aside" }, h("h2", {}, longName(at)),
      h("dl", {}, fact(["Mean weight on the first token, ", quoted(tokens[0])], n > 1 ? change("sink", "%") : "–"), fact("Mean entropy of a row", change("entropy", "nats"))),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }), h("small", {}, "Rows are queries, columns are keys."), readout),
  ];
}
