// Tokens as running text of any length: only the blocks near the visible part are in the document.

import { h, vertically } from "./dom.js";
import { integer, named, visible } from "./numbers.js";
import { cancel, nextFrame } from "./state.js";

const MIN_BLOCK = 110, MAX_BLOCK = 240; // tokens of a block
const SPACE = 7; // pixels, a little more than the width of a space
const MARGIN = 900; // pixels above and below the visible part that stay in the document

/** Split a token into pieces [text, isMark]; marks replace invisible characters. */
function pieces(token) {
  if (visible(token) === token) return [[token, false]];
  const found = [];
  for (const character of token) {
    const shown = visible(character), mark = shown !== character;
    if (!mark && found.length && !found.at(-1)[1]) found.at(-1)[0] += character;
    else found.push([mark ? shown.replace(/[‹›]/g, "") : character, mark]);
    if (character === "\n") found.push(["\n", false]);
  }
  return found;
}

/** What a token of a chat is, whose turns are [[first, words, end, role], …]: a word, the "role" of its turn, or another "template" token. */
export function partOf(turns, token, at) {
  const turn = turns.findLast(([first]) => first <= at);
  if (!turn || (at >= turn[1] && at < turn[2])) return "";
  return at < turn[1] && /^\s*\w/.test(token) ? "role" : "template";
}

/** The first tokens of blocks: at a turn of a chat, after a line break if there is one, otherwise after a sentence. */
function blockStarts(tokens, turns) {
  const starts = [0], begins = new Set(turns.map(([first]) => first));
  let sentence = 0;
  for (let at = 0; at < tokens.length; at++) {
    const length = at + 1 - starts.at(-1);
    if (length >= MIN_BLOCK && /[.!?。！？]["'”’)]?\s*$/.test(tokens[at])) sentence = at + 1;
    const here = begins.has(at + 1) ? at + 1 : length >= MIN_BLOCK && tokens[at].includes("\n") ? at + 1 : length >= MAX_BLOCK ? (sentence > starts.at(-1) ? sentence : at + 1) : 0;
    if (here && here < tokens.length) starts.push(here);
  }
  return starts;
}

/** Whether a text is shown in a monospaced font, because many of its lines are indented. */
function isCode(tokens) {
  const lines = tokens.slice(0, 4000).join("").split("\n").filter((line) => line.trim());
  return lines.length > 4 && lines.filter((line) => /^(\t| {2,})/.test(line)).length > lines.length / 4;
}

/**
 * A scrollable text of tokens, or a chat of `turns`. `look(i)` gives {background, ink, line} or null for a token, `kind(i)` further classes.
 * Calls `onhover(i or null)`, `onchoose(i)` for a click or Enter, `oncurrent(i)` for the arrow keys, `onscroll()`.
 */
export class TokenFlow {
  constructor({ name, tokens, turns = [], label, look, kind, onhover, onchoose, oncurrent, onescape, onscroll }) {
    Object.assign(this, { name, tokens, turns, look, kind, onhover, onchoose, oncurrent, onescape, onscroll });
    this.starts = blockStarts(tokens, turns);
    this.code = isCode(tokens);
    this.current = null;
    this.top = { block: 0, above: 0 }; // the block at the upper edge of the view, and how much of it is above
    this.boxes = this.starts.map(() => h("div", { class: turns.length ? "flow-block flow-turn" : "flow-block", role: "presentation" })); // empty, unless near the view
    this.space = h("div", { class: this.code ? "flow-space code" : "flow-space", role: "presentation" }, this.boxes);
    this.element = h("div", { class: "flow", tabindex: 0, role: "listbox", "aria-multiselectable": "true", "aria-label": label }, this.space);
    this.listen();
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.element);
  }

  close() {
    this.sizes.disconnect();
    cancel(this.frame);
  }

  // ---- blocks ----

  end(block) {
    return this.starts[block + 1] ?? this.tokens.length;
  }

  blockOf(token) {
    return this.starts.findLastIndex((start) => start <= token);
  }

  /** Give empty blocks the height that the number of characters of each line suggests. */
  estimate() {
    const width = Math.max(this.element.clientWidth - 70, 120), style = getComputedStyle(this.space);
    const line = parseFloat(style.lineHeight) || 30, letter = 0.5 * parseFloat(style.fontSize);
    this.boxes.forEach((box, block) => {
      if (box.tokens) return;
      const text = this.tokens.slice(this.starts[block], this.end(block)).join("").replace(/\n$/, "");
      box.style.height = `${line * text.split("\n").reduce((sum, part) => sum + Math.max(1, Math.ceil((part.length * letter) / width)), 0)}px`;
    });
  }

  resize() {
    if (!this.element.clientWidth) return;
    if (this.element.clientWidth !== this.width) {
      const begins = !this.width;
      this.width = this.element.clientWidth;
      this.estimate();
      if (!begins) this.hold();
    }
    if (this.wanted !== undefined) this.reveal(this.wanted); else this.render();
  }

  /** Scroll so that the block at the upper edge stays there after heights changed. */
  hold() {
    const scroll = this.boxes[this.top.block].offsetTop + this.top.above;
    if (Math.abs(this.element.scrollTop - scroll) > 0.5) this.element.scrollTop = scroll;
  }

  /** Fill the blocks near the view and empty the others. */
  render() {
    if (!this.width) return;
    for (let round = 0, changed = true; changed && round < 4; round++) {
      const { scrollTop, clientHeight } = this.element, block = this.blockAt(scrollTop);
      this.top = { block, above: scrollTop - this.boxes[block].offsetTop };
      const wrong = this.boxes.flatMap((box, at) => {
        const near = box.offsetTop + box.offsetHeight > scrollTop - MARGIN && box.offsetTop < scrollTop + clientHeight + MARGIN;
        return near === Boolean(box.tokens) ? [] : [[at, near, box.getBoundingClientRect().height]];
      });
      for (const [at, near, height] of wrong) {
        if (near) this.fill(at); else this.empty(at, height);
      }
      this.hold();
      changed = wrong.length > 0;
    }
    this.element.setAttribute("aria-activedescendant", this.current === null ? "" : `${this.name}-${this.current}`);
    this.onscroll();
  }

  /** The last block that begins at or above a height of the text. */
  blockAt(y) {
    return Math.max(this.boxes.findLastIndex((box) => box.offsetTop <= y), 0);
  }

  empty(block, height) {
    const box = this.boxes[block];
    box.replaceChildren();
    box.tokens = null;
    box.style.height = `${height}px`;
  }

  fill(block) {
    const first = this.starts[block], box = this.boxes[block];
    box.style.height = "";
    box.append(h("span", { class: "flow-position", "aria-hidden": "true" }, integer(first)));
    // A token may end with a line break and the indent of the next line, which belongs to the next block.
    const indent = /\n([ \t]+)$/;
    if (first) box.append(indent.exec(this.tokens[first - 1])?.[1] ?? "");
    box.tokens = [];
    for (let at = first; at < this.end(block); at++) {
      // In prose, the space before a word is outside of its box: at the end of a line it would be an empty box.
      const [, space, word] = this.code ? [null, "", this.tokens[at]] : /^( *)(.*)$/s.exec(this.tokens[at]);
      if (word) box.append(space);
      const last = at + 1 === this.end(block), shown = word || space, parts = pieces(last ? shown.replace(indent, "\n") : shown);
      const breaks = parts.at(-1)?.[0] === "\n";
      if (breaks) parts.pop(); // the break goes after the token's box, which would otherwise extend into the next line
      const token = h("span", { id: `${this.name}-${at}`, "data-at": at, role: "option", "aria-setsize": this.tokens.length, "aria-posinset": at + 1, "aria-label": this.tokens[at].trim() ? null : named(this.tokens[at]) },
        parts.map(([text, mark]) => (mark ? h("i", { class: text.length > 1 ? "flow-code" : "flow-mark" }, text) : text)));
      this.applyLook(token, at);
      box.tokens.push(token);
      box.append(token);
      if (breaks && !last && !partOf(this.turns, shown, at)) box.append("\n"); // the end of the block already breaks the line
    }
  }

  applyLook(token, at) {
    const look = this.look(at), kind = `${partOf(this.turns, this.tokens[at], at)} ${this.kind(at)}`;
    const applied = `${kind} ${look ? `${look.background} ${look.ink} ${look.line}` : ""}`;
    if (token.applied === applied) return; // most tokens do not change
    token.applied = applied;
    token.className = `flow-token ${kind}`;
    token.style.background = look?.background ?? "";
    token.style.color = look?.ink ?? "";
    token.style.boxShadow = look?.line ?? "";
    token.setAttribute("aria-selected", String(kind.includes("pinned")));
  }

  /** Update the look of all tokens in the document. */
  repaint() {
    this.boxes.forEach((box, block) => box.tokens?.forEach((token, index) => this.applyLook(token, this.starts[block] + index)));
  }

  // ---- places ----

  /** The first and the last visible token. */
  get view() {
    const { scrollTop, clientHeight } = this.element;
    return [scrollTop, scrollTop + clientHeight].map((y) => {
      const block = this.blockAt(y), { offsetTop, offsetHeight } = this.boxes[block], count = this.end(block) - this.starts[block];
      return this.starts[block] + Math.min(Math.max(Math.floor((count * (y - offsetTop)) / offsetHeight), 0), count - 1);
    });
  }

  /** Scroll a token to a third from the top, unless it is visible. */
  reveal(at) {
    this.wanted = at;
    if (!this.width) return; // not laid out yet: resize calls this again
    this.wanted = undefined;
    if (!this.tokenAt(at)) this.fill(this.blockOf(at));
    for (let round = 0; round < 3; round++) {
      const box = this.tokenAt(at).getBoundingClientRect(), frame = this.element.getBoundingClientRect();
      if (round === 0 && box.top >= frame.top + 4 && box.bottom <= frame.bottom - 4) return this.render();
      this.element.scrollTop += box.top - frame.top - this.element.clientHeight / 3;
      this.render();
    }
  }

  tokenAt(at) {
    const block = this.blockOf(at);
    return this.boxes[block]?.tokens?.[at - this.starts[block]];
  }

  /** Set the token from which the arrow keys move. */
  setCurrent(at) {
    this.current = at;
    this.element.setAttribute("aria-activedescendant", at === null ? "" : `${this.name}-${at}`);
  }

  // ---- pointer and keys ----

  listen() {
    const { element } = this, tokenOf = ({ target, clientX, clientY }) => {
      // The space before a word counts as the word.
      const found = target.closest("[data-at]") ?? element.getRootNode().elementFromPoint(clientX + SPACE, clientY)?.closest("[data-at]");
      return found && element.contains(found) ? Number(found.dataset.at) : null;
    };
    element.addEventListener("scroll", () => {
      if (!this.frame) this.frame = nextFrame(() => { this.frame = null; this.render(); });
    }, { passive: true });
    element.addEventListener("pointermove", (event) => {
      if (event.pointerType !== "mouse") return; // a finger that scrolls does not hover
      const at = tokenOf(event);
      if (at !== this.hovered) this.hovered = at, this.onhover(at);
    });
    element.addEventListener("pointerleave", () => { if (this.hovered != null) this.hovered = null, this.onhover(null); });
    element.addEventListener("click", (event) => {
      const at = tokenOf(event);
      if (at === null || !getSelection().isCollapsed) return; // do not pin while selecting text
      this.setCurrent(at);
      this.onchoose(at);
    });
    element.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const last = this.tokens.length - 1, from = this.current ?? this.view[0];
      const to = { ArrowRight: from + 1, ArrowLeft: from - 1, Home: 0, End: last }[event.key] ??
        (["ArrowUp", "ArrowDown"].includes(event.key) ? vertically((at) => this.tokenAt(at)?.getClientRects()[0], from, event.key === "ArrowUp" ? -1 : 1) : null);
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); this.setCurrent(from); this.onchoose(from); }
      if (event.key === "Escape") this.onescape();
      if (to === null) return;
      event.preventDefault();
      const at = this.current === null ? from : Math.min(Math.max(to, 0), last);
      this.setCurrent(at);
      this.reveal(at);
      this.oncurrent(at);
    });
  }
}
