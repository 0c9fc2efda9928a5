// The strip beside a text: a shaded overview from top to bottom, with the visible part marked.

import { css } from "./colour.js";
import { h } from "./dom.js";
import { binPeaks } from "./numbers.js";

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
