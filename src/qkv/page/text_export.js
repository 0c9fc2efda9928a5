// Export of the text page as SVG and CSV.

import { svg } from "./dom.js";
import { csvOf, svgKey, svgPicture, svgText } from "./export.js";
import { visible } from "./numbers.js";

/** The visible tokens as on the page. `weights` of weightShades(), null if the shades show received attention. */
export function textSvg({ box, flows, weights, title, note }) {
  const frame = box.getBoundingClientRect(), shapes = [], words = [];
  for (const flow of flows) {
    const pane = flow.element.getBoundingClientRect(), font = getComputedStyle(flow.space);
    for (const token of flow.element.querySelectorAll("[data-at]")) {
      const rects = [...token.getClientRects()].filter(({ width, top, bottom }) => width > 1.5 && bottom <= pane.bottom + 1 && top >= pane.top - 1);
      if (!rects.length) continue;
      const { background, color, boxShadow } = token.style, line = /-(\d+)px/.exec(boxShadow);
      for (const { left, top, width, height } of rects) {
        const x = left - frame.left, y = top - frame.top;
        if (background) shapes.push(svg("rect", { x, y, width, height, rx: 3, fill: background }));
        if (line) shapes.push(svg("rect", { x, y: y + height - Number(line[1]), width, height: Number(line[1]), fill: /rgb\([^)]*\)/.exec(boxShadow)[0] }));
        if (token.classList.contains("pinned") || token.classList.contains("active")) shapes.push(svg("rect", { x, y, width, height, rx: 3, fill: "none", stroke: "var(--second)", "stroke-width": 2 }));
      }
      const { left, top, height } = rects[0], shown = visible(flow.tokens[Number(token.dataset.at)].replace(/^ +| +$/g, ""));
      words.push(svgText(left - frame.left + 1, top - frame.top + height * 0.76, shown, { "font-size": parseFloat(font.fontSize), "font-family": font.fontFamily, fill: color || "var(--ink)" }));
    }
  }
  const entries = weights ? [weights.to && ["it attends to", "var(--accent)"], weights.from && ["attends to it (underlined)", "var(--second)"]].filter(Boolean) : [["received attention", "var(--accent)"]];
  return svgPicture({ width: frame.width, height: frame.height + 34, title, note, parts: [shapes, words, svgKey(0, frame.height + 24, entries)] });
}

/** One row per token; for two texts, first the queries and then the keys. */
export function textCsv({ keys, queries, crossed, received, weights }) {
  const weight = (name, at) => weights?.[name]?.weights[at] ?? null;
  if (!crossed)
    return csvOf(["position", "token", "received", "attended_to", "attends"], keys.map((token, at) => [at, token, received[at], weight("to", at), weight("from", at)]));
  return csvOf(["side", "position", "token", "received", "attended_to", "attends"], [
    ...queries.map((token, at) => ["query", at, token, null, null, weight("from", at)]),
    ...keys.map((token, at) => ["key", at, token, received[at], weight("to", at), null]),
  ]);
}
