// Export of the live page as SVG and CSV.

import { svg } from "./dom.js";
import { csvOf, svgImage, svgPicture, svgText } from "./export.js";
import { editWords, headAt, longName } from "./live_edits.js";
import { headlineOf, nextRows, spaced } from "./live_next.js";
import { truncated, percent, visible } from "./numbers.js";

const SIDE = 260; // side of a map in pixels
const WIDE = 300; // width of the bars

const plainText = (parts) => parts.map((part) => part.textContent ?? part).join("");

/** The probabilities of the next token, and the two maps; `canvases`: those of the page. */
export function liveSvg(answer, { live, edits, canvases }) {
  const [headline, likeliest] = headlineOf(answer).map(plainText), rows = nextRows(answer), { edited } = answer;
  const bars = rows.flatMap(({ token, before, after }, i) => {
    const y = 22 + i * 26;
    return [
      svgText(96, y + 12, truncated(spaced(token), 13), { "text-anchor": "end", "font-family": "monospace" }),
      svg("rect", { x: 104, y, width: Math.max(130 * before, 0.5), height: 7, fill: "var(--soft)" }), svg("rect", { x: 104, y: y + 8, width: Math.max(130 * after, 0.5), height: 7, fill: "var(--accent)" }),
      svgText(110 + 130 * Math.max(before, after), y + 12, edited ? `${percent(before)} → ${percent(after)}` : percent(after), { "font-size": 11 }),
    ];
  });
  const maps = canvases.flatMap((canvas, i) => {
    const x = WIDE + 40 + i * (SIDE + 20);
    return [
      svgText(x, 10, `${i ? "With the edits" : "As trained"}: ${longName(answer.at)}`, { "font-weight": 600 }), svgImage(canvas, { x, y: 22, width: SIDE, height: SIDE }),
      svg("rect", { x, y: 22, width: SIDE, height: SIDE, fill: "none", stroke: "var(--line)" }),
    ];
  });
  return svgPicture({
    width: WIDE + 2 * SIDE + 60, height: Math.max(SIDE + 24, 24 + rows.length * 26), title: edited ? headline : `${live.model} as trained`,
    note: `${likeliest} Text: “${visible(answer.text.slice(-120))}”. ${editWords(edits, live)}`,
    parts: [svgText(0, 10, edited ? "Next token: as trained (grey), edited (blue)" : "Next token", { "font-weight": 600 }), bars, maps],
  });
}

/** Probabilities, head statistics and weights before and after the edits. */
export function liveCsv(answer) {
  const { divergence, next, tokens, maps: [before, after], at } = answer, n = tokens.length;
  const perHead = (name, words) => answer[name].before.flatMap((layer, l) => layer.map((value, head) => [words, longName(`${l}.${head}`), value, answer[name].after[l][head]]));
  return csvOf(["what", "name", "before", "after"], [
    ["KL divergence of the next token (nats)", "", 0, divergence],
    ...next.before.map(({ token, probability }, i) => ["probability of the next token", token, probability, next.after[i].probability]),
    ...perHead("sink", "mean weight on the first token"), ...perHead("entropy", "mean entropy (nats)"),
    ...tokens.flatMap((query, i) => tokens.slice(0, i + 1).map((key, j) => [`weight in ${longName(at)}`, `${i} ${query} → ${j} ${key}`, before[i * n + j], after[i * n + j]])),
  ]);
}

/** A name for exported files. */
export const liveFileName = (answer, live) => `live-${live.model}-layer${headAt(answer.at).join("-head")}`;
