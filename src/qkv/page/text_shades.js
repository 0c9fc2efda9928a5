// The shades of a text, on its tokens and on the strip beside it.

import { css, inkOn, ramp, rgbOf } from "./colour.js";
import { h } from "./dom.js";
import { binPeaks } from "./numbers.js";

const MIN_LEVEL = 0.02; // lower levels are not shown

/**
 * The exponent that maps the mean of the nonzero weights to a pale level, so that differences stay visible whether the
 * largest weight is twice the mean or a thousand times. It is at least `least`, because a smaller exponent would make
 * negligible weights visible.
 */
function exponentFor(weights, top, least) {
  let sum = 0, count = 0;
  for (const weight of weights) if (weight > 0) sum += weight, count++;
  return count ? Math.min(Math.max(Math.log(0.2) / Math.log(Math.min(sum / count / top, 0.9)), least), 2) : 1;
}

/** Weights with the largest one, and the level from 0 to 1 at which a weight is shown. */
function scaled(weights, least) {
  const top = weights.reduce((most, weight) => (weight > most ? weight : most), 1e-12), exponent = exponentFor(weights, top, least);
  return { weights, top, level: (weight) => (weight / top) ** exponent };
}

/** Shades of the shares that keys receive. */
export const receivedShades = (received) => scaled(received, 0.35);

/** Shades of the weights [{to, from}, …] of several tokens, the largest for each other token: {to, from}, or null. */
export function weightShades(selected) {
  const largest = (name) => {
    const lists = selected.map((weights) => weights[name]).filter(Boolean);
    if (!lists.length) return null;
    return scaled(lists.length < 2 ? lists[0] : lists[0].map((_, at) => lists.reduce((most, list) => Math.max(most, list[at]), 0)), 0.5);
  };
  return selected.length ? { to: largest("to"), from: largest("from") } : null;
}

/** The colours of the theme from which shades are mixed. */
export function tonesOf() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["paper", "accent", "second", "ink"].map((name) => [name, rgbOf(style.getPropertyValue(`--${name}`).trim())]));
}

const mixed = (from, to, part) => from.map((channel, at) => Math.round(channel + (to[at] - channel) * Math.min(Math.max(part, 0), 1)));

/** The look of a token at a level of received attention: {background, ink, line}, or null. */
export function receivedLook(level) {
  if (!(level > MIN_LEVEL)) return null;
  const colour = ramp(level);
  return { background: css(colour), ink: inkOn(colour), line: "" };
}

/** The look of a token by its levels of being attended to (filled) and of attending (underlined). */
export function weightLook(filled, lined, tones) {
  if (filled < MIN_LEVEL && lined < MIN_LEVEL) return null;
  const colour = mixed(tones.paper, tones.accent, filled);
  return {
    background: filled >= MIN_LEVEL ? css(colour) : "",
    ink: filled >= MIN_LEVEL ? inkOn(colour) : "",
    line: lined >= MIN_LEVEL ? `inset 0 ${-Math.max(1, Math.round(5 * lined))}px ${css(mixed(tones.paper, tones.second, 0.25 + 0.75 * lined))}` : "",
  };
}

/** The columns of the strip beside the text: [{shades, part: [from, to] of the width, colourOf(level)}, …]. */
export function stripColumns({ received, selected, tones, asKeys, asQueries }) {
  if (!selected) return asKeys ? [{ shades: received, part: [0, 1], colourOf: ramp }] : [];
  const both = asKeys && asQueries, columns = [];
  if (selected.to && asKeys) columns.push({ shades: selected.to, part: [0, both ? 0.5 : 1], colourOf: (level) => mixed(tones.paper, tones.accent, level) });
  if (selected.from && asQueries) columns.push({ shades: selected.from, part: [both ? 0.5 : 0, 1], colourOf: (level) => mixed(tones.paper, tones.second, level) });
  return columns;
}

// The strip beside a text: a shaded overview from top to bottom, with the visible part marked.

const FAINT = 0.03; // lower levels are not drawn

export class TextStrip {
  constructor(flow) {
    this.flow = flow;
    this.element = h("canvas", { class: "text-strip", role: "img", "aria-label": "Shaded overview of the whole text; a click scrolls there" });
    this.element.addEventListener("pointerdown", (event) => { this.element.setPointerCapture(event.pointerId); this.jump(event); });
    this.element.addEventListener("pointermove", (event) => { if (event.buttons) this.jump(event); });
  }

  jump(event) {
    const box = this.element.getBoundingClientRect(), part = Math.min(Math.max((event.clientY - box.top) / box.height, 0), 0.9999);
    this.flow.reveal(Math.floor(part * this.flow.tokens.length));
  }

  /** Draw the `columns` of stripColumns(). */
  draw(columns, tones) {
    const { element, flow } = this, ratio = devicePixelRatio || 1, n = flow.tokens.length;
    const width = Math.round(element.clientWidth * ratio), height = Math.round(element.clientHeight * ratio);
    if (!width || !height) return;
    if (element.width !== width || element.height !== height) Object.assign(element, { width, height });
    const context = element.getContext("2d");
    context.fillStyle = css(tones.paper);
    context.fillRect(0, 0, width, height);
    const rows = Math.min(Math.floor(height / (2 * ratio)), n);
    for (const { shades, part, colourOf } of columns) {
      const [left, right] = part.map((at) => Math.floor(at * width)), peaks = binPeaks(shades.weights, rows);
      for (let row = 0; row < rows; row++) {
        const level = shades.level(peaks[row]), from = Math.floor((row * height) / rows);
        if (level < FAINT) continue;
        context.fillStyle = css(colourOf(level));
        context.fillRect(left, from, right - left, Math.ceil(((row + 1) * height) / rows) - from);
      }
    }
    const [first, last] = flow.view, line = 2 * ratio, from = (first / n) * height, tall = Math.max(((last + 1 - first) / n) * height, 6 * ratio);
    context.strokeStyle = css(tones.ink);
    context.lineWidth = line;
    context.strokeRect(line / 2, Math.min(from, height - tall) + line / 2, width - line, Math.max(tall - line, 1));
  }
}
