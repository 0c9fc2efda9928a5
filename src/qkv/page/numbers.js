// Writing numbers and tokens, and binning them.

/** Where bin b of `bins` starts in a text of n tokens. */
export const binStart = (b, bins, n) => Math.floor((b * n) / bins);

/** The largest value in each of at most `most` bins: a single peak in a long text stays visible. */
export function binPeaks(values, most) {
  const n = values.length, bins = Math.min(n, most);
  return Float32Array.from({ length: bins }, (_, b) => {
    let peak = -Infinity;
    for (let i = binStart(b, bins, n); i < binStart(b + 1, bins, n); i++) peak = Math.max(peak, values[i]);
    return peak;
  });
}

/** A whole number with its thousands marked. */
export const integer = (value) => Math.round(value).toLocaleString("en");

/** A share as a percentage with no more digits than it deserves. */
export function percent(share) {
  const value = 100 * share, digits = value > 0 && value < 0.095 ? value.toPrecision(1) : value.toFixed(value > 0 && value < 0.95 ? 1 : 0);
  return value > 0 && value < 0.00095 ? "< 0.001\u00a0%" : `${digits}\u00a0%`; // no line break before the sign
}

/** A weight as a percentage to three digits: the smallest as a power of ten, and only a weight of zero as 0. */
export function weightWords(weight) {
  const share = 100 * weight;
  if (weight === 0 || share >= 0.001) return `${Number(share.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 5 })}\u00a0%`;
  const [digits, power] = share.toExponential(1).split("e");
  return `${digits}\u00a0·\u00a010${Array.from(power.replace("+", ""), (digit) => "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"["-0123456789".indexOf(digit)]).join("")}\u00a0%`;
}

/** A number with its unit: three significant digits at most. */
export function written(value, unit) {
  if (value === null || Number.isNaN(value)) return "–";
  if (unit === "%") return percent(value);
  const digits = Math.abs(value) >= 100 ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  const number = value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return unit === "ratio" || unit === "" ? number : `${number} ${unit}`;
}

// Characters that cannot be seen, or turn the text around them; a joiner between two pictures belongs to them.
const UNSEEN = /(?<!\p{Extended_Pictographic}\ufe0f?)\u200d|\u200d(?!\p{Extended_Pictographic})|[\0-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;
const MARKS = { "\n": "⏎", "\r": "␍", "\t": "⇥" };

/** Text with every unseen character in its place as a mark or a code. */
export const visible = (text) => text.replace(UNSEEN, (c) => MARKS[c] || `‹U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}›`);

/** A token as one would name it in a sentence. */
export function named(token) {
  const plain = token.trim();
  return plain ? visible(plain) : token ? visible(token.replace(/ +/g, "␣")) : "␣";
}

/** Text of at most `most` characters: what is more is cut off and marked. */
export function cutShort(text, most) {
  const letters = [...text];
  return letters.length > most ? `${letters.slice(0, most - 1).join("")}…` : text;
}

/** The mean of what is finite; NaN of nothing. */
export function meanOf(values) {
  const known = Array.from(values).filter(Number.isFinite);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
}

/** A large number in three digits and a mark: 2.27 M. */
export function short(number) {
  const scales = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const [scale, mark] = scales.find(([size]) => number >= size) || [1, ""];
  return `${(number / scale).toPrecision(3)} ${mark}`;
}
