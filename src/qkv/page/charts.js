// Charts: stacked bars, curves along the text, maps on a canvas. Each function returns an element and keeps no state.

import { css, destinationColour, inkOn, looks, ramp, rgbOf } from "./colour.js";
import { h, svg } from "./dom.js";
import { binStart, integer, named, percent, written } from "./numbers.js";

/** A stacked bar of shares, optionally with a legend. `shares`: {destination name: share}. */
export function stack(shares, { window, legend = false, label }) {
  const parts = looks.destinations.filter(({ name }) => shares[name] > 0.0005);
  const whole = parts.reduce((sum, { name }) => sum + shares[name], 0) || 1;
  const words = ({ name, label: word }) => (name === "nearby" ? `${word} (±${window})` : word);
  const summary = parts.map((part) => `${words(part)} ${percent(shares[part.name])}`).join(", ");
  const bar = h(
    "div",
    { class: "stack", role: "img", "aria-label": `${label}: ${summary}` },
    parts.map((part) => {
      const colour = destinationColour(part), share = shares[part.name] / whole;
      return h(
        "span",
        { style: { width: `${100 * share}%`, background: colour, color: inkOn(rgbOf(colour)) }, "data-tip": `${words(part)}\n${percent(shares[part.name])}` },
        share >= 0.09 && legend ? percent(shares[part.name]) : null,
      );
    }),
  );
  return legend ? h("div", {}, bar, keyOf(parts.map((part) => [words(part), destinationColour(part), percent(shares[part.name])]))) : bar;
}

/** A legend of colour swatches with names and optional values. */
export function keyOf(entries) {
  return h(
    "ul",
    { class: "key" },
    entries.map(([word, colour, value]) =>
      h("li", {}, h("i", { style: { background: colour } }), word, value ? h("b", {}, value) : null),
    ),
  );
}

/**
 * A curve along the text, as wide as `width` pixels. `values` may be bins of a text of `n` tokens.
 * `reference`: {values, label} is drawn dashed; `log` for a logarithmic axis; `bars` fills under the curve.
 */
export function curve({ title, values, n, width, unit, tokens, reference, log = false, bars = false }) {
  const height = 118, left = 52, right = 6, top = 10, bottom = 18;
  const inner = width - left - right, tall = height - top - bottom, bins = values.length;
  const finite = Array.from(values).filter((value) => Number.isFinite(value) && (!log || value > 0));
  let high = Math.max(...finite, ...(reference ? reference.values : []), log ? 0 : 1e-9);
  let low = 0;
  if (!finite.length) high = 1;
  if (log) {
    const sorted = finite.slice().sort((a, b) => a - b);
    low = Math.max(sorted[Math.floor(sorted.length * 0.02)] ?? 1e-6, high * 1e-6);
    if (low >= high / 2) low = high / 10;
  }
  const ticks = log ? decades(low, high) : niceTicks(high);
  if (!log) high = Math.max(high, ticks.at(-1));
  const x = (bin) => left + ((bin + 0.5) / bins) * inner;
  const y = (value) =>
    top + tall * (1 - (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / high));

  let line = "";
  let pen = false;
  for (let b = 0; b < bins; b++) {
    const value = values[b];
    if (!Number.isFinite(value)) { pen = false; continue; }
    if (bars) line += `${pen ? "L" : "M"}${(left + (b / bins) * inner).toFixed(1)} ${y(value).toFixed(1)}H${(left + ((b + 1) / bins) * inner).toFixed(1)}`;
    else line += `${pen ? "L" : "M"}${x(b).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = true;
  }
  const marker = svg("line", { class: "marker", y1: top, y2: top + tall, visibility: "hidden" });
  const readout = h("output", {});
  const drawing = svg(
    "svg",
    { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, from ${written(Math.min(...finite), unit)} to ${written(Math.max(...finite), unit)}` },
    ticks.map((tick) => [
      svg("line", { class: "rule", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }),
      svg("text", { class: "tick", x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, unit === "%" ? percent(tick) : tick.toLocaleString("en")),
    ]),
    bars && line ? svg("path", { class: "area", d: `${line}V${top + tall}H${left}Z` }) : null,
    svg("path", { class: "line", d: line }),
    reference
      ? svg("path", { class: "reference", d: Array.from(reference.values, (value, b) => `${b ? "L" : "M"}${x(b).toFixed(1)} ${y(value).toFixed(1)}`).join("") })
      : null,
    axisTicks(n).map((position) =>
      svg("text", { class: "tick", x: left + ((position + 0.5) / n) * inner, y: height - 4, "text-anchor": position ? "middle" : "start" }, integer(position)),
    ),
    marker,
  );
  drawing.addEventListener("pointermove", (event) => {
    const at = (event.clientX - drawing.getBoundingClientRect().left) * (width / drawing.getBoundingClientRect().width);
    const bin = Math.min(Math.max(Math.floor(((at - left) / inner) * bins), 0), bins - 1);
    const from = binStart(bin, bins, n), to = binStart(bin + 1, bins, n) - 1;
    marker.setAttribute("visibility", "visible");
    marker.setAttribute("x1", x(bin));
    marker.setAttribute("x2", x(bin));
    const where = from === to ? [`${integer(from)} “`, h("bdi", {}, named(tokens[from])), "”"] : [`${integer(from)}–${integer(to)}`];
    readout.replaceChildren(...where, ` · ${written(values[bin], unit)}`);
  });
  drawing.addEventListener("pointerleave", () => {
    marker.setAttribute("visibility", "hidden");
    readout.textContent = "";
  });
  return h(
    "figure",
    { class: "curve" },
    h("figcaption", {}, h("span", {}, title, reference ? h("small", {}, ` · dashed: ${reference.label}`) : null), readout),
    drawing,
  );
}

/** Round steps from 0 to just over `high`, about `count` of them. */
export function niceTicks(high, count = 3) {
  const rough = high / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((candidate) => candidate >= rough * 0.999);
  return Array.from({ length: Math.ceil((high / step) * 0.999) + 1 }, (_, k) => +(k * step).toPrecision(6));
}

/** Powers of ten between two numbers, four at most; steps of 1, 2, 5 where these are few. */
export function decades(low, high) {
  const first = Math.ceil(Math.log10(low)), last = Math.floor(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first + 1) / 4));
  const found = [];
  for (let power = last; power >= first; power -= every) found.unshift(10 ** power);
  if (found.length > 1) return found;
  const steps = [1, 2, 5].flatMap((m) => [first - 1, first, first + 1].map((power) => +(m * 10 ** power).toPrecision(3)));
  return steps.filter((tick) => tick >= low && tick <= high).sort((a, b) => a - b);
}

/** Round positions along a text of n tokens. */
export function axisTicks(n) {
  const ticks = n > 4 ? niceTicks(n - 1, 6) : [0];
  return ticks.filter((position) => position <= n - 1 && Number.isInteger(position));
}

/** Fill a canvas with colours: `at(row, column)` gives a number from 0 to 1. Zero, for masked pairs, stays transparent. */
export function paint(canvas, rows, columns, at) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const table = Array.from({ length: 256 }, (_, level) => ramp(level / 255));
  for (let row = 0, pixel = 0; row < rows; row++)
    for (let column = 0; column < columns; column++, pixel += 4) {
      const level = at(row, column);
      if (!(level > 0)) continue;
      const colour = table[Math.round(255 * Math.min(level, 1))];
      image.data[pixel] = colour[0];
      image.data[pixel + 1] = colour[1];
      image.data[pixel + 2] = colour[2];
      image.data[pixel + 3] = 255;
    }
  context.putImageData(image, 0, 0);
}

/**
 * A canvas of rows × columns cells. `onmove(row, column)` is called when the pointer or the arrow keys move to a cell.
 * `markCell` draws the crosshair, so that several maps can share one position.
 */
export function cellMap({ canvas, rows, columns, label, onmove }) {
  let at = [0, 0];
  const go = (row, column) => {
    at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    onmove(...at);
  };
  return h(
    "div",
    {
      class: "map", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-label": `${label}. Arrow keys move between cells.`,
      style: { "aspect-ratio": `${columns} / ${rows}` },
      onpointermove: (event) => {
        const frame = canvas.getBoundingClientRect();
        go(Math.floor(((event.clientY - frame.top) / frame.height) * rows), Math.floor(((event.clientX - frame.left) / frame.width) * columns));
      },
      onkeydown: (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (!move) return;
        event.preventDefault();
        const stride = event.shiftKey ? 10 : 1;
        go(at[0] + stride * move[0], at[1] + stride * move[1]);
      },
    },
    canvas, h("i", { class: "across", hidden: true }), h("i", { class: "down", hidden: true }),
  );
}

/** Move the crosshair of a `cellMap` with rows × columns cells to a cell; hide it if `cell` is null. */
export function markCell(box, cell, rows, columns) {
  const [across, down] = box.querySelectorAll("i");
  across.hidden = down.hidden = !cell;
  if (!cell) return;
  across.style.top = `${((cell[0] + 0.5) / rows) * 100}%`;
  down.style.left = `${((cell[1] + 0.5) / columns) * 100}%`;
}

/** A colour bar with labels at both ends. */
export function legend({ low, high, note }) {
  const stops = Array.from({ length: 9 }, (_, k) => css(ramp(k / 8))).join(", ");
  return h(
    "span",
    { class: "legend" },
    h("span", {}, low), h("i", { style: { background: `linear-gradient(to right, ${stops})` } }), h("span", {}, high),
    note ? h("small", {}, note) : null,
  );
}

/** A row of radio buttons styled as one control; `options`: a list of [value, text]. */
export function choice(label, options, chosen, onchange) {
  const name = `choice-${label}`;
  return h("fieldset", { class: "choice" }, h("legend", {}, label),
    options.map(([id, text]) => h("label", {},
      h("input", { type: "radio", name, value: id, "data-key": `${name}-${id}`, checked: String(id) === String(chosen), onchange: (event) => onchange(event.target.value) }), h("span", {}, text))));
}
