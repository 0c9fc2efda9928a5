// Several curves along a text in one chart.

import { axisTicks, decades, niceTicks } from "./charts.js";
import { h, svg } from "./dom.js";
import { integer, meanOf, percent, written } from "./numbers.js";

/**
 * A chart of curves along texts that may differ in length. `series`: [{values, n, colour, label}], with values in bins of a
 * text of n tokens. `width` in pixels; `log` for a logarithmic axis. The readout shows all values at the pointer.
 */
export function overlay({ title, series, width, unit, log = false }) {
  const height = 124, left = 52, right = 6, top = 10, bottom = 18;
  const inner = width - left - right, tall = height - top - bottom, n = Math.max(...series.map((one) => one.n));
  const known = series.flatMap(({ values }) => Array.from(values).filter((x) => Number.isFinite(x) && (!log || x > 0))).sort((a, b) => a - b);
  let high = known.at(-1) ?? 1, low = 0;
  if (log) {
    low = Math.max(known[Math.floor(known.length * 0.02)] ?? 1e-6, high * 1e-6);
    if (low >= high / 2) low = high / 10;
  }
  const ticks = log ? decades(low, high) : niceTicks(Math.max(high, 1e-9));
  if (!log) high = Math.max(high, ticks.at(-1));
  const x = (one, bin) => left + ((((bin + 0.5) / one.values.length) * one.n) / n) * inner;
  const y = (value) => top + tall * (1 - (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / high));
  const path = (one) => {
    let line = "", pen = false;
    one.values.forEach((value, bin) => {
      if (Number.isFinite(value)) line += `${pen ? "L" : "M"}${x(one, bin).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = Number.isFinite(value);
    });
    return line;
  };
  const marker = svg("line", { class: "marker", y1: top, y2: top + tall, visibility: "hidden" }), readout = h("output", {});
  const summary = series.map(({ label, values }) => `${label}: mean ${written(meanOf(values), unit)}`).join("; ");
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}. ${summary}` },
    ticks.map((tick) => [
      svg("line", { class: "rule", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, unit === "%" ? percent(tick) : tick.toLocaleString("en")),
    ]),
    series.map((one) => svg("path", { d: path(one), fill: "none", stroke: one.colour, "stroke-width": 1.4, "stroke-linejoin": "round" })),
    axisTicks(n).map((position) => svg("text", { class: "tick", x: left + ((position + 0.5) / n) * inner, y: height - 4, "text-anchor": position ? "middle" : "start" }, integer(position))),
    marker);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const position = Math.min(Math.max(Math.floor((((event.clientX - box.left) * (width / box.width) - left) / inner) * n), 0), n - 1);
    const at = left + ((position + 0.5) / n) * inner;
    marker.setAttribute("visibility", "visible");
    marker.setAttribute("x1", at);
    marker.setAttribute("x2", at);
    readout.textContent = `${integer(position)} · ${series.map((one) => `${one.label} ${position < one.n ? written(one.values[Math.floor((position * one.values.length) / one.n)], unit) : "–"}`).join(" · ")}`;
  });
  drawing.addEventListener("pointerleave", () => { marker.setAttribute("visibility", "hidden"); readout.textContent = ""; });
  return h("figure", { class: "curve" }, h("figcaption", {}, h("span", {}, title), readout), drawing);
}
