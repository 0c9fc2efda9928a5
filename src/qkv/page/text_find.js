// Finding words in a text, across its tokens.

import { h } from "./dom.js";
import { integer } from "./numbers.js";

const MOST = 10_000; // places

/** A field that finds; `flows()` gives {side: TokenFlow}, `onfound(hit)` hears {side, at, last} or null. */
export class TextFind {
  constructor(flows, onfound) {
    Object.assign(this, { flows, onfound, hit: null, hits: [], of: "", at: 0 });
    this.field = h("input", {
      type: "search", class: "text-find", placeholder: "Find in the text", "aria-label": "Find in the text; Enter goes to the next place",
      oninput: () => this.search(0), onkeydown: (event) => { if (event.key === "Enter") event.preventDefault(), this.search(event.shiftKey ? -1 : 1); },
    });
    this.found = h("span", { class: "text-found", "aria-live": "polite" });
    this.element = h("div", { class: "text-search" }, this.field, this.found);
  }

  /** The text is another. */
  clear() {
    this.field.value = this.of = "";
    this.search(0);
  }

  /** Go `way` places on: 1 next, -1 previous, 0 the first from here. */
  search(way) {
    const asked = this.field.value.toLowerCase(), flows = this.flows();
    if (asked !== this.of) {
      this.of = asked;
      this.hits = asked ? Object.entries(flows).flatMap(([side, flow]) => placesOf(flow.tokens, asked).map(([at, last]) => ({ side, at, last }))) : [];
      const seen = Object.values(flows)[0]?.view[0] ?? 0;
      this.at = Math.max(this.hits.findIndex(({ at }) => at >= seen), 0);
      way = 0;
    }
    const count = this.hits.length;
    this.at = count ? (this.at + way + count) % count : 0;
    this.hit = this.hits[this.at] ?? null;
    this.found.textContent = count ? `${integer(this.at + 1)} of ${integer(count)}` : asked ? "not found" : "";
    this.onfound(this.hit);
  }
}

/** Where a lower-case string occurs in the text that tokens make: [[first token, last token], …]. */
function placesOf(tokens, asked) {
  const lower = tokens.map((token) => token.toLowerCase()), starts = new Uint32Array(tokens.length + 1);
  for (let at = 0; at < lower.length; at++) starts[at + 1] = starts[at] + lower[at].length;
  const joined = lower.join(""), found = [];
  let token = 0;
  for (let at = joined.indexOf(asked); at >= 0 && found.length < MOST; at = joined.indexOf(asked, at + asked.length)) {
    while (starts[token + 1] <= at) token++;
    let last = token;
    while (starts[last + 1] < at + asked.length) last++;
    found.push([token, last]);
  }
  return found;
}
