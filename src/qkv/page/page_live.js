// Live: a model reads a text as it is typed; chosen heads normalise otherwise, and what that does is shown.

import { bytesOf } from "./data.js";
import { h } from "./dom.js";
import { isHead } from "./live_edits.js";
import { liveCsv, liveFileName, liveSvg } from "./live_export.js";
import { LiveHeads } from "./live_heads.js";
import { liveMaps } from "./live_maps.js";
import { drawnRows, headlineOf, nextBars, nextRows, quoted, SHOWN } from "./live_next.js";
import { LiveTokens } from "./live_tokens.js";
import { heatWords, LiveWriting } from "./live_writing.js";
import { named, percent } from "./numbers.js";

const PAUSE = 250; // milliseconds without a key before the text is read
const SLIDING = 60; // milliseconds that a slider rests before the model is asked
const IN_ADDRESS = 500; // characters of a text that the address holds

// The text as it was when the page was left, {prompt, text, ids}: the address does not hold all of it.
let left = null;

/** The page; its own state: `prompt`, `edits` (see `codeOf`), `at` ("layer.head"), `heat`, of sampling. */
export const livePage = {
  title: "Live",
  mount(root, app) {
    const page = new LivePage(root, app);
    return {
      update: (changed) => page.update(changed),
      picture: () => page.picture(),
      unmount: () => page.unmount(),
    };
  },
};

class LivePage {
  #app;
  #live; // what the session says of the model
  #written; // what of the text is in the address
  #answer = null;
  #asking = null; // AbortController of the request under way
  #timer = 0;
  #stopTheme;
  #writing;
  #heads;
  #tokens = new LiveTokens();
  #parts;

  constructor(root, app) {
    this.#app = app;
    this.#live = app.session.live;
    if (!this.#live) {
      root.append(h("p", { class: "note" }, "No language model is loaded: start qkv view with a model to type a text."));
      return;
    }
    this.#writing = new LiveWriting(app, () => this.#body(), {
      onbegin: () => this.#quiet(),
      onstep: () => this.#stepped(),
      onend: () => this.#wrote(),
      onheat: () => this.#remember(),
      onundo: () => { this.#parts.text.value = this.#writing.text; this.#remember(); this.#ask(); },
      onplay: () => { for (const part of [this.#heads.grid, this.#parts.maps]) part.classList.toggle("live-stale", this.#writing.playing); }, // they come up when it stops
      onsay: (sentence) => this.#say(sentence),
    });
    this.#heads = new LiveHeads(this.#live, {
      onshow: (another) => { this.#remember(); if (another && !this.#writing.playing) this.#ask(); },
      onedit: (change) => this.#edited(change),
    });
    this.#build(root);
    this.#stopTheme = app.onTheme(() => this.#draw());
  }

  #build(root) {
    const live = this.#live;
    const text = h("textarea", {
      id: "live-text", class: "live-text", rows: 5, spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: live.most_characters,
      "aria-describedby": "live-trouble", oninput: () => this.#typed(),
    });
    const parts = (this.#parts = {
      text, trouble: h("p", { id: "live-trouble", class: "live-trouble", role: "status", hidden: true }),
      headline: h("p", { class: "live-headline" }), likeliest: h("p", { class: "note" }), next: h("div", { class: "live-next" }), maps: h("div", { class: "live-maps" }),
    });
    root.classList.add("live");
    root.append(
      h("div", { class: "live-column" },
        h("label", { for: "live-text", class: "live-label" }, h("h2", {}, "Text"), h("small", {}, `${live.model} reads as you type, at most ${live.most_tokens} tokens`)),
        text, parts.trouble, this.#writing.element, this.#tokens.element),
      this.#heads.element,
      h("div", { class: "live-column live-effect" }, h("h2", {}, "The next token"), parts.headline, parts.likeliest, parts.next),
      parts.maps,
    );
  }

  update(changed) {
    if (!this.#live) return;
    const { state } = this.#app, writing = this.#writing, heads = this.#heads, first = writing.text === null;
    const prompt = state.prompt === undefined ? undefined : String(state.prompt), edits = String(state.edits ?? "");
    let ask = first, kept = null;
    if (first || prompt !== this.#written) {
      kept = first && left?.prompt === prompt ? left : null;
      writing.halt();
      this.#written = prompt;
      writing.set(kept?.text ?? prompt ?? this.#live.example, kept?.ids ?? null);
      this.#parts.text.value = writing.text;
      ask = true;
    }
    if (edits !== heads.code) {
      heads.code = edits;
      ask = true;
    }
    const heat = Number(state.heat ?? 1);
    if (heat >= 0 && heat <= 2) writing.heat = heat;
    if (heads.turnTo(isHead(String(state.at), this.#live) ? String(state.at) : "0.0")) ask = true;
    if (ask) this.#ask();
    else if (changed.has("source") || changed.has("session")) this.#draw(); // colours come with a profile
    writing.draw();
    heads.drawSetting();
    // Typed so shortly before the page was left that the address does not have it yet.
    if (kept && kept.text.length <= IN_ADDRESS && kept.text !== (prompt ?? this.#live.example)) queueMicrotask(() => this.#remember());
  }

  unmount() {
    if (!this.#live) return;
    left = { prompt: this.#written, text: this.#writing.text, ids: this.#writing.ids };
    this.#writing.halt();
    this.#quiet();
    this.#stopTheme();
  }

  // --- asking -------------------------------------------------------------------------------------------------------

  #body() {
    const [layer, head] = this.#heads.shown.split(".").map(Number);
    return { edits: this.#heads.asked, layer, head, k: SHOWN };
  }

  /** `beside`: what a step has shown stays, and the heads and maps come up to the text it made. */
  async #ask({ beside = false } = {}) {
    const writing = this.#writing, { text, ids } = writing, at = this.#heads.shown, edited = this.#heads.edits.size > 0;
    writing.cancel();
    this.#quiet();
    if (!text) return this.#say("Type some text for the model to read.");
    const asking = (this.#asking = new AbortController());
    try {
      const answer = await this.#app.post("/api/live", { ...this.#body(), text, ...(ids ? { ids } : {}) }, { signal: asking.signal });
      if (asking.signal.aborted) return;
      const maps = [answer.map_before, answer.map].map((map) => new Float32Array(bytesOf(map).buffer));
      this.#answer = { ...answer, at, text, edited, maps };
      if (!beside) writing.step = null;
      this.#say("");
      this.#draw();
      if (!beside) this.#app.announce([this.#parts.headline, this.#parts.likeliest].map((part) => part.textContent).join(" "));
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
    } finally {
      if (this.#asking === asking) this.#asking = null;
    }
  }

  /** Nothing that was asked, or is about to be, is wanted any more. */
  #quiet() {
    clearTimeout(this.#timer);
    this.#asking?.abort();
  }

  /** A sentence at the text field: why there is no new answer. */
  #say(sentence) {
    const { trouble, text } = this.#parts;
    trouble.textContent = sentence;
    trouble.hidden = !sentence;
    text.setAttribute("aria-invalid", sentence ? "true" : "false");
  }

  #typed() {
    this.#writing.halt();
    this.#quiet();
    this.#writing.set(this.#parts.text.value);
    this.#timer = setTimeout(() => { this.#remember(); this.#ask(); }, PAUSE);
  }

  #edited(change) {
    this.#remember();
    if (this.#writing.playing) return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#ask(), "temperature" in change ? SLIDING : 0);
  }

  /** A token came. */
  #stepped() {
    const { text } = this.#parts;
    text.value = this.#writing.text;
    text.scrollTop = text.scrollHeight;
    this.#say("");
    this.#drawTokens();
    this.#drawNext();
  }

  /** The last token came. */
  #wrote() {
    const { token, probability } = this.#writing.made.at(-1);
    this.#app.announce(`${named(token)}, probability ${percent(probability)}`);
    this.#remember();
    this.#ask({ beside: true });
  }

  /** Write the state into the address. */
  #remember() {
    const { text, heat } = this.#writing, { code, shown } = this.#heads;
    this.#written = text.length <= IN_ADDRESS ? text : undefined;
    this.#app.go({ prompt: this.#written ?? null, edits: code || null, at: shown, heat: heat === 1 ? null : heat }, { replace: true });
  }

  // --- drawing ------------------------------------------------------------------------------------------------------

  #draw() {
    if (!this.#answer) return;
    this.#drawTokens();
    this.#drawNext();
    this.#heads.draw(this.#answer);
    this.#parts.maps.replaceChildren(...liveMaps(this.#answer));
  }

  #drawTokens() {
    const { step, made } = this.#writing;
    if (step) return this.#tokens.draw({ tokens: step.tokens, row: step.row, at: step.at, made, step });
    const { tokens, rows, at } = this.#answer, [layer, head] = at.split(".").map(Number);
    this.#tokens.draw({ tokens, row: rows[layer][head], at, made, step: null });
  }

  #drawNext() {
    const { headline, likeliest, next } = this.#parts, { step, heat } = this.#writing;
    if (step) {
      headline.replaceChildren(quoted(step.token), ` came, with ${percent(step.probability)}.`);
      likeliest.replaceChildren(`Drawn at sampling temperature ${heatWords(heat)} from what the model${this.#heads.edits.size ? ", edited," : ""} expected.`);
      next.replaceChildren(nextBars(drawnRows(step), false));
      return;
    }
    const [what, which] = headlineOf(this.#answer);
    headline.replaceChildren(...what);
    likeliest.replaceChildren(...which);
    next.replaceChildren(nextBars(nextRows(this.#answer), this.#answer.edited));
  }

  picture() {
    const answer = this.#answer, live = this.#live;
    if (!answer) return null;
    return {
      name: liveFileName(answer, live),
      svg: () => liveSvg(answer, { live, edits: this.#heads.edits, canvases: [...this.#parts.maps.querySelectorAll("canvas")] }),
      csv: () => liveCsv(answer),
    };
  }
}
