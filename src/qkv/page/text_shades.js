// How tokens of a text are shaded: by what they receive, or by how they are tied to the chosen ones.

import { css, inkOn, ramp, rgbOf } from "./colour.js";

const LEAST = 0.02; // levels below it are not shown

/**
 * The power that makes the mean of what is not zero pale, and so keeps differences visible: the largest may be twice
 * the mean, or a thousand times. Not below `least`, where next to nothing would look like something.
 */
function bent(weights, top, least) {
  let sum = 0, count = 0;
  for (const weight of weights) if (weight > 0) sum += weight, count++;
  return count ? Math.min(Math.max(Math.log(0.2) / Math.log(Math.min(sum / count / top, 0.9)), least), 2) : 1;
}

/** Weights with their largest, and the level from 0 to 1 that a weight is shown with. */
function scaled(weights, least) {
  const top = weights.reduce((most, weight) => (weight > most ? weight : most), 1e-12), bend = bent(weights, top, least);
  return { weights, top, level: (weight) => (weight / top) ** bend };
}

/** Shares that the keys receive. */
export const receivedShades = (received) => scaled(received, 0.35);

/** Ties [{to, from}, …] of several tokens, of each pair the largest: {to, from}, null where there are none. */
export function tieShades(ties) {
  const largest = (name) => {
    const lists = ties.map((tie) => tie[name]).filter(Boolean);
    if (!lists.length) return null;
    return scaled(lists.length < 2 ? lists[0] : lists[0].map((_, at) => lists.reduce((most, list) => Math.max(most, list[at]), 0)), 0.5);
  };
  return ties.length ? { to: largest("to"), from: largest("from") } : null;
}

/** The colours of the theme that are mixed. */
export function tonesOf() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["paper", "accent", "warm"].map((name) => [name, rgbOf(style.getPropertyValue(`--${name}`).trim())]));
}

const mixed = (from, to, part) => from.map((channel, at) => Math.round(channel + (to[at] - channel) * Math.min(Math.max(part, 0), 1)));

/** The look of a token that receives so much: {background, ink, line}, or null. */
export function receivedLook(level) {
  if (!(level > LEAST)) return null;
  const colour = ramp(level);
  return { background: css(colour), ink: inkOn(colour), line: "" };
}

/** The look of a token that is attended to at one level (filled) and attends at another (underlined). */
export function tieLook(filled, lined, tones) {
  if (filled < LEAST && lined < LEAST) return null;
  const colour = mixed(tones.paper, tones.accent, filled);
  return {
    background: filled >= LEAST ? css(colour) : "",
    ink: filled >= LEAST ? inkOn(colour) : "",
    line: lined >= LEAST ? `inset 0 ${-Math.max(1, Math.round(5 * lined))}px ${css(mixed(tones.paper, tones.warm, 0.25 + 0.75 * lined))}` : "",
  };
}

/** The columns of a strip beside the text: [{shades, part: [from, to] of its width, colourOf(level)}, …]. */
export function stripColumns({ received, ties, tones, asKeys, asQueries }) {
  if (!ties) return asKeys ? [{ shades: received, part: [0, 1], colourOf: ramp }] : [];
  const both = asKeys && asQueries, columns = [];
  if (ties.to && asKeys) columns.push({ shades: ties.to, part: [0, both ? 0.5 : 1], colourOf: (level) => mixed(tones.paper, tones.accent, level) });
  if (ties.from && asQueries) columns.push({ shades: ties.from, part: [both ? 0.5 : 0, 1], colourOf: (level) => mixed(tones.paper, tones.warm, level) });
  return columns;
}
