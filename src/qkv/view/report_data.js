"use strict";
// Reading the embedded data, writing numbers, and colour.

const PAGE = JSON.parse(document.getElementById("page").textContent);

/** Make an element: h("p", {class: "x", onclick: f}, "text", child). Text is never parsed as HTML. */
function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, css] of Object.entries(value)) element.style.setProperty(key, css);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** The bytes of a base64 string that holds deflated data. */
async function inflated(text) {
  const packed = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The arrays of a view: {name: {values, shape}}, 16-bit codes turned back into numbers. */
async function arraysOf(view, id) {
  const planes = await inflated(document.getElementById(id).textContent);
  const length = planes.length / 2;
  const arrays = {};
  for (const [name, { shape, start, scale, low, step }] of Object.entries(view.arrays)) {
    const size = shape.reduce((product, dim) => product * dim, 1);
    const values = new Float32Array(size);
    for (let i = 0; i < size; i++) {
      const code = planes[start + i] + 256 * planes[length + start + i];
      const number = low + (code - 1) * step;
      values[i] = code === 65535 ? NaN : scale === "log" ? (code === 0 ? 0 : Math.exp(number)) : number;
    }
    arrays[name] = { values, shape };
  }
  return arrays;
}

/** Where bin b of `bins` starts in a text of n tokens. */
const binStart = (b, bins, n) => Math.floor((b * n) / bins);

/** The largest value in each of at most `most` bins: a single peak in a long text stays visible. */
function binPeaks(values, most) {
  const n = values.length, bins = Math.min(n, most);
  return Float32Array.from({ length: bins }, (_, b) => {
    let peak = -Infinity;
    for (let i = binStart(b, bins, n); i < binStart(b + 1, bins, n); i++) peak = Math.max(peak, values[i]);
    return peak;
  });
}

const integer = (value) => Math.round(value).toLocaleString("en");

function percent(share) {
  const value = 100 * share, digits = value > 0 && value < 0.095 ? value.toPrecision(1) : value.toFixed(value > 0 && value < 0.95 ? 1 : 0);
  return value > 0 && value < 0.00095 ? "< 0.001\u00a0%" : `${digits}\u00a0%`; // no line break before the sign
}

/** A number with its unit: three significant digits at most. */
function written(value, unit) {
  if (value === null || Number.isNaN(value)) return "–";
  if (unit === "%") return percent(value);
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const number = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return unit === "ratio" ? number : `${number} ${unit}`;
}

/** A token as one would name it in a sentence. */
function named(token) {
  const plain = token.trim();
  return plain || (token.includes("\n") ? "⏎" : "␣");
}

const isDark = () =>
  (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) ===
  "dark";

/** The colour of a number from 0 to 1, as [r, g, b]. */
function ramp(x) {
  const stops = ramp.stops[isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(x, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2), part = place - low;
  return stops[low].map((channel, i) => Math.round(channel + (stops[low + 1][i] - channel) * part));
}
ramp.stops = Object.fromEntries(
  Object.entries(PAGE.ramp).map(([theme, stops]) => [
    theme,
    stops.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16))),
  ]),
);

const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Black or white, whichever is easier to read on a colour. */
function inkOn([r, g, b]) {
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff"; // where both contrast 4.6 to 1
}

const destinationColour = (destination) => destination[isDark() ? "dark" : "light"];
