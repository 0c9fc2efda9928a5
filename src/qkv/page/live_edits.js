// Edits of heads: their description in words and their short code in an address.

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
