// Export: self-contained SVG files, PNG rendered from them, and CSV.

import { svg } from "./dom.js";
import { visible } from "./numbers.js";

const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif';
const MARGIN = 24;
const LARGEST = 16_000; // pixels a side that every browser's canvas can hold

/** The colour of a CSS variable in the current theme: colourOf("--ink"). */
export function colourOf(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

/**
 * An SVG file as a string: a title and a note above `parts`, which are elements of `svg()` in a box of width × height.
 * Colours such as "var(--ink)" are replaced by their values, so that the file needs no style sheet.
 */
export function svgPicture({ width, height, title, note = "", parts }) {
  const perLine = Math.max(Math.floor(width / 6.4), 24);
  const notes = note ? wrapped(note, perLine) : [], titles = wrapped(title, Math.max(Math.floor(width / 9), 18));
  const head = titles.length * 21 + notes.length * 17 + 14;
  const whole = { width: width + 2 * MARGIN, height: height + head + 2 * MARGIN };
  const drawing = svg("svg", { ...whole, viewBox: `0 0 ${whole.width} ${whole.height}`, "font-family": FONT, "font-size": 12, fill: "var(--ink)" },
    svg("title", {}, title),
    note ? svg("desc", {}, note) : null,
    svg("rect", { ...whole, fill: "var(--paper)" }),
    titles.map((line, index) => svgText(MARGIN, MARGIN + 14 + 21 * index, line, { "font-size": 16, "font-weight": 600 })),
    notes.map((line, index) => svgText(MARGIN, MARGIN + 14 + 21 * titles.length + 17 * index, line, { "font-size": 12.5, fill: "var(--soft)" })),
    svg("g", { transform: `translate(${MARGIN} ${MARGIN + head})` }, parts));
  selfContained(drawing);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(drawing)}\n`;
}

/** One line of text whose baseline starts at (x, y). */
export function svgText(x, y, text, attributes = {}) {
  return svg("text", { x, y, ...attributes }, String(text));
}

/** A canvas as an image of width × height at (x, y) whose pixels stay sharp when enlarged. */
export function svgImage(canvas, { x = 0, y = 0, width = canvas.width, height = canvas.height } = {}) {
  return svg("image", { x, y, width, height, href: canvas.toDataURL("image/png"), preserveAspectRatio: "none", "image-rendering": "pixelated" });
}

/** A copy of a drawing at (x, y). */
export function svgCopy(element, { x, y }) {
  const copy = element.cloneNode(true);
  copy.setAttribute("x", x);
  copy.setAttribute("y", y);
  return copy;
}

/** A legend in a drawing: a row of swatches with labels that starts at (x, y); entries are [label, colour]. */
export function svgKey(x, y, entries) {
  let at = x;
  return entries.map(([word, colour]) => {
    const parts = [svg("rect", { x: at, y: y - 9, width: 11, height: 11, rx: 2, fill: colour }), svgText(at + 17, y, word, { fill: "var(--soft)" })];
    at += 34 + 6.6 * word.length;
    return parts;
  });
}

/** A colour bar that starts at (x, y), with labels at both ends; `colours` from low to high. */
export function svgRamp(x, y, colours, low, high) {
  const width = 96 / colours.length;
  return [
    svgText(x, y, low, { fill: "var(--soft)" }),
    colours.map((colour, index) => svg("rect", { x: x + 7 * low.length + 6 + index * width, y: y - 9, width: width + 0.3, height: 10, fill: colour })),
    svgText(x + 7 * low.length + 110, y, high, { fill: "var(--soft)" }),
  ];
}

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
  for (const word of text.split(/\s+/)) {
    if (lines.at(-1) && lines.at(-1).length + word.length + 1 > most) lines.push(word);
    else lines[lines.length - 1] += `${lines.at(-1) ? " " : ""}${word}`;
  }
  return lines;
}

/** Replace CSS variables by colours, and characters that XML forbids by visible marks. */
function selfContained(drawing) {
  for (const element of [drawing, ...drawing.querySelectorAll("*")]) {
    for (const { name, value } of [...element.attributes]) {
      if (value.includes("var(--")) element.setAttribute(name, value.replace(/var\((--[\w-]+)\)/g, (_, variable) => colourOf(variable)));
      else if (name !== "href" && name !== "d") element.setAttribute(name, written(value));
    }
    for (const node of element.childNodes) if (node.nodeType === Node.TEXT_NODE) node.data = written(node.data);
  }
  function written(text) {
    return visible(text).toWellFormed();
  }
}
