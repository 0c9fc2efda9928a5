// Translation or reversal: an input field, the output of the model, and the matrix of attention weights between them.

import { drawHeads } from "./align_heads.js";
import { alignCsv, restOf, strongest, weightsOf } from "./align_weights.js";
import { legend, textField } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { h, replace } from "./dom.js";
import { arrowKeys } from "./heads.js";
import { integer, named, percent, visible } from "./numbers.js";
import { cancel, later } from "./state.js";

const PAUSE = 350; // milliseconds after the last key before the text is sent
const HINTS = 48; // words of the vocabulary that are shown at once

export class AlignWords {
  #app;
  #model;
  #text = null; // the text that was sent last
  #answer = null;
  #request = null; // AbortController
  #timer = null;
  #parts;

  constructor(root, app, model) {
    this.#app = app;
    this.#model = model;
    const reversal = model.kind === "reversal";
    const input = textField("align", {
      rows: reversal ? 1 : 2, maxlength: 400, described: "align-about",
      oninput: () => this.#typed(), onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); this.#send(); } },
    });
    this.#parts = {
      ...input,
      hints: h("div", { class: "align-hints", role: "group", "aria-label": "Words the model knows" }),
      output: h("p", { class: "align-output" }), heads: h("div", { class: "align-heads" }), matrix: h("div", { class: "align-scroll" }),
      readout: h("output", { class: "readout", "aria-live": "polite" }), title: h("figcaption", {}),
    };
    root.append(h("div", { class: "align-columns" },
      h("div", { class: "align-side" },
        h("div", { class: "align-label" }, h("label", { for: "align-text" }, h("h2", {}, reversal ? "Symbols" : "English sentence")), h("button", { type: "button", class: "link", onclick: () => this.#example() }, "Example")),
        input.field, input.trouble,
        h("p", { class: "note", id: "align-about" }, reversal
          ? `${model.name} was trained to reverse six symbols: for each output symbol, a head has to attend to the mirrored position.`
          : `${model.name} knows ${integer(model.words.length)} English words, from a small grammar; it uses Bahdanau attention.`),
        this.#parts.hints,
        reversal ? this.#parts.heads : null),
      h("figure", { class: "align-main" },
        h("h2", {}, reversal ? "Reversed" : "French"), this.#parts.output, this.#parts.title, this.#parts.matrix, this.#parts.readout)));
  }

  update() {
    const { say } = this.#app.state, text = say === undefined ? this.#model.example : String(say);
    if (text !== this.#text) {
      if (this.#parts.field.value !== text) this.#parts.field.value = text;
      this.#ask(text);
    } else this.draw();
    this.#hints();
  }

  stop() {
    cancel(this.#timer);
    this.#request?.abort();
  }

  #typed() {
    this.#hints();
    cancel(this.#timer);
    this.#timer = later(() => this.#send(), PAUSE);
  }

  #send() {
    cancel(this.#timer);
    const text = this.#parts.field.value;
    if (text !== this.#text) this.#app.go({ say: text }, { replace: true });
  }

  #example() {
    this.#parts.field.value = this.#model.example;
    this.#hints();
    this.#send();
  }

  async #ask(text) {
    this.#text = text;
    this.#request?.abort();
    if (!text.trim()) return this.#parts.tell("Type at least one word.");
    const request = (this.#request = new AbortController());
    try {
      const answer = await this.#app.request("/api/align", { body: { model: this.#model.name, text }, signal: request.signal });
      if (request.signal.aborted) return;
      this.#answer = answer;
      this.#parts.tell("");
      this.draw();
      this.#app.announce(`${this.#parts.output.textContent}`);
    } catch (error) {
      if (error.name !== "AbortError") this.#parts.tell(error.message);
    }
  }

  /** Vocabulary words that complete what is typed; a click inserts one. */
  #hints() {
    const { field, hints } = this.#parts, words = this.#model.words ?? [];
    const begun = (/\S*$/.exec(field.value.toLowerCase()) ?? [""])[0], whole = words.includes(begun);
    const fitting = begun && !whole ? words.filter((word) => word.startsWith(begun)) : words;
    const put = (word) => {
      const kept = whole ? field.value.trimEnd() : field.value.slice(0, field.value.length - begun.length).trimEnd();
      field.value = `${kept}${kept ? " " : ""}${word}`;
      this.#hints();
      this.#send();
    };
    replace(hints,
      ...fitting.slice(0, HINTS).map((word) => h("button", { type: "button", class: "align-word", "data-key": `word-${word}`, onclick: () => put(word) }, word)),
      fitting.length > HINTS ? h("small", {}, `and ${integer(fitting.length - HINTS)} more: type a letter`) : null,
      fitting.length ? null : h("small", {}, `No word begins with “${visible(begun)}”.`));
  }

  /** The head that is shown, [layer, head]; null for the mean of all heads. */
  get #shown() {
    const { layers, heads } = this.#answer, [layer, head] = String(this.#app.state.look ?? "mean").split(".").map(Number);
    return layer >= 0 && layer < layers && head >= 0 && head < heads ? [layer, head] : null;
  }

  draw() {
    if (!this.#answer) return;
    const { output, matrix, title, readout } = this.#parts, { source, target, probability, layers, heads } = this.#answer;
    const shown = this.#shown, weights = weightsOf(this.#answer, shown), several = layers * heads > 1;
    output.replaceChildren(...target.flatMap((word, t) => [h("span", { class: "align-target", "data-tip": `“${word}”\nprobability ${percent(probability[t])}`, onpointerenter: () => this.#readout([t, strongest(weights[t])]) }, word), " "]));
    if (several) drawHeads(this.#parts.heads, this.#answer, shown, (chosen) => this.#app.go({ look: chosen }, { replace: true }));
    if (!target.length) {
      output.textContent = "The output is empty.";
      matrix.replaceChildren();
      title.replaceChildren();
      return;
    }
    const where = !several ? "Weight on each English word" : shown ? `Layer ${shown[0]}, head ${shown[1]}` : `Mean of all ${layers * heads} heads`;
    const thing = several ? "symbol" : "word";
    title.replaceChildren(h("span", {}, where, h("small", {}, ` · one row per output ${thing}, one column per input ${thing}`)), legend({ low: "0", high: "100\u00a0%" }));
    const rest = several; // a decoder also attends to its own earlier output
    const whole = matrix.clientWidth || 700, compact = whole < 420, wide = whole - (compact ? 92 : 140) - (rest ? 64 : 0);
    const size = Math.max(Math.min(wide / source.length - 2, 74), 22);
    const upright = Math.max(...source.map((word) => word.length)) * 8 + 6 > size;
    const cell = (t, s) => {
      const weight = weights[t][s], colour = ramp(weight);
      return h("button", {
        type: "button", role: "gridcell", class: "align-cell", "data-key": `${t}.${s}`, tabindex: t + s ? -1 : 0, "data-layer": t, "data-head": s,
        style: { background: css(colour), color: inkOn(colour) }, "aria-label": `${target[t]}, ${source[s]}: ${percent(weight)}`,
        onpointerenter: () => this.#readout([t, s]), onfocus: () => this.#readout([t, s]),
      }, weight >= 0.045 ? String(Math.round(100 * weight)) : "");
    };
    const names = source.map((word, s) => h("span", { class: "align-column", role: "columnheader", "data-column": s }, h("bdi", {}, word)));
    replace(matrix, h("div", {
      class: `align-grid${upright ? " align-upright" : ""}${compact ? " align-compact" : ""}`, role: "grid", "aria-label": `${where}. Arrow keys move between cells.`,
      style: { "grid-template-columns": `minmax(${compact ? 40 : 84}px, max-content) repeat(${source.length}, ${size}px)${rest ? ` ${Math.max(1.7 * size, 56)}px` : ""}`, "grid-auto-rows": `${Math.max(Math.min(size, 44), 30)}px` },
      onpointerleave: () => this.#readout(null),
    },
      h("div", { class: "row", role: "row" }, h("span", { role: "presentation" }), names, rest ? h("span", { class: "align-column align-rest", role: "columnheader" }, h("bdi", {}, "earlier output")) : null),
      target.map((word, t) => h("div", { class: "row", role: "row" },
        h("span", { class: "align-row", role: "rowheader", "data-row": t }, h("bdi", {}, word), h("small", {}, percent(probability[t]))),
        source.map((_, s) => cell(t, s)),
        rest ? this.#restCell(weights[t]) : null))));
    arrowKeys(matrix.firstChild, (next) => { for (const one of matrix.querySelectorAll("[data-layer]")) one.tabIndex = one === next ? 0 : -1; next.focus(); });
    this.#readout(null);
    readout.textContent = `Point at a cell, or focus the matrix and use the arrow keys. ${compact ? "" : `Beside each output ${thing}: its probability.`}`;
  }

  #restCell(row) {
    const rest = restOf(row), colour = ramp(rest);
    return h("span", { class: "align-cell align-rest", role: "gridcell", style: { background: css(colour), color: inkOn(colour) }, "data-tip": `on earlier output symbols\n${percent(rest)}` }, rest >= 0.045 ? String(Math.round(100 * rest)) : "");
  }

  #readout(at) {
    const { matrix, readout } = this.#parts;
    for (const mark of matrix.querySelectorAll(".align-lit")) mark.classList.remove("align-lit");
    if (!at) return;
    const [t, s] = at, { source, target, probability } = this.#answer;
    matrix.querySelector(`[data-row="${t}"]`)?.classList.add("align-lit");
    matrix.querySelector(`[data-column="${s}"]`)?.classList.add("align-lit");
    readout.replaceChildren("“", h("b", {}, named(target[t])), `” (probability ${percent(probability[t])}) attends to “`, h("b", {}, named(source[s])), "” with weight ", h("b", {}, percent(weightsOf(this.#answer, this.#shown)[t][s])), ".");
  }

  picture() {
    if (!this.#answer?.target.length) return null;
    const answer = this.#answer, shown = this.#shown, { name, kind } = this.#model;
    return {
      name: `${name}${shown ? `-layer${shown[0]}-head${shown[1]}` : ""}`,
      title: `${answer.source.join(" ")} → ${answer.target.join(" ")}`, elements: [this.#parts.matrix],
      note: `Attention of ${name}${shown ? `, layer ${shown[0]}, head ${shown[1]}` : ""}: the weight in % of each output word (rows) on each input word (columns).`,
      csv: () => alignCsv(answer, shown, kind === "reversal"),
    };
  }
}
