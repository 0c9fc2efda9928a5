// Axes, labels, edge curves and crosshair of a map, as SVG elements over its canvas.

import { svg } from "./dom.js";
import { integer, logarithmicRange, named, visible } from "./numbers.js";
import { decades, positions } from "./charts.js";

export const LABELLED = 11; // at this many pixels per token or more, each token has a label
const NARROW = 560, PHONE = 480; // pixels of a stage with shorter words, and of one on which the map needs all of the width
const labelledFrom = (width) => (width < PHONE ? 7.5 : LABELLED);
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';

/** Margins around the map, which grow with the zoom to make space for token labels. */
function margins(width, z) {
  const near = Math.min(Math.max((z - Math.log2(labelledFrom(width))) / 0.7 + 1, 0), 1);
  const [from, to] = width < PHONE
    ? [{ left: 50, top: 42, right: 8, bottom: 50 }, { left: 62, top: 70, right: 8, bottom: 50 }]
    : width < NARROW ? [{ left: 60, top: 42, right: 60, bottom: 58 }, { left: 64, top: 62, right: 60, bottom: 58 }]
    : [{ left: 76, top: 46, right: 74, bottom: 76 }, { left: 108, top: 86, right: 74, bottom: 76 }];
  return Object.fromEntries(Object.keys(from).map((side) => [side, from[side] + near * (to[side] - from[side])]));
}

/** The layout of a stage of `width` × `height` pixels, for a view {x, y, z} of `queries` × `keys` tokens. */
export function layoutOf({ width, height, view, queries, keys }) {
  const narrow = width < NARROW, phone = width < PHONE, margin = margins(width, view.z);
  const area = { x: margin.left, y: margin.top, w: Math.max(width - margin.left - margin.right, 40), h: Math.max(height - margin.top - margin.bottom, 40) };
  const scale = 2 ** view.z;
  const origin = { x: area.x + area.w / 2 - view.x * scale, y: area.y + area.h / 2 - view.y * scale };
  const left = Math.max(origin.x, area.x), top = Math.max(origin.y, area.y);
  const right = Math.min(origin.x + keys * scale, area.x + area.w), bottom = Math.min(origin.y + queries * scale, area.y + area.h);
  const frame = { x: left, y: top, w: Math.max(right - left, 0), h: Math.max(bottom - top, 0) };
  // The first and the last token that is at least partly visible.
  const within = (from, to, n) => [Math.max(Math.floor(from + 1e-9), 0), Math.min(Math.ceil(to - 1e-9), n) - 1];
  return {
    width, height, narrow, phone, margin, area, scale, origin, frame, queries, keys, labelled: scale >= labelledFrom(width),
    rows: within((top - origin.y) / scale, (bottom - origin.y) / scale, queries),
    columns: within((left - origin.x) / scale, (right - origin.x) / scale, keys),
  };
}

/** The view that shows the whole map. */
export function fitted({ width, height, queries, keys }) {
  let z = 0;
  // The margins depend on the scale and the scale on the margins; a few iterations converge.
  for (let round = 0; round < 12; round++) {
    const { area } = layoutOf({ width, height, view: { x: 0, y: 0, z }, queries, keys });
    z = Math.log2(Math.min(area.w / keys, area.h / queries, 40));
  }
  return { x: keys / 2, y: queries / 2, z };
}

/**
 * The axes: token labels if they fit, otherwise positions. `tokens`: {queries, keys}; `pointed`: the pair under the
 * crosshair, whose tags replace nearby positions.
 */
export function axes(layout, tokens, pointed = null) {
  const { frame, scale, origin, margin, narrow } = layout, parts = [];
  const size = scale >= 15 ? 12 : Math.min(10.5, Math.max(scale, 8));
  if (layout.labelled) {
    for (let q = layout.rows[0]; q <= layout.rows[1]; q++) {
      const y = origin.y + (q + 0.5) * scale;
      if (y >= frame.y && y <= frame.y + frame.h) parts.push(text(frame.x - 7, y + size * 0.35, fitting(named(tokens.queries[q]), margin.left - 16, size), { anchor: "end", size, fill: INK }));
    }
    for (let k = layout.columns[0]; k <= layout.columns[1]; k++) {
      const x = origin.x + (k + 0.5) * scale;
      if (x >= frame.x && x <= frame.x + frame.w) parts.push(text(x + size * 0.35, frame.y - 7, fitting(named(tokens.keys[k]), margin.top - 26, size), { turn: true, size, fill: INK }));
    }
  } else {
    for (const q of positions(layout.rows, frame.h / 56)) {
      const y = Math.round(origin.y + (q + 0.5) * scale) + 0.5;
      parts.push(line(frame.x - 5, y, frame.x, y, SOFT));
      if (!pointed || Math.abs(q - pointed.query) * scale > 15) parts.push(text(frame.x - 9, y + 4, integer(q), { anchor: "end" }));
    }
    for (const k of positions(layout.columns, frame.w / 84)) {
      const x = Math.round(origin.x + (k + 0.5) * scale) + 0.5;
      const anchor = x + 3.4 * integer(k).length > frame.x + frame.w ? "end" : "middle"; // the entropy's label is beside
      parts.push(line(x, frame.y - 5, x, frame.y, SOFT));
      if (!pointed || Math.abs(k - pointed.key) * scale > 14 + 3.6 * (integer(k).length + integer(pointed.key).length)) parts.push(text(x, frame.y - 10, integer(k), { anchor }));
    }
  }
  const rise = layout.labelled ? margin.top - 12 : 28;
  return [...parts,
    text(frame.x, frame.y - rise, "keys →", { size: 12, bold: true }),
    text(frame.x - 9, frame.y - 10, narrow ? "query ↓" : "queries ↓", { anchor: "end", size: narrow ? 11 : 12, bold: true }),
    rect(Math.round(frame.x) - 0.5, Math.round(frame.y) - 0.5, Math.round(frame.w) + 1, Math.round(frame.h) + 1, { stroke: LINE })];
}

/** The scales of the edge curves: logarithmic for received shares, from zero for entropies. */
export function edgeScales({ received, entropy }) {
  const { low, high } = logarithmicRange(received, 0.02);
  // Start at half of the lowest share, so that the key with this share has a visible bar.
  return { received: { low: low / 2, high }, entropy: { high: Math.max(largest(entropy), 1e-6) } };
}

/** The edge curves: the share that each key receives (bottom) and the entropy of each query (right). */
export function edges(layout, { received, entropy, scales }) {
  const { frame, scale, origin, margin, narrow, phone } = layout;
  const base = frame.y + frame.h + margin.bottom - 8, tall = margin.bottom - 34;
  const { low, high } = scales.received;
  const up = (share) => (share > low ? (tall * Math.log(share / low)) / Math.log(high / low) : 0);
  const below = steps(received, frame.x, frame.w, origin.x, scale, largest).map(([at, share]) => [at, base - up(share)]);
  const ticks = [];
  let free = Infinity; // labels are placed from the top down without overlap
  for (const tick of decades(low, high).reverse()) {
    const y = base - up(tick);
    if (y < base - tall - 1 || y > base + 1 || free - (base - y) < 12) continue;
    free = base - y;
    ticks.push(text(frame.x - 9, y + 4, `${Number((100 * tick).toPrecision(1))}\u00a0%`, { anchor: "end", size: 10.5 }), line(frame.x - 4, Math.round(y) + 0.5, frame.x, Math.round(y) + 0.5, SOFT));
  }
  const from = frame.x + frame.w + 8, wide = margin.right - (narrow ? 12 : 22);
  const beside = phone ? [] : steps(entropy, frame.y, frame.h, origin.y, scale, mean).map(([at, nats]) => [at, from + (wide * nats) / scales.entropy.high]);
  return [
    area(stairs(below, frame.x + frame.w, (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`), `V${base}H${frame.x.toFixed(1)}Z`),
    line(frame.x, base + 0.5, frame.x + frame.w, base + 0.5), ticks,
    text(frame.x, frame.y + frame.h + 17, "received by key"),
    ...(phone ? [] : [area(stairs(beside, frame.y + frame.h, (y, x) => `${x.toFixed(1)} ${y.toFixed(1)}`), `H${from}V${frame.y.toFixed(1)}Z`),
    line(from - 0.5, frame.y, from - 0.5, frame.y + frame.h),
    text(from, frame.y - 22, "entropy", { size: narrow ? 10.5 : 11 }), text(from, frame.y - 8, `${upTo(scales.entropy.high)} ${narrow ? "" : "nats"}`)]),
  ].flat();
}

/** A filled curve; `rest` closes the path. */
const area = (curve, rest) => (curve ? [svg("path", { d: curve + rest, fill: "var(--area)" }), svg("path", { d: curve, fill: "none", stroke: "var(--accent)", "stroke-width": 1.1 })] : []);

/** [[pixel, value], …] along an axis: one entry per token if tokens are at least a pixel wide, else one per pixel. */
function steps(values, start, length, origin, scale, pooled) {
  const found = [];
  if (scale >= 1) {
    const last = Math.min(Math.ceil((start + length - origin) / scale - 1e-9), values.length);
    for (let at = Math.max(Math.floor((start - origin) / scale + 1e-9), 0); at < last; at++) found.push([Math.max(origin + at * scale, start), values[at]]);
    return found;
  }
  for (let pixel = 0; pixel < length; pixel++) {
    const from = Math.max(Math.floor((start + pixel - origin) / scale), 0), to = Math.min(Math.max(Math.floor((start + pixel + 1 - origin) / scale), from + 1), values.length);
    if (from < to) found.push([start + pixel, pooled(values.subarray(from, to))]);
  }
  return found;
}

const largest = (values) => values.reduce((most, value) => (value > most ? value : most));
const mean = (values) => values.reduce((sum, value) => sum + value) / values.length;

/** A step function as an SVG path, until `end` along its axis; `point(along, across)` writes a point. */
const stairs = (points, end, point) => points.map(([at, value], step) => `${step ? "L" : "M"}${point(at, value)}L${point(points[step + 1]?.[0] ?? end, value)}`).join("");

/** A crosshair on a pair of tokens and its bin {queries: [first, last], keys: …}. `pinned` is drawn dashed, without tags. */
export function crosshair(layout, pair, bin, tokens, pinned = false) {
  const { frame, scale, origin, margin } = layout;
  const wide = (bin.keys[1] - bin.keys[0] + 1) * scale, high = (bin.queries[1] - bin.queries[0] + 1) * scale;
  const x = origin.x + bin.keys[0] * scale + wide / 2, y = origin.y + bin.queries[0] * scale + high / 2;
  const inside = { x: x >= frame.x && x <= frame.x + frame.w, y: y >= frame.y && y <= frame.y + frame.h };
  const gap = Math.max(wide, high, 9) / 2 + 1, parts = [];
  const arm = (x1, y1, x2, y2) => { if (x2 > x1 || y2 > y1) parts.push(line(x1, y1, x2, y2, INK, pinned ? "4 3" : null)); };
  const sharp = (at) => Math.round(at) + 0.5, right = frame.x + frame.w + margin.right - 8, bottom = frame.y + frame.h + margin.bottom - 8;
  if (inside.y) arm(frame.x, sharp(y), Math.min(x - gap, frame.x + frame.w), sharp(y)), arm(Math.max(x + gap, frame.x), sharp(y), right, sharp(y));
  if (inside.x) arm(sharp(x), frame.y, sharp(x), Math.min(y - gap, frame.y + frame.h)), arm(sharp(x), Math.max(y + gap, frame.y), sharp(x), bottom);
  if (inside.x && inside.y) {
    const [w, h] = [Math.max(wide, 7) + 1, Math.max(high, 7) + 1];
    parts.push(rect(x - w / 2, y - h / 2, w, h, { stroke: INK, "stroke-width": 2 }));
  }
  if (pinned) return parts;
  const { labelled } = layout, say = (at, names, room) => (labelled ? fitting(named(names[at]), room, TAG, true) : integer(at));
  if (inside.y) parts.push(...tag(frame.x - 4, y, say(pair.query, tokens.queries, margin.left - 18), "end"));
  if (inside.x) parts.push(...tag(x, frame.y - 4, say(pair.key, tokens.keys, margin.top - 28), labelled ? "turned" : "middle"));
  return parts;
}

// ---- text and lines ----------------------------------------------------------------------------------------

const INK = "var(--ink)", SOFT = "var(--soft)", LINE = "var(--line)";
const TAG = 12; // size of the text of a tag

const text = (x, y, words, { anchor = null, turn = false, size = 11, bold = false, fill = SOFT } = {}) => svg("text", {
  x, y, transform: turn ? `rotate(-90 ${x} ${y})` : null, fill, "font-size": size, "font-weight": bold ? 600 : null, "text-anchor": anchor,
}, words);
const line = (x1, y1, x2, y2, stroke = LINE, dash = null) => svg("line", { x1, y1, x2, y2, stroke, "stroke-dasharray": dash });
const rect = (x, y, width, height, looks) => svg("rect", { x, y, width, height, fill: "none", ...looks });

/** A label on a background that covers the axis labels behind it; `place`: "end" left of (x, y), "middle" or "turned" above. */
function tag(x, y, words, place) {
  const wide = widthOf(words, { size: TAG, bold: true }) + 10, high = TAG + 6, looks = { fill: INK, rx: 3 }, style = { size: TAG, bold: true, fill: "var(--panel)" };
  if (place === "turned") return [rect(x - high / 2, y - wide, high, wide, looks), text(x + TAG * 0.35, y - 5, words, { ...style, turn: true })];
  if (place === "end") return [rect(x - wide, y - high / 2, wide, high, looks), text(x - 5, y + TAG * 0.36, words, { ...style, anchor: "end" })];
  return [rect(x - wide / 2, y - high, wide, high, looks), text(x, y - high / 2 + TAG * 0.36, words, { ...style, anchor: "middle" })];
}

const ruler = document.createElement("canvas").getContext("2d");
const measured = new Map(); // cache of text widths and truncations, which every frame needs

function widthOf(text, style) {
  const key = `${style.size ?? 11}/${style.bold ? 1 : 0}/${text}`;
  if (!measured.has(key)) {
    if (measured.size > 20_000) measured.clear();
    ruler.font = `${style.bold ? "600 " : ""}${style.size ?? 11}px ${SANS}`;
    measured.set(key, ruler.measureText(text).width);
  }
  return measured.get(key);
}

/** A token truncated to a width of `room` pixels. */
function fitting(token, room, size, bold = false) {
  const text = visible(token), key = `cut/${room}/${size}/${bold ? 1 : 0}/${text}`;
  if (!measured.has(key)) {
    const characters = [...text.slice(0, 80)];
    let fits = characters.length;
    while (fits > 1 && widthOf(fits < characters.length ? `${characters.slice(0, fits).join("")}…` : text, { size, bold }) > room) fits--;
    measured.set(key, fits < characters.length ? `${characters.slice(0, fits).join("")}…` : text);
  }
  return measured.get(key);
}

/** A range from 0, which is not written as 0–0.0. */
const upTo = (high) => high < 0.001 ? "< 0.001" : `0–${high < 0.095 ? high.toPrecision(1) : high.toFixed(1)}`;
