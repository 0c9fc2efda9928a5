// Edits of heads and the next token in words, and the code of edits in an address.

import { h } from "./dom.js";
import { named, percent, visible } from "./numbers.js";

const CODES = { softmax: "n", "off-by-one": "o", sigmoid: "s" };

/** Parse the position "layer.head" of a head into [layer, head]. */
export const headAt = (at) => at.split(".").map(Number);

/** The short and the long name of a head. */
export const shortName = (at) => headAt(at).map((number, axis) => `${"LH"[axis]}${number}`).join(" · ");
export const longName = (at) => headAt(at).map((number, axis) => `${["Layer", "head"][axis]} ${number}`).join(", ");

/** All heads of a model. */
export const headsOf = ({ layers, heads }) => Array.from({ length: layers * heads }, (_, i) => `${Math.floor(i / heads)}.${i % heads}`);

export function isHead(at, { layers, heads }) {
  const [layer, head, ...more] = headAt(at);
  return !more.length && Number.isInteger(layer) && Number.isInteger(head) && layer >= 0 && head >= 0 && layer < layers && head < heads;
}

/** The setting of a head, {normalizer, temperature}. */
export const settingOf = (edits, at, own) => edits.get(at) ?? { normalizer: own, temperature: 1 };
export const settingWords = ({ normalizer, temperature }) => `${normalizer}${temperature === 1 ? "" : `, temperature ${temperature}`}`;

/** Edits as a short code: o1-0.3-1.2 is off-by-one in two heads, s0.5-all a sigmoid of temperature 0.5 in all heads; codes are joined by "_". */
export function codeOf(edits, { layers, heads }) {
  const groups = Map.groupBy(edits, ([, { normalizer, temperature }]) => `${CODES[normalizer]}${temperature}`);
  return [...groups].map(([code, found]) => `${code}-${found.length === layers * heads ? "all" : found.map(([at]) => at).join("-")}`).join("_");
}

/** Parse a code of `codeOf`; invalid parts are ignored. */
export function editsOf(code, live) {
  const found = new Map();
  for (const group of code.split("_").filter(Boolean)) {
    const [first, ...places] = group.split("-"), temperature = Number(first.slice(1));
    const normalizer = live.normalizers.find((name) => CODES[name] === first[0]);
    if (!normalizer || !(temperature >= 0.1 && temperature <= 10)) continue;
    for (const at of places[0] === "all" ? headsOf(live) : places) if (isHead(at, live)) found.set(at, { normalizer, temperature });
  }
  return found;
}

/** Edits in words. */
export function editWords(edits, { layers, heads }) {
  if (!edits.size) return "";
  const groups = Map.groupBy(edits, ([, edit]) => settingWords(edit));
  return [...groups].map(([words, found]) => `${words}: ${found.length === layers * heads ? "all heads" : found.map(([at]) => shortName(at)).join(", ")}`).join("; ") + ".";
}

// The probabilities of the next token, as trained and with the edits, and a headline about the change.

export const SHOWN = 10; // candidates for the next token that are shown

/** The effect of the edits on the next token: [size of the change, likeliest token], each a list of strings and elements. */
export function headlineOf({ divergence, before, after, edited }) {
  if (!edited) return [["The model is as trained."], ["Select heads and choose another normalizer or temperature to see the effect here."]];
  const [was, is] = [before, after].map(({ next }) => next.reduce((best, entry, i) => (entry.probability > next[best].probability ? i : best), 0));
  const size = divergence < 0.005 ? "hardly changes" : divergence < 0.1 ? "changes a little" : divergence < 1 ? "changes clearly" : "changes completely";
  const change = `${percent(before.next[was].probability)} → ${percent(after.next[was].probability)}`;
  const likeliest = was === is
    ? [quoted(before.next[was].token), ` remains the likeliest token: ${change}.`]
    : [quoted(after.next[is].token), ` (${percent(after.next[is].probability)}) replaces `, quoted(before.next[was].token), ` (${change}) as the likeliest token.`];
  return [[`The prediction ${size} (${nats(divergence)}).`], likeliest];
}

/** A quoted token, isolated because its script may run from right to left. */
export const quoted = (token) => h("bdi", {}, `“${named(token)}”`);

/** The likeliest next tokens of an answer: [{token, before, after}, …]. */
export const nextRows = ({ before, after }) => after.next.map(({ token, probability }, i) => ({ token, after: probability, before: before.next[i].probability })).slice(0, SHOWN);

/** The likeliest tokens of a sampling step, including the sampled one: [{token, after, chosen}, …]. */
export function sampledRows({ top, token, probability }) {
  const listed = top.slice(0, SHOWN), unlikely = !listed.some((entry) => entry.token === token);
  return [...listed.slice(0, unlikely ? SHOWN - 1 : SHOWN), ...(unlikely ? [{ token, probability }] : [])]
    .map((entry) => ({ token: entry.token, after: entry.probability, chosen: entry.token === token }));
}

/** Probabilities of tokens as bars; `paired`: before and after one above the other. */
export function nextBars(rows, paired) {
  const top = Math.max(...rows.flatMap(({ before = 0, after }) => [before, after]), 1e-9);
  const bar = (kind, value) => h("i", { class: `live-bar live-${kind}`, style: { width: `${(100 * value) / top}%` } });
  return h("div", {},
    paired ? h("ul", { class: "key live-key" }, h("li", {}, h("i", { class: "live-before" }), "as trained"), h("li", {}, h("i", { class: "live-after" }), "with the edits")) : null,
    h("ol", { class: "live-bars" }, rows.map(({ token, before, after, chosen }) =>
      h("li", { class: chosen ? "live-drawn" : null },
        h("code", { title: spaced(token) }, h("bdi", {}, spaced(token))),
        h("span", { class: "live-tracks" }, paired ? bar("before", before) : null, bar("after", after)),
        h("span", { class: "live-values" }, paired ? [percent(before), h("span", { class: "live-arrow" }, " → "), h("b", {}, percent(after))] : h("b", {}, percent(after)))))));
}

/** A token with visible spaces, because several candidates may differ only in these. */
const spaced = (token) => visible(token.replace(/ +/g, (spaces) => (spaces.length > 2 ? `␣×${spaces.length}` : "␣".repeat(spaces.length))));

const nats = (divergence) => `KL divergence ${divergence === 0 ? "0" : divergence < 0.001 ? "under 0.001" : divergence.toPrecision(2)} nats`;
