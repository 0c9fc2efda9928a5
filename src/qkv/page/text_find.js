// Searching a text for a string that may span several tokens.

import { h } from "./dom.js";
import { integer } from "./numbers.js";

const MAX_HITS = 10_000;

/** A search field. `flows()` returns {side: TokenFlow}; `onfound(hit)` is called with {side, at, last} or null. */
export class TextFind {
  constructor(flows, onfound) {
    Object.assign(this, { flows, onfound, hit: null, hits: [], of: "", at: 0 });
    this.field = h("input", {
      type: "search", class: "text-find", placeholder: "Find in the text", "aria-label": "Find in the text; Enter goes to the next match",
      oninput: () => this.search(0), onkeydown: (event) => { if (event.key === "Enter") event.preventDefault(), this.search(event.shiftKey ? -1 : 1); },
    });
    this.found = h("span", { class: "text-found", "aria-live": "polite" });
    this.element = h("div", { class: "text-search" }, this.field, this.found);
  }

  /** Clear the search, after a change of the text. */
  clear() {
    this.field.value = this.of = "";
    this.search(0);
  }

  /** Go to the next match (1), the previous one (-1), or the first one from the current position (0). */
  search(direction) {
    const wanted = this.field.value.toLowerCase(), flows = this.flows();
    if (wanted !== this.of) {
      this.of = wanted;
      this.hits = wanted ? Object.entries(flows).flatMap(([side, flow]) => matchesOf(flow.tokens, wanted).map(([at, last]) => ({ side, at, last }))) : [];
      const firstVisible = Object.values(flows)[0]?.view[0] ?? 0;
      this.at = Math.max(this.hits.findIndex(({ at }) => at >= firstVisible), 0);
      direction = 0;
    }
    const count = this.hits.length;
    this.at = count ? (this.at + direction + count) % count : 0;
    this.hit = this.hits[this.at] ?? null;
    this.found.textContent = count ? `${integer(this.at + 1)} of ${integer(count)}` : wanted ? "not found" : "";
    this.onfound(this.hit);
  }
}

/** Occurrences of a lower-case string in the joined tokens: [[first token, last token], …]. */
function matchesOf(tokens, wanted) {
  const lower = tokens.map((token) => token.toLowerCase()), starts = new Uint32Array(tokens.length + 1);
  for (let at = 0; at < lower.length; at++) starts[at + 1] = starts[at] + lower[at].length;
  const joined = lower.join(""), found = [];
  let token = 0;
  for (let at = joined.indexOf(wanted); at >= 0 && found.length < MAX_HITS; at = joined.indexOf(wanted, at + wanted.length)) {
    while (starts[token + 1] <= at) token++;
    let last = token;
    while (starts[last + 1] < at + wanted.length) last++;
    found.push([token, last]);
  }
  return found;
}
