// Axes, labels, edge curves and crosshair of a map, as shapes that can be drawn on a canvas or as SVG.

import { svg } from "./dom.js";
import { integer, named, visible } from "./numbers.js";
import { decades, niceTicks } from "./charts.js";

export const LABELLED = 11; // at this many pixels per token or more, each token has a label
const SANS = 'system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif';

/** Margins around the map, which grow with the zoom to make space for token labels. */
function margins(width, z) {
  const near = Math.min(Math.max((z - Math.log2(LABELLED)) / 0.7 + 1, 0), 1);
  const [from, to] = width < 560
    ? [{ left: 60, top: 42, right: 50, bottom: 58 }, { left: 64, top: 62, right: 50, bottom: 58 }]
    : [{ left: 76, top: 46, right: 74, bottom: 76 }, { left: 108, top: 86, right: 74, bottom: 76 }];
  return Object.fromEntries(Object.keys(from).map((side) => [side, from[side] + near * (to[side] - from[side])]));
}

/** The layout of a stage of `width` × `height` pixels, for a view {x, y, z} of `queries` × `keys` tokens. */
export function layoutOf({ width, height, view, queries, keys }) {
  const narrow = width < 560, margin = margins(width, view.z);
  const area = { x: margin.left, y: margin.top, w: Math.max(width - margin.left - margin.right, 40), h: Math.max(height - margin.top - margin.bottom, 40) };
  const scale = 2 ** view.z;
  const origin = { x: area.x + area.w / 2 - view.x * scale, y: area.y + area.h / 2 - view.y * scale };
  const left = Math.max(origin.x, area.x), top = Math.max(origin.y, area.y);
  const right = Math.min(origin.x + keys * scale, area.x + area.w), bottom = Math.min(origin.y + queries * scale, area.y + area.h);
  const frame = { x: left, y: top, w: Math.max(right - left, 0), h: Math.max(bottom - top, 0) };
  // The first and the last token that is at least partly visible.
  const within = (from, to, n) => [Math.max(Math.floor(from + 1e-9), 0), Math.min(Math.ceil(to - 1e-9), n) - 1];
  return {
    width, height, narrow, margin, area, scale, origin, frame, queries, keys,
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
 * Shapes of the axes: token labels if they fit, otherwise positions. `tokens`: {queries, keys}; `pointed`: the pair under
 * the crosshair, whose tags replace nearby positions.
 */
export function axes(layout, tokens, colours, pointed = null) {
  const { frame, scale, origin, margin, narrow } = layout, shapes = [];
  const size = scale >= 15 ? 12 : 10.5;
  if (scale >= LABELLED) {
    for (let q = layout.rows[0]; q <= layout.rows[1]; q++) {
      const y = origin.y + (q + 0.5) * scale;
      if (y < frame.y || y > frame.y + frame.h) continue;
      shapes.push({ text: fitting(named(tokens.queries[q]), margin.left - 16, size), x: frame.x - 7, y: y + size * 0.35, anchor: "end", size, fill: colours.ink });
    }
    for (let k = layout.columns[0]; k <= layout.columns[1]; k++) {
      const x = origin.x + (k + 0.5) * scale;
      if (x < frame.x || x > frame.x + frame.w) continue;
      shapes.push({ text: fitting(named(tokens.keys[k]), margin.top - 26, size), x: x + size * 0.35, y: frame.y - 7, turn: true, size, fill: colours.ink });
    }
  } else {
    for (const q of positions(layout.rows, frame.h / 56)) {
      const y = Math.round(origin.y + (q + 0.5) * scale) + 0.5;
      shapes.push({ line: [frame.x - 5, y, frame.x, y], stroke: colours.soft });
      if (!pointed || Math.abs(q - pointed.query) * scale > 15) shapes.push({ text: integer(q), x: frame.x - 9, y: y + 4, anchor: "end", fill: colours.soft });
    }
    for (const k of positions(layout.columns, frame.w / 84)) {
      const x = Math.round(origin.x + (k + 0.5) * scale) + 0.5;
      const anchor = x + 3.4 * integer(k).length > frame.x + frame.w ? "end" : "middle"; // the entropy's label is beside
      shapes.push({ line: [x, frame.y - 5, x, frame.y], stroke: colours.soft });
      if (!pointed || Math.abs(k - pointed.key) * scale > 14 + 3.6 * (integer(k).length + integer(pointed.key).length)) shapes.push({ text: integer(k), x, y: frame.y - 10, anchor, fill: colours.soft });
    }
  }
  const rise = scale >= LABELLED ? margin.top - 12 : 28;
  shapes.push(
    { text: "keys →", x: frame.x, y: frame.y - rise, fill: colours.soft, size: 12, bold: true },
    { text: narrow ? "query ↓" : "queries ↓", x: frame.x - 9, y: frame.y - 10, anchor: "end", fill: colours.soft, size: narrow ? 11 : 12, bold: true },
    { rect: [Math.round(frame.x) - 0.5, Math.round(frame.y) - 0.5, Math.round(frame.w) + 1, Math.round(frame.h) + 1], stroke: colours.line },
  );
  return shapes;
}

/** Round positions in a range, about `most` of them. */
function positions([first, last], most) {
  const rough = niceTicks(Math.max(last - first, 1), Math.max(most, 1))[1];
  const step = Number.isInteger(rough) ? rough : rough < 1 ? 1 : 2 * rough;
  const found = [];
  for (let at = Math.ceil(first / step) * step; at <= last; at += step) found.push(at);
  return found;
}

/** The scales of the edge curves: logarithmic for received shares, from zero for entropies. */
export function edgeScales({ received, entropy }) {
  const positive = received.filter((share) => share > 0).sort();
  const most = positive.length ? positive[positive.length - 1] : 1;
  const low = Math.min(positive[Math.floor(positive.length * 0.02)] ?? most / 10, most / 10);
  const high = entropy.reduce((top, value) => (value > top ? value : top), 1e-6);
  // Start at half of the lowest share, so that the key with this share has a visible bar.
  return { received: { low: Math.max(low / 2, most * 1e-6), high: most }, entropy: { high } };
}

/** Shapes of the edge curves: the share that each key receives (bottom) and the entropy of each query (right). */
export function edges(layout, { received, entropy, scales }, colours) {
  const { frame, scale, origin, margin, narrow } = layout, shapes = [];
  const base = frame.y + frame.h + margin.bottom - 8, tall = margin.bottom - 34;
  const { low, high } = scales.received;
  const up = (share) => (share > low ? (tall * Math.log(share / low)) / Math.log(high / low) : 0);
  const below = steps(received, frame.x, frame.w, origin.x, scale, largest).map(([at, share]) => [at, base - up(share)]);
  if (below.length) {
    const line = stairs(below, frame.x + frame.w, ([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`);
    shapes.push({ path: `${line}V${base}H${frame.x.toFixed(1)}Z`, fill: colours.area }, { path: line, stroke: colours.accent, width: 1.1 });
  }
  shapes.push({ line: [frame.x, base + 0.5, frame.x + frame.w, base + 0.5], stroke: colours.line });
  let free = Infinity; // labels are placed from the top down without overlap
  for (const tick of decades(low, high).reverse()) {
    const y = base - up(tick);
    if (y < base - tall - 1 || y > base + 1 || free - (base - y) < 12) continue;
    free = base - y;
    shapes.push({ text: `${Number((100 * tick).toPrecision(1))}\u00a0%`, x: frame.x - 9, y: y + 4, anchor: "end", fill: colours.soft, size: 10.5 }, { line: [frame.x - 4, Math.round(y) + 0.5, frame.x, Math.round(y) + 0.5], stroke: colours.soft });
  }
  shapes.push({ text: "received by key", x: frame.x, y: frame.y + frame.h + 17, fill: colours.soft, size: 11 });

  const from = frame.x + frame.w + 8, wide = margin.right - (narrow ? 12 : 22);
  const beside = steps(entropy, frame.y, frame.h, origin.y, scale, mean).map(([at, nats]) => [at, from + (wide * nats) / scales.entropy.high]);
  if (beside.length) {
    const line = stairs(beside, frame.y + frame.h, ([y, x]) => `${x.toFixed(1)} ${y.toFixed(1)}`, true);
    shapes.push({ path: `${line}H${from}V${frame.y.toFixed(1)}Z`, fill: colours.area }, { path: line, stroke: colours.accent, width: 1.1 });
  }
  shapes.push(
    { line: [from - 0.5, frame.y, from - 0.5, frame.y + frame.h], stroke: colours.line },
    { text: "entropy", x: from, y: frame.y - 22, fill: colours.soft, size: narrow ? 10.5 : 11 },
    { text: `${upTo(scales.entropy.high)} ${narrow ? "" : "nats"}`, x: from, y: frame.y - 8, fill: colours.soft, size: 11 },
  );
  return shapes;
}

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
    if (from < to) found.push([start + pixel, pooled(values, from, to)]);
  }
  return found;
}

function largest(values, from, to) {
  let most = values[from];
  for (let at = from + 1; at < to; at++) if (values[at] > most) most = values[at];
  return most;
}

function mean(values, from, to) {
  let sum = 0;
  for (let at = from; at < to; at++) sum += values[at];
  return sum / (to - from);
}

/** A step function as an SVG path. */
function stairs(points, end, written, downwards = false) {
  const [first] = points;
  let path = `M${written(first)}`;
  for (let at = 0; at < points.length; at++) {
    const next = at + 1 < points.length ? points[at + 1] : null;
    path += downwards ? `V${(next ? next[0] : end).toFixed(1)}` : `H${(next ? next[0] : end).toFixed(1)}`;
    if (next) path += downwards ? `H${next[1].toFixed(1)}` : `V${next[1].toFixed(1)}`;
  }
  return path;
}

/** Shapes of a crosshair on a pair of tokens and its bin {queries: [first, last], keys: …}. `pinned` is drawn dashed. */
export function crosshair(layout, pair, bin, tokens, colours, pinned = false) {
  const { frame, scale, origin, margin } = layout;
  const cell = {
    x: origin.x + bin.keys[0] * scale, y: origin.y + bin.queries[0] * scale,
    w: (bin.keys[1] - bin.keys[0] + 1) * scale, h: (bin.queries[1] - bin.queries[0] + 1) * scale,
  };
  const x = cell.x + cell.w / 2, y = cell.y + cell.h / 2, shapes = [];
  const inside = { x: x >= frame.x && x <= frame.x + frame.w, y: y >= frame.y && y <= frame.y + frame.h };
  const gap = Math.max(cell.w, cell.h, 9) / 2 + 1, dash = pinned ? [4, 3] : null;
  const line = (x1, y1, x2, y2) => { if (x2 > x1 || y2 > y1) shapes.push({ line: [x1, y1, x2, y2], stroke: colours.ink, dash }); };
  const sharp = (at) => Math.round(at) + 0.5, right = frame.x + frame.w + margin.right - 8, bottom = frame.y + frame.h + margin.bottom - 8;
  if (inside.y) line(frame.x, sharp(y), Math.min(x - gap, frame.x + frame.w), sharp(y)), line(Math.max(x + gap, frame.x), sharp(y), right, sharp(y));
  if (inside.x) line(sharp(x), frame.y, sharp(x), Math.min(y - gap, frame.y + frame.h)), line(sharp(x), Math.max(y + gap, frame.y), sharp(x), bottom);
  if (inside.x && inside.y) {
    const side = (length) => Math.max(length, 7);
    shapes.push({ rect: [x - side(cell.w) / 2 - 0.5, y - side(cell.h) / 2 - 0.5, side(cell.w) + 1, side(cell.h) + 1], stroke: colours.ink, width: 2 });
  }
  // Tags cover the axis labels behind them.
  if (pinned) return shapes;
  const size = 12, labelled = scale >= LABELLED;
  const say = (at, names, room) => (labelled ? fitting(named(names[at]), room, size, true) : integer(at));
  if (inside.y) shapes.push({ tag: say(pair.query, tokens.queries, margin.left - 18), x: frame.x - 4, y, anchor: "end", size, fill: colours.paper, back: colours.ink });
  if (inside.x) shapes.push({ tag: say(pair.key, tokens.keys, margin.top - 28), x, y: frame.y - 4, turn: labelled, anchor: "middle", size, fill: colours.paper, back: colours.ink });
  return shapes;
}

// ---- drawing ---------------------------------------------------------------------------------------------

const font = ({ size = 11, bold = false }) => `${bold ? "600 " : ""}${size}px ${SANS}`;
const ruler = document.createElement("canvas").getContext("2d");
const measured = new Map(); // cache of text widths and truncations, which every frame needs

function widthOf(text, style) {
  const key = `${style.size ?? 11}/${style.bold ? 1 : 0}/${text}`;
  if (!measured.has(key)) {
    if (measured.size > 20_000) measured.clear();
    ruler.font = font(style);
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

/** The box and the text of a tag, which is a label with a background. */
function tagged({ tag, x, y, anchor, turn, size, fill, back }) {
  const wide = widthOf(tag, { size, bold: true }) + 10, high = size + 6;
  const style = { text: tag, size, bold: true, fill };
  if (turn) return [{ rect: [x - high / 2, y - wide, high, wide], fill: back, round: 3 }, { ...style, x: x + size * 0.35, y: y - 5, turn: true }];
  if (anchor === "end") return [{ rect: [x - wide, y - high / 2, wide, high], fill: back, round: 3 }, { ...style, x: x - 5, y: y + size * 0.36, anchor: "end" }];
  return [{ rect: [x - wide / 2, y - high, wide, high], fill: back, round: 3 }, { ...style, x, y: y - high / 2 + size * 0.36, anchor: "middle" }];
}

const flat = (shapes) => shapes.flatMap((shape) => (shape.tag === undefined ? [shape] : tagged(shape)));

/** Draw shapes on a canvas in units of CSS pixels. */
export function drawShapes(context, shapes) {
  for (const shape of flat(shapes)) {
    context.lineWidth = shape.width ?? 1;
    context.strokeStyle = shape.stroke ?? "transparent";
    context.fillStyle = shape.fill ?? "transparent";
    if (shape.line) {
      context.setLineDash(shape.dash ?? []);
      context.beginPath();
      context.moveTo(shape.line[0], shape.line[1]);
      context.lineTo(shape.line[2], shape.line[3]);
      context.stroke();
      context.setLineDash([]);
    } else if (shape.rect) {
      context.beginPath();
      context.roundRect(...shape.rect, shape.round ?? 0);
      if (shape.fill) context.fill();
      if (shape.stroke) context.stroke();
    } else if (shape.path) {
      const path = new Path2D(shape.path);
      if (shape.fill) context.fill(path);
      if (shape.stroke) context.stroke(path);
    } else {
      context.font = font(shape);
      context.textAlign = { middle: "center", end: "right" }[shape.anchor] ?? "left";
      context.save();
      context.translate(shape.x, shape.y);
      if (shape.turn) context.rotate(-Math.PI / 2);
      context.fillText(shape.text, 0, 0);
      context.restore();
    }
  }
}

/** The same shapes as SVG elements. */
export function shapesAsSvg(shapes) {
  return flat(shapes).map((shape) => {
    const paint = { fill: shape.fill ?? "none", stroke: shape.stroke, "stroke-width": shape.stroke && (shape.width ?? 1) };
    if (shape.line) {
      const [x1, y1, x2, y2] = shape.line;
      return svg("line", { x1, y1, x2, y2, ...paint, "stroke-dasharray": shape.dash?.join(" ") });
    }
    if (shape.rect) {
      const [x, y, width, height] = shape.rect;
      return svg("rect", { x, y, width, height, rx: shape.round, ...paint });
    }
    if (shape.path) return svg("path", { d: shape.path, ...paint });
    return svg("text", {
      x: shape.turn ? 0 : shape.x, y: shape.turn ? 0 : shape.y, transform: shape.turn ? `translate(${shape.x} ${shape.y}) rotate(-90)` : null,
      fill: shape.fill, "font-size": shape.size ?? 11, "font-weight": shape.bold ? 600 : null, "text-anchor": shape.anchor,
    }, shape.text);
  });
}

/** A range from 0, which is not written as 0–0.0. */
const upTo = (high) => high < 0.001 ? "< 0.001" : `0–${high < 0.095 ? high.toPrecision(1) : high.toFixed(1)}`;
