// The shades of a text, on its tokens and on the strip beside it.

import { Miniature, paint } from "./charts.js";
import { css, inkOn, ramp, rgbOf } from "./colour.js";
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

/** The columns of the strip beside the text: [{shades, colourOf(level)}, …]. */
export function stripColumns({ received, selected, tones, asKeys, asQueries }) {
  if (!selected) return asKeys ? [{ shades: received, colourOf: ramp }] : [];
  const towards = (tone) => (level) => mixed(tones.paper, tone, level);
  return [
    selected.to && asKeys && { shades: selected.to, colourOf: towards(tones.accent) }, selected.from && asQueries && { shades: selected.from, colourOf: towards(tones.second) },
  ].filter(Boolean);
}

// The strip beside a text: a shaded overview from top to bottom, with the visible part marked.

const FAINT = 0.03; // lower levels are not drawn
const ROWS = 300; // of the strip, at most

export class TextStrip extends Miniature {
  constructor(flow) {
    super({ name: "text-strip", label: "Shaded overview of the whole text; a click scrolls there", ongo: (_, y) => flow.reveal(Math.floor(y * flow.tokens.length)) });
    this.flow = flow;
  }

  /** Draw the columns of stripColumns(). */
  draw(columns) {
    const rows = Math.min(ROWS, this.flow.tokens.length);
    this.show(...columns.map(({ shades, colourOf }) => {
      const canvas = document.createElement("canvas"), levels = Array.from(binPeaks(shades.weights, rows), shades.level);
      paint(canvas, rows, 1, (row) => (levels[row] < FAINT ? 0 : levels[row]), colourOf);
      return canvas;
    }));
    this.scrolled();
  }

  /** Frame the part of the text in view. */
  scrolled() {
    const [first, last] = this.flow.view, n = this.flow.tokens.length;
    this.mark({ top: first / n, bottom: (last + 1) / n });
  }
}
