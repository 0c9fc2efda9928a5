// Formatting of numbers and tokens, and binning.

/** The first token of bin b of `bins` in a text of n tokens. */
export const binStart = (b, bins, n) => Math.floor((b * n) / bins);

/** The largest value in each of at most `most` bins, so that a single peak in a long text stays visible. */
export function binPeaks(values, most) {
  const n = values.length, bins = Math.min(n, most);
  return Float32Array.from({ length: bins }, (_, b) => {
    let peak = -Infinity;
    for (let i = binStart(b, bins, n); i < binStart(b + 1, bins, n); i++) peak = Math.max(peak, values[i]);
    return peak;
  });
}

/** The ends of a logarithmic scale for values, without the lowest `part` of the positive ones, but over a decade at least: {low, high}. */
export function logarithmicRange(values, part) {
  const positive = Float64Array.from(values).filter((value) => value > 0).sort(), high = positive.at(-1) ?? 1;
  return { high, low: Math.max(Math.min(positive[Math.floor(positive.length * part)] ?? high, high / 10), high * 1e-6) };
}

/** The values of bins for each of the n tokens of a text. */
export function spread(bins, n) {
  const out = new Float32Array(n);
  bins.forEach((value, b) => out.fill(value, binStart(b, bins.length, n), binStart(b + 1, bins.length, n)));
  return out;
}

/** An integer with thousands separators. */
export const integer = (value) => Math.round(value).toLocaleString("en");

/** A share as a percentage with one or two digits. */
export function percent(share) {
  const value = 100 * share, digits = value > 0 && value < 0.095 ? value.toPrecision(1) : value.toFixed(value > 0 && value < 0.95 ? 1 : 0);
  return value > 0 && value < 0.00095 ? "< 0.001\u00a0%" : `${digits}\u00a0%`; // no line break before the sign
}

/** A weight as a percentage with three significant digits; tiny ones as a power of ten, so only zero is shown as 0. */
export function weightWords(weight) {
  const share = 100 * weight;
  if (weight === 0 || share >= 0.001) return `${Number(share.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 5 })}\u00a0%`;
  const [digits, power] = share.toExponential(1).split("e");
  return `${digits}\u00a0·\u00a010${Array.from(power.replace("+", ""), (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)]).join("")}\u00a0%`;
}

/** The same in a list of weights, where those below 0.01 % need no digits. */
export const shareWords = (weight) => (weight > 0 && weight < 1e-4 ? "<\u00a00.01\u00a0%" : weightWords(weight));

/** A number with its unit and at most two decimals. */
export function written(value, unit) {
  if (value === null || Number.isNaN(value)) return "–";
  if (unit === "%") return percent(value);
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const number = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return unit === "ratio" || unit === "" ? number : `${number} ${unit}`;
}

// Characters that are invisible or change the text direction; a joiner between two pictographs is not one of them.
const INVISIBLE = /(?<!\p{Extended_Pictographic}\ufe0f?)\u200d|\u200d(?!\p{Extended_Pictographic})|[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;
const MARKS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };

/** A text with every invisible character replaced by a mark or its code point. */
export const visible = (text) => text.replace(INVISIBLE, (c) => MARKS[c] || `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

/** A token for use in a sentence: without spaces around it, and visible. */
export function named(token) {
  const plain = token.trim();
  return plain ? visible(plain) : token ? visible(token.replace(/\p{Zs}+/gu, "␣")) : "␣";
}

/** A text truncated to at most `most` characters, with an ellipsis. */
export function truncated(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/** The mean of the finite values; NaN if there are none. */
export function meanOf(values) {
  const known = Array.from(values).filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
}

/** A large number with three digits and a suffix: 2.27 M. */
export function short(number) {
  const scales = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [scale, mark] = scales.find(([size]) => number >= size) || [1, ""];
  return `${(number / scale).toPrecision(3)} ${mark}`;
}
