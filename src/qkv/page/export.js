// Export: what is on the screen as self-contained SVG files, PNG rendered from them, and CSV.

import { colourOf } from "./colour.js";
import { svg } from "./dom.js";
import { visible } from "./numbers.js";

const PADDING = 24, BETWEEN = 18; // around the picture, and between its elements
const LARGEST = 16_000; // pixels a side that every browser's canvas can hold
const CONTROLS = "select, input, textarea, .quiet"; // are left out
const PAINT = [ // properties that style sheets may give to the parts of a drawing
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "visibility", "text-anchor", "font-family", "font-size", "font-weight",
];
const EDGES = { // the ends of the borders of a box
  Top: ({ left, top, right }) => [left, top, right, top], Bottom: ({ left, bottom, right }) => [left, bottom, right, bottom],
  Left: ({ left, top, bottom }) => [left, top, left, bottom], Right: ({ right, top, bottom }) => [right, top, right, bottom],
};
const EVERYWHERE = { left: -Infinity, top: -Infinity, right: Infinity, bottom: Infinity };
const pen = document.createElement("canvas").getContext("2d");

/**
 * An SVG file as a string: a title and a note above `elements` of the page as they look on the screen, one below the other.
 * Boxes, texts and drawings are vectors, and canvases are images; the file needs no style sheet.
 */
export function pictureOf({ elements, title, note = "" }) {
  const boxes = elements.map((element) => element.getBoundingClientRect());
  const width = Math.ceil(Math.max(...boxes.map((box) => box.width))), height = Math.ceil(boxes.reduce((sum, box) => sum + box.height + BETWEEN, -BETWEEN));
  const titles = wrapped(title, Math.max(Math.floor(width / 9.8), 18)), notes = note ? wrapped(note, Math.max(Math.floor(width / 6.4), 24)) : [];
  const head = titles.length * 21 + notes.length * 17 + 14, whole = { width: width + 2 * PADDING, height: height + head + 2 * PADDING };
  const line = (words, y, attributes) => svg("text", { x: PADDING, y: PADDING + 14 + y, ...attributes }, words);
  let top = PADDING + head;
  const parts = elements.map((element, at) => {
    const part = svg("g", { transform: `translate(${PADDING - boxes[at].left} ${top - boxes[at].top})` }, [...drawn(element, EVERYWHERE)]);
    top += boxes[at].height + BETWEEN;
    return part;
  });
  const drawing = svg("svg", { ...whole, viewBox: `0 0 ${whole.width} ${whole.height}`, "font-family": getComputedStyle(document.body).fontFamily },
    svg("title", {}, printable(title)), note ? svg("desc", {}, printable(note)) : null, svg("rect", { ...whole, fill: colourOf("--paper") }),
    titles.map((words, at) => line(words, 21 * at, { "font-size": 16, "font-weight": 600, fill: colourOf("--ink") })),
    notes.map((words, at) => line(words, 21 * titles.length + 17 * at, { "font-size": 12.5, fill: colourOf("--soft") })), parts);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(drawing)}\n`;
}

/** An element and what it holds as SVG, where they are in the window. `seen`: the part of the window that no ancestor hides. */
function* drawn(element, seen) {
  const style = getComputedStyle(element), frame = element.getBoundingClientRect();
  if (style.display === "none" || style.visibility === "hidden" || element.matches(CONTROLS)) return;
  if (element.matches("canvas, svg")) {
    if (overlap(frame, seen)) yield element.matches("svg") ? copied(element, frame) : imageOf(element, frame, style.imageRendering);
    return;
  }
  for (const box of element.getClientRects()) yield* boxed(overlap(box, seen), style);
  const inside = style.overflowX === "visible" ? seen : overlap(frame, seen);
  if (!inside) return;
  for (const node of element.childNodes) {
    if (node.nodeType === Node.TEXT_NODE) yield* printed(node, style, inside);
    else if (node.nodeType === Node.ELEMENT_NODE) yield* drawn(node, inside);
  }
}

/** The part of a box that is seen, or null. */
function overlap(box, seen) {
  const left = Math.max(box.left, seen.left), top = Math.max(box.top, seen.top), right = Math.min(box.right, seen.right), bottom = Math.min(box.bottom, seen.bottom);
  return right > left && bottom > top ? { left, top, right, bottom } : null;
}

/** The background of a box, its borders, the line along its lower edge that an inset shadow makes, and its outline. */
function* boxed(box, style) {
  if (!box) return;
  const { left: x, top: y, right, bottom } = box, area = { x, y, width: right - x, height: bottom - y, rx: parseFloat(style.borderTopLeftRadius) || 0 };
  if (style.backgroundColor !== "rgba(0, 0, 0, 0)") yield svg("rect", { ...area, fill: style.backgroundColor });
  const [, shade, up] = /^(rgba?\([^)]*\)) 0px -([\d.]+)px 0px 0px inset$/.exec(style.boxShadow) ?? [];
  if (shade) yield svg("rect", { ...area, y: bottom - up, height: Number(up), rx: 0, fill: shade });
  for (const [edge, ends] of Object.entries(EDGES)) {
    const [x1, y1, x2, y2] = ends(box), width = parseFloat(style[`border${edge}Width`]);
    if (width) yield svg("line", { x1, y1, x2, y2, stroke: style[`border${edge}Color`], "stroke-width": width });
  }
  if (style.outlineStyle === "solid") yield svg("rect", { ...area, fill: "none", stroke: style.outlineColor, "stroke-width": parseFloat(style.outlineWidth) });
}

/** The lines of a text, without the words that are hidden. */
function* printed(node, style, seen) {
  const range = document.createRange(), lines = [], turned = style.writingMode !== "horizontal-tb"; // then it reads upwards
  for (const { 0: word, index } of node.data.matchAll(/\S+/g)) {
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const { left, top, right, bottom, width } = range.getBoundingClientRect(), last = lines.at(-1);
    if (!width || left < seen.left - 1 || right > seen.right + 1 || top < seen.top - 2 || bottom > seen.bottom + 2) continue;
    if (last?.top === top) Object.assign(last, { text: `${last.text} ${word}`, left: Math.min(last.left, left), right: Math.max(last.right, right) });
    else lines.push({ text: word, left, top, right, bottom });
  }
  pen.font = `${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
  const ascent = pen.measureText("x").fontBoundingBoxAscent;
  const font = { fill: style.color, "font-family": style.fontFamily, "font-size": style.fontSize, "font-weight": style.fontWeight, "font-style": style.fontStyle };
  for (const { text, left, top, right, bottom } of lines)
    yield turned
      ? svg("text", { ...font, transform: `translate(${left + ascent} ${bottom}) rotate(-90)` }, printable(text))
      : svg("text", { ...font, x: left, y: top + ascent, textLength: right - left, lengthAdjust: "spacingAndGlyphs" }, printable(text));
}

/** A canvas as an image. */
function imageOf(canvas, { left: x, top: y, width, height }, rendering) {
  return svg("image", { x, y, width, height, href: canvas.toDataURL("image/png"), preserveAspectRatio: "none", "image-rendering": rendering });
}

/** A copy of a drawing with the colours and fonts that style sheets give it. */
function copied(drawing, { left: x, top: y, width, height }) {
  const copy = drawing.cloneNode(true), parts = (root) => [root, ...root.querySelectorAll("*")], originals = parts(drawing);
  parts(copy).forEach((part, at) => {
    const style = getComputedStyle(originals[at]);
    for (const name of ["class", "style"]) part.removeAttribute(name);
    for (const name of PAINT) part.setAttribute(name, style.getPropertyValue(name));
  });
  for (const [name, value] of Object.entries({ x, y, width, height })) copy.setAttribute(name, value);
  return copy;
}

/** A text without the characters that XML forbids. */
const printable = (text) => visible(text).toWellFormed();

/** Render an SVG file as PNG at `scale` pixels per unit. */
export async function pngOf(drawing, scale = 2) {
  const url = URL.createObjectURL(new Blob([drawing], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = url;
    try {
      await image.decode();
    } catch {
      throw new Error("The picture could not be rendered as PNG; the SVG can still be saved.");
    }
    const canvas = document.createElement("canvas");
    const fitting = Math.min(scale, LARGEST / image.naturalWidth, LARGEST / image.naturalHeight);
    canvas.width = Math.round(image.naturalWidth * fitting);
    canvas.height = Math.round(image.naturalHeight * fitting);
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    const png = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    if (!png) throw new Error("The picture is too large for a PNG; save it as SVG.");
    return png;
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Save a blob as a file through the browser. */
export function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000); // the browser may still be reading it
}

/** A table as CSV (RFC 4180): null and NaN are empty cells, numbers have up to seven digits. */
export function csvOf(columns, rows) {
  const cell = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "";
    const text = typeof value === "number" && !Number.isInteger(value) ? String(+value.toPrecision(7)) : String(value);
    return /[",\r\n]|^\s|\s$/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  };
  return [columns, ...rows].map((row) => Array.from(row, cell).join(",")).join("\r\n") + "\r\n";
}

/** Break a text into lines of about `most` characters. */
function wrapped(text, most) {
  const lines = [""];
  for (const word of printable(text).split(/\s+/)) {
    if (lines.at(-1) && lines.at(-1).length + word.length + 1 > most) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) ? " " : ""}${word}`;
  }
  return lines;
}
