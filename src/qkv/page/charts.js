// Charts: stacked bars, curves along the text, maps on a canvas. Each function returns an element and keeps no state.

import { destinationColour, inkOn, looks, ramp, rgbOf } from "./colour.js";
import { h, svg } from "./dom.js";
import { binStart, integer, logarithmicRange, meanOf, named, percent, written } from "./numbers.js";
import { nextFrame } from "./state.js";

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

// The looks of axes are attributes, so that an exported drawing needs no style sheet.
export const TICK = { fill: "var(--soft)", "font-size": 11 };
export const REFERENCE = { class: "reference", fill: "none", stroke: "var(--soft)", "stroke-dasharray": "4 3" };

/** A vertical axis from `low` (0 unless `log`) to at least `high`, `tall` pixels from `top`: {y(value), names, rules(left, right)}. */
export function verticalAxis({ low, high, log, unit, top, tall, count = 3 }) {
  const ticks = log ? decades(low, high) : niceTicks(high, count), end = log ? high : Math.max(high, ticks.at(-1));
  const y = (value) => top + tall * (1 - (log ? Math.log(Math.max(value, low) / low) / Math.log(high / low) : value / end));
  const names = ticks.map((tick) => (unit === "%" ? percent(tick) : tick.toLocaleString("en", { maximumSignificantDigits: 3 })));
  const rules = (left, right) => ticks.map((tick, at) => [
    svg("line", { stroke: "var(--line)", "shape-rendering": "crispEdges", x1: left, x2: right, y1: y(tick), y2: y(tick) }),
    svg("text", { ...TICK, x: left - 6, y: y(tick) + 3.5, "text-anchor": "end" }, names[at]),
  ]);
  return { y, names, rules };
}

/**
 * Curves along texts, as wide as `width` pixels. `series`: [{values, n, label, colour}], with values in bins of a text of n
 * tokens; the readout shows all of them at the pointer. `tokens`: of the text, if there is one. `reference`: {values, label}
 * is drawn dashed; `log` for a logarithmic axis; `bars` fills under a single curve.
 */
export function curve({ title, series, width, unit, tokens = null, reference = null, log = false, bars = false }) {
  const height = 118, left = 52, right = 6, top = 10, bottom = 18;
  const inner = width - left - right, tall = height - top - bottom, n = Math.max(...series.map((one) => one.n));
  const known = series.flatMap(({ values }) => Array.from(values).filter((value) => Number.isFinite(value) && (!log || value > 0))).sort((a, b) => a - b);
  const { low, high } = log ? logarithmicRange(known, 0.02) : { low: 0, high: Math.max(known.at(-1) ?? 1, ...(reference?.values ?? []), 1e-9) };
  const { y, rules } = verticalAxis({ low, high, log, unit, top, tall });
  const x = (one, place) => (left + ((place / one.values.length) * one.n * inner) / n).toFixed(1);
  const path = (one) => {
    let line = "", pen = false;
    one.values.forEach((value, bin) => {
      const known = Number.isFinite(value), move = pen ? "L" : "M";
      if (known) line += bars ? `${move}${x(one, bin)} ${y(value).toFixed(1)}H${x(one, bin + 1)}` : `${move}${x(one, bin + 0.5)} ${y(value).toFixed(1)}`;
      pen = known;
    });
    return line;
  };
  const marker = svg("line", { class: "marker", y1: top, y2: top + tall, visibility: "hidden" }), readout = h("output", {});
  const summary = series.length > 1 ? `. ${series.map(({ label, values }) => `${label}: mean ${written(meanOf(values), unit)}`).join("; ")}` : `, from ${written(known[0] ?? NaN, unit)} to ${written(known.at(-1) ?? NaN, unit)}`;
  const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}${summary}` },
    rules(left, width - right),
    bars && known.length ? svg("path", { class: "area", d: `${path(series[0])}V${top + tall}H${left}Z` }) : null,
    series.map((one) => svg("path", { class: "line", d: path(one), style: { stroke: one.colour ?? "var(--accent)" } })),
    reference ? svg("path", { ...REFERENCE, d: Array.from(reference.values, (value, bin) => `${bin ? "L" : "M"}${x({ ...reference, n }, bin + 0.5)} ${y(value).toFixed(1)}`).join("") }) : null,
    positions([0, n - 1], 6).map((position) => svg("text", { ...TICK, x: left + ((position + 0.5) / n) * inner, y: height - 4, "text-anchor": position ? (position > 0.95 * n ? "end" : "middle") : "start" }, integer(position))),
    marker);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect(), across = ((event.clientX - box.left) * (width / box.width) - left) / inner;
    const position = Math.min(Math.max(Math.floor(across * n), 0), n - 1), at = left + ((position + 0.5) / n) * inner;
    marker.setAttribute("visibility", "visible");
    marker.setAttribute("x1", at);
    marker.setAttribute("x2", at);
    const bins = series[0].values.length, bin = Math.floor((position * bins) / n);
    const from = tokens ? binStart(bin, bins, n) : position, to = tokens ? binStart(bin + 1, bins, n) - 1 : position;
    const said = series.map(({ label, values, n: own }) => `${label ? `${label} ` : ""}${position < own ? written(values[Math.floor((position * values.length) / own)], unit) : "–"}`);
    readout.replaceChildren(...(from < to ? [`${integer(from)}–${integer(to)}`] : [integer(from), ...(tokens ? [" “", h("bdi", {}, named(tokens[from])), "”"] : [])]), ` · ${said.join(" · ")}`);
  });
  drawing.addEventListener("pointerleave", () => { marker.setAttribute("visibility", "hidden"); readout.replaceChildren(); });
  return h("figure", { class: "curve" },
    h("figcaption", {}, h("span", {}, title, reference ? h("small", {}, ` · dashed: ${reference.label}`) : null), readout), drawing);
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

/** Round positions in a range, about `most` of them. */
export function positions([first, last], most) {
  const rough = niceTicks(Math.max(last - first, 1), Math.max(most, 1))[1];
  const step = Number.isInteger(rough) ? rough : rough < 1 ? 1 : 2 * rough, from = Math.ceil(first / step);
  return Array.from({ length: Math.max(Math.floor(last / step) - from + 1, 0) }, (_, at) => (from + at) * step);
}

/** An element whose children `draw(width)` makes to the pixel: again whenever the width of its (first) column changes. */
export class Drawn {
  constructor(element, draw) {
    Object.assign(this, { element, make: draw, width: 0 });
    this.sizes = new ResizeObserver(() => { if (this.column !== this.width) nextFrame(() => this.draw()); }); // the observer must not trigger itself
    this.sizes.observe(element);
  }

  get column() { return Math.floor(parseFloat(getComputedStyle(this.element).gridTemplateColumns) || this.element.clientWidth); } // 0 if it is hidden

  draw() {
    this.width = this.column;
    const parts = this.width ? this.make(this.width) : null;
    if (parts) this.element.replaceChildren(...parts);
  }

  close() {
    this.sizes.disconnect();
  }
}

/** Fill a canvas with colours: `at(row, column)` gives a number from 0 to 1, and `colourOf` its colour. Zero, for masked pairs, stays transparent. */
export function paint(canvas, rows, columns, at, colourOf = ramp) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const table = Array.from({ length: 256 }, (_, level) => [...colourOf(level / 255), 255]);
  for (let row = 0, pixel = 0; row < rows; row++)
    for (let column = 0; column < columns; column++, pixel += 4) {
      const level = at(row, column);
      if (!(level > 0)) continue;
      image.data.set(table[Math.round(255 * Math.min(level, 1))], pixel);
    }
  context.putImageData(image, 0, 0);
}

/** A canvas of rows × columns cells, in the class `name`, to be painted. onmove(row, column): the pointer or the arrow keys moved to a cell. */
export class CellMap {
  constructor({ name, rows, columns, label, onmove }) {
    Object.assign(this, { rows, columns, onmove, at: [0, 0], canvas: h("canvas", {}), across: h("i", { class: "across", hidden: true }), down: h("i", { class: "down", hidden: true }) });
    this.element = h("div", {
      class: `map ${name}`, tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-label": `${label}. Arrow keys move between cells.`,
      style: { "aspect-ratio": `${columns} / ${rows}` },
      onpointermove: (event) => {
        const frame = this.canvas.getBoundingClientRect();
        this.go(Math.floor(((event.clientY - frame.top) / frame.height) * rows), Math.floor(((event.clientX - frame.left) / frame.width) * columns));
      },
      onkeydown: (event) => {
        const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
        if (!move) return;
        event.preventDefault();
        const stride = event.shiftKey ? 10 : 1;
        this.go(this.at[0] + stride * move[0], this.at[1] + stride * move[1]);
      },
    }, this.canvas, this.across, this.down);
  }

  go(row, column) {
    this.at = [Math.min(Math.max(row, 0), this.rows - 1), Math.min(Math.max(column, 0), this.columns - 1)];
    this.onmove(...this.at);
  }

  /** Move the crosshair to a cell, which maps of one shape can share; hide it without one. */
  mark(cell) {
    this.across.hidden = this.down.hidden = !cell;
    if (!cell) return;
    this.at = cell;
    this.across.style.top = `${((cell[0] + 0.5) / this.rows) * 100}%`;
    this.down.style.left = `${((cell[1] + 0.5) / this.columns) * 100}%`;
  }
}

/** A small picture of a whole map or text, with a frame around the part in view. Pressing or dragging calls `ongo(x, y)`, from 0 to 1. */
export class Miniature {
  constructor({ name, label, ongo }) {
    const go = (event) => {
      const box = this.element.getBoundingClientRect(), within = (at) => Math.min(Math.max(at, 0), 0.9999);
      ongo(within((event.clientX - box.left) / box.width), within((event.clientY - box.top) / box.height));
    };
    this.pictures = h("div", {});
    this.frame = h("i", { hidden: true });
    this.element = h("div", {
      class: `miniature ${name}`, role: "img", "aria-label": label, onpointerdown: (event) => { this.element.setPointerCapture(event.pointerId); go(event); },
      onpointermove: (event) => { if (event.buttons) go(event); },
    }, this.pictures, this.frame);
  }

  /** Show canvases side by side. */
  show(...canvases) {
    this.pictures.replaceChildren(...canvases);
  }

  /** Frame a part, whose edges are from 0 to 1; nothing if it is all, but for rounding. */
  mark({ left = 0, top = 0, right = 1, bottom = 1 }) {
    const percent = (share) => `${100 * share}%`;
    this.frame.hidden = Math.min(right - left, bottom - top) > 0.999;
    Object.assign(this.frame.style, { left: percent(left), top: percent(top), width: percent(right - left), height: percent(bottom - top) });
  }
}

/** A colour bar with labels at both ends. */
export function legend({ low, high, note = null, colourOf = ramp }) {
  const bar = h("canvas", {}), columns = 96;
  paint(bar, 1, columns, (_, column) => (column + 0.5) / columns, colourOf);
  return h("span", { class: "legend" }, h("span", {}, low), bar, h("span", {}, high), note ? h("small", {}, note) : null);
}

/** Instead of a picture that could not be loaded: the error, and a button to load it again. */
export const failure = (error, again) => [h("p", {}, error.message), h("button", { type: "button", class: "quiet", onclick: again }, "Try again")];

/** A row of radio buttons styled as one control; `options`: a list of [value, text]. */
export function choice(label, options, chosen, onchange) {
  const name = `choice-${label}`;
  return h("fieldset", { class: "choice" }, h("legend", {}, label),
    options.map(([id, text]) => h("label", {},
      h("input", { type: "radio", name, value: id, "data-key": `${name}-${id}`, checked: String(id) === String(chosen), onchange: (event) => onchange(event.target.value) }), h("span", {}, text))));
}

/** A list to choose from, with the options [[value, text], …]; `onchange(value)`. */
export const selectFrom = (key, chosen, options, onchange, attributes = {}) =>
  h("select", { "data-key": key, onchange: (event) => onchange(options[event.target.selectedIndex][0]), ...attributes },
    options.map(([value, text]) => h("option", { value: value ?? "", selected: value === chosen }, text)));

/** The same with a label. */
export const chooser = (label, ...list) => h("label", { class: "chooser" }, h("span", {}, label), " ", selectFrom(...list));

/** A field for a text, with a box that says what is wrong with it: {field, trouble, tell(sentence)}; an empty sentence hides the box. */
export function textField(id, { described = "", ...attributes }) {
  const trouble = h("p", { id: `${id}-trouble`, class: "field-trouble", role: "status", hidden: true });
  const field = h("textarea", { id: `${id}-text`, class: `${id}-text`, spellcheck: "false", autocomplete: "off", autocapitalize: "off", "aria-describedby": `${id}-trouble ${described}`, ...attributes });
  const tell = (sentence) => { trouble.textContent = sentence; trouble.hidden = !sentence; field.setAttribute("aria-invalid", String(Boolean(sentence))); };
  return { field, trouble, tell };
}
