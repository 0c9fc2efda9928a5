// Seq2seq & images: where small models look for each word they say, in a sentence, in a row of symbols, in an image.

import { css, inkOn, ramp } from "./colour.js";
import { choice, legend, paint } from "./charts.js";
import { h, replace, svg } from "./dom.js";
import { csvOf, svgImage, svgPicture, svgText } from "./export.js";
import { integer, named, percent, visible } from "./numbers.js";

const PAUSE = 350; // milliseconds without a key before a sentence is read
const HINTS = 48; // words of a vocabulary shown at once
const STRIP = 9; // scenes in the strip
const LARGE = 10, SMALL = 4; // pixels on the screen for one of a scene
const PACE = 1100; // milliseconds a word is shown while playing

/** The page; its own state: `view`, `say` (what a model reads), `look` ("mean" or "layer.head"), `scene`, `word`, `over`. */
export const alignPage = {
  title: "Seq2seq & images",
  mount(root, app) {
    const { models, captioner } = app.session.align;
    const views = [...models.map(({ kind }) => [kind, kind === "translation" ? "Translation" : "Reversal"]), ...(captioner ? [["captions", "Captions"]] : [])];
    const tabs = h("div", { class: "controls align-tabs" }), body = h("div", { class: "align-body" });
    root.append(tabs, body);
    let view = null, shown = null;
    const stop = app.onTheme(() => shown?.draw());
    if (!views.length) body.append(h("p", { class: "note" }, "Neither a translation model nor a captioner is installed."));

    return {
      update(changed) {
        if (!views.length) return;
        const wanted = views.some(([id]) => id === app.state.view) ? app.state.view : views[0][0];
        if (wanted !== view) {
          shown?.stop();
          view = wanted;
          replace(tabs, choice("Show", views, view, (id) => app.go({ view: id, say: null, look: null, word: null })));
          body.replaceChildren();
          shown = view === "captions" ? new Captions(body, app) : new Alignment(body, app, models.find(({ kind }) => kind === view));
          shown.update();
        } else if (changed.has("source") || changed.has("session")) shown.draw(); // colours come with a profile
        else shown.update();
      },
      picture: () => shown?.picture() ?? null,
      unmount() {
        stop();
        shown?.stop();
      },
    };
  },
};

/** A sentence or a row of symbols, what the model makes of it, and the matrix between them. */
class Alignment {
  #app;
  #model;
  #text = null; // what was asked last
  #answer = null;
  #at = [0, 0]; // target word, source word
  #asking = null;
  #timer = 0;
  #parts;

  constructor(root, app, model) {
    this.#app = app;
    this.#model = model;
    const reversal = model.kind === "reversal";
    const field = h("textarea", {
      id: "align-text", class: "align-text", rows: reversal ? 1 : 2, spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: 400,
      "aria-describedby": "align-trouble align-about", oninput: () => this.#typed(), onkeydown: (event) => { if (event.key === "Enter") { event.preventDefault(); this.#send(); } },
    });
    this.#parts = {
      field, trouble: h("p", { id: "align-trouble", class: "align-trouble", role: "status", hidden: true }),
      hints: h("div", { class: "align-hints", role: "group", "aria-label": "Words the model knows" }),
      said: h("p", { class: "align-said" }), heads: h("div", { class: "align-heads" }), matrix: h("div", { class: "align-scroll" }),
      readout: h("output", { class: "readout", "aria-live": "polite" }), title: h("figcaption", {}),
    };
    root.append(h("div", { class: "align-columns" },
      h("div", { class: "align-side" },
        h("div", { class: "align-label" }, h("label", { for: "align-text" }, h("h2", {}, reversal ? "Symbols" : "English sentence")), h("button", { type: "button", class: "link", onclick: () => this.#example() }, "Example")),
        field,
        this.#parts.trouble,
        h("p", { class: "note", id: "align-about" }, reversal
          ? `${model.name} was trained to say six symbols backwards: to say each, a head has to look at the mirrored position.`
          : `${model.name} knows ${integer(model.words.length)} English words, from a small grammar; it was trained with Bahdanau’s attention.`),
        this.#parts.hints,
        reversal ? this.#parts.heads : null),
      h("figure", { class: "align-main" },
        h("h2", {}, reversal ? "Reversed" : "French"), this.#parts.said, this.#parts.title, this.#parts.matrix, this.#parts.readout)));
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
    clearTimeout(this.#timer);
    this.#asking?.abort();
  }

  #typed() {
    this.#hints();
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#send(), PAUSE);
  }

  #send() {
    clearTimeout(this.#timer);
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
    this.#asking?.abort();
    if (!text.trim()) return this.#say("Type at least one word.");
    const asking = (this.#asking = new AbortController());
    try {
      const answer = await this.#app.post("/api/align", { model: this.#model.name, text }, { signal: asking.signal });
      if (asking.signal.aborted) return;
      this.#answer = answer;
      this.#at = [0, 0];
      this.#say("");
      this.draw();
      this.#app.announce(`${this.#parts.said.textContent}`);
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
    }
  }

  #say(sentence) {
    const { trouble, field } = this.#parts;
    trouble.textContent = sentence;
    trouble.hidden = !sentence;
    field.setAttribute("aria-invalid", sentence ? "true" : "false");
  }

  /** Words that can go on with what is typed; a click puts one in. */
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

  /** The weights that are shown: of one head, or the mean of all. */
  #weights() {
    const { weights, layers, heads } = this.#answer, [layer, head] = this.#look();
    if (layer !== null) return weights[layer][head];
    const all = weights.flat();
    return all[0].map((row, t) => row.map((_, s) => all.reduce((sum, one) => sum + one[t][s], 0) / (layers * heads)));
  }

  #look() {
    const { layers, heads } = this.#answer, [layer, head] = String(this.#app.state.look ?? "mean").split(".").map(Number);
    return layer >= 0 && layer < layers && head >= 0 && head < heads ? [layer, head] : [null, null];
  }

  draw() {
    if (!this.#answer) return;
    const { said, matrix, title, readout } = this.#parts, { source, target, probability, layers, heads } = this.#answer;
    const [layer, head] = this.#look(), weights = this.#weights(), several = layers * heads > 1;
    said.replaceChildren(...target.flatMap((word, t) => [h("span", { class: "align-target", "data-tip": `“${word}”\nprobability ${percent(probability[t])}`, onpointerenter: () => this.#show(t, strongest(weights[t])) }, word), " "]));
    if (several) this.#drawHeads();
    if (!target.length) {
      said.textContent = "The model says nothing.";
      matrix.replaceChildren();
      title.replaceChildren();
      return;
    }
    const where = !several ? "Weight on each English word" : layer === null ? `Mean of all ${layers * heads} heads` : `Layer ${layer}, head ${head}`;
    const thing = several ? "symbol" : "word";
    title.replaceChildren(h("span", {}, where, h("small", {}, ` · a row for each ${thing} said, a column for each ${thing} read`)), legend({ low: "0", high: "100\u00a0%" }));
    const rest = several; // a decoder also looks at what it has said itself
    const whole = matrix.clientWidth || 700, compact = whole < 420, wide = whole - (compact ? 92 : 140) - (rest ? 64 : 0);
    const size = Math.max(Math.min(wide / source.length - 2, 74), 22);
    const upright = Math.max(...source.map((word) => word.length)) * 8 + 6 > size;
    const cell = (t, s) => {
      const weight = weights[t][s], colour = ramp(weight);
      return h("button", {
        type: "button", role: "gridcell", class: "align-cell", "data-key": `${t}.${s}`, tabindex: t === this.#at[0] && s === this.#at[1] ? 0 : -1,
        style: { background: css(colour), color: inkOn(colour) }, "aria-label": `${target[t]}, ${source[s]}: ${percent(weight)}`,
        onpointerenter: () => this.#show(t, s), onfocus: () => this.#show(t, s),
      }, weight >= 0.045 ? String(Math.round(100 * weight)) : "");
    };
    const names = source.map((word, s) => h("span", { class: "align-column", role: "columnheader", "data-column": s }, h("bdi", {}, word)));
    replace(matrix, h("div", {
      class: `align-grid${upright ? " align-upright" : ""}${compact ? " align-compact" : ""}`, role: "grid", "aria-label": `${where}. Arrow keys move between cells.`,
      style: { "grid-template-columns": `minmax(${compact ? 40 : 84}px, max-content) repeat(${source.length}, ${size}px)${rest ? ` ${Math.max(1.7 * size, 56)}px` : ""}`, "grid-auto-rows": `${Math.max(Math.min(size, 44), 30)}px` },
      onkeydown: (event) => this.#key(event), onpointerleave: () => this.#readout(null),
    },
      h("div", { class: "row", role: "row" }, h("span", { role: "presentation" }), names, rest ? h("span", { class: "align-column align-rest", role: "columnheader" }, h("bdi", {}, "said before")) : null),
      target.map((word, t) => h("div", { class: "row", role: "row" },
        h("span", { class: "align-row", role: "rowheader", "data-row": t }, h("bdi", {}, word), h("small", {}, percent(probability[t]))),
        source.map((_, s) => cell(t, s)),
        rest ? this.#restCell(weights[t]) : null))));
    this.#readout(null);
    readout.textContent = `Point at a cell, or focus the matrix and use the arrow keys. ${compact ? "" : `Beside each ${thing}: the probability it was said with.`}`;
  }

  #restCell(row) {
    const rest = Math.max(1 - row.reduce((sum, weight) => sum + weight, 0), 0), colour = ramp(rest);
    return h("span", { class: "align-cell align-rest", role: "gridcell", style: { background: css(colour), color: inkOn(colour) }, "data-tip": `on symbols it had said before\n${percent(rest)}` }, rest >= 0.045 ? String(Math.round(100 * rest)) : "");
  }

  /** All heads as small matrices to choose from. */
  #drawHeads() {
    const { weights, layers, heads, source, target } = this.#answer, [layer, head] = this.#look();
    const button = (look, label, rows, chosen) => {
      const canvas = h("canvas", {});
      paint(canvas, target.length, source.length, (t, s) => rows[t][s]);
      return h("button", { type: "button", class: "align-head", "aria-pressed": chosen ? "true" : "false", "data-key": `head-${look}`, onclick: () => this.#app.go({ look: look === "mean" ? null : look }, { replace: true }) }, canvas, h("span", {}, label), h("small", {}, `${mirrored(rows)} of ${target.length}`));
    };
    const mirrored = (rows) => rows.filter((row, t) => strongest(row) === target.length - 1 - t).length;
    const all = weights.flat(), mean = all[0].map((row, t) => row.map((_, s) => all.reduce((sum, one) => sum + one[t][s], 0) / all.length));
    replace(this.#parts.heads, h("h2", {}, "Heads"),
      h("div", { class: "align-mean", style: { "grid-template-columns": `repeat(${heads}, minmax(0, 1fr))` } }, button("mean", "Mean", mean, layer === null),
        h("p", { class: "note" }, `Below each: in how many rows the strongest symbol is the mirrored one. ${source.at(-1)} is the token behind the symbols.`)),
      h("div", { class: "align-multiples", style: { "grid-template-columns": `repeat(${heads}, minmax(0, 1fr))` } },
        Array.from({ length: layers }, (_, l) => Array.from({ length: heads }, (_, i) => button(`${l}.${i}`, `L${l} H${i}`, weights[l][i], l === layer && i === head)))));
  }

  #show(t, s) {
    this.#at = [t, s];
    this.#readout([t, s]);
  }

  #readout(at) {
    const { matrix, readout } = this.#parts;
    for (const mark of matrix.querySelectorAll(".align-lit")) mark.classList.remove("align-lit");
    if (!at) return;
    const [t, s] = at, { source, target, probability } = this.#answer;
    matrix.querySelector(`[data-row="${t}"]`)?.classList.add("align-lit");
    matrix.querySelector(`[data-column="${s}"]`)?.classList.add("align-lit");
    readout.replaceChildren("To say ", h("b", {}, `“${named(target[t])}”`), ` (probability ${percent(probability[t])}) the model put `, h("b", {}, percent(this.#weights()[t][s])), " on ", h("b", {}, `“${named(source[s])}”`), ".");
  }

  #key(event) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    const { source, target } = this.#answer, { matrix } = this.#parts;
    const t = Math.min(Math.max(this.#at[0] + move[0], 0), target.length - 1), s = Math.min(Math.max(this.#at[1] + move[1], 0), source.length - 1);
    matrix.querySelector("[tabindex='0']")?.setAttribute("tabindex", -1);
    const next = matrix.querySelector(`[data-key="${t}.${s}"]`);
    next.setAttribute("tabindex", 0);
    next.focus();
  }

  picture() {
    if (!this.#answer?.target.length) return null;
    const { source, target, probability } = this.#answer, weights = this.#weights(), [layer, head] = this.#look();
    const which = this.#answer.weights.flat().length === 1 ? "" : layer === null ? ", mean of all heads" : `, layer ${layer}, head ${head}`;
    return {
      name: `${this.#model.name}${layer === null ? "" : `-layer${layer}-head${head}`}`,
      svg: () => {
        const size = 44, left = 100, top = 84;
        const cells = target.flatMap((_, t) => source.flatMap((__, s) => {
          const colour = ramp(weights[t][s]), x = left + s * size, y = top + t * size;
          return [svg("rect", { x, y, width: size - 1.5, height: size - 1.5, rx: 2, fill: css(colour) }), weights[t][s] >= 0.045 ? svgText(x + size / 2 - 0.75, y + size / 2 + 4, Math.round(100 * weights[t][s]), { "text-anchor": "middle", fill: inkOn(colour) }) : null];
        }));
        return svgPicture({
          width: Math.max(left + source.length * size + 40, 420), height: top + target.length * size, title: `${source.join(" ")} → ${target.join(" ")}`,
          note: `Attention of ${this.#model.name}${which}: the weight in % on each word read (columns) as each word was said (rows).`,
          parts: [
            source.map((word, s) => svgText(0, 0, word, { transform: `translate(${left + s * size + size / 2} ${top - 8}) rotate(-45)` })),
            target.map((word, t) => svgText(left - 10, top + t * size + size / 2 + 4, word, { "text-anchor": "end" })), cells.filter(Boolean),
          ],
        });
      },
      csv: () => {
        const rest = this.#model.kind === "reversal"; // the weight on what it has said itself
        return csvOf(["target", "probability", ...source, ...(rest ? ["said before"] : [])],
          target.map((word, t) => [word, probability[t], ...weights[t], ...(rest ? [Math.max(1 - weights[t].reduce((sum, weight) => sum + weight, 0), 0)] : [])]));
      },
    };
  }
}

/** Held-out scenes, the words said of each, and where the captioner looked for them. */
class Captions {
  #app;
  #scenes; // how many there are
  #known = new Map(); // scene → promise of its answer
  #stop = new AbortController();
  #scene = null;
  #answer = null;
  #word = 0;
  #smooth = true;
  #dark = 0.8;
  #play = 0;
  #parts;

  constructor(root, app) {
    this.#app = app;
    const { name, scenes } = app.session.align.captioner;
    this.#scenes = scenes;
    const canvas = h("canvas", { class: "align-image", role: "img" });
    this.#parts = {
      canvas, words: h("div", { class: "align-words", role: "group", "aria-label": "Words of the caption" }), truth: h("p", { class: "align-truth" }), strip: h("div", { class: "align-strip", role: "group", "aria-label": "Scenes" }),
      readout: h("output", { class: "readout", "aria-live": "polite" }), caption: h("p", { class: "align-said" }), place: h("span", { class: "align-place" }), play: h("button", { type: "button", class: "quiet", onclick: () => this.#toggle() }, "Play"),
      overlay: h("div", {}),
    };
    const { play, place, strip, words, truth, readout, caption, overlay } = this.#parts;
    const go = (scene) => app.go({ scene: (scene + scenes) % scenes, word: null }, { replace: true });
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => { readout.textContent = this.#sentence(); });
    root.append(
      h("div", { class: "align-scenes" },
        h("button", { type: "button", class: "quiet", "aria-label": "Previous scene", onclick: () => go(this.#scene - 1) }, "‹"), strip,
        h("button", { type: "button", class: "quiet", "aria-label": "Next scene", onclick: () => go(this.#scene + 1) }, "›"),
        place, h("button", { type: "button", class: "quiet", onclick: () => go(Math.floor(Math.random() * scenes)) }, "Random")),
      h("div", { class: "align-caption" },
        h("figure", { class: "align-figure" }, canvas, readout,
          h("div", { class: "controls align-controls" }, play, overlay,
            h("label", { class: "align-slider" }, h("span", {}, "Darken the rest"), h("input", { type: "range", min: 0, max: 1, step: 0.05, value: this.#dark, oninput: (event) => { this.#dark = Number(event.target.value); this.#paint(); } })))),
        h("div", { class: "align-told" }, h("h2", {}, "What it says"), caption, truth,
          h("p", { class: "note" }, `${name} has never seen this scene, nor one of this description. The image is as bright as the weight with which it looked for the word is strong.`), words)));
    this.#drawOverlay();
  }

  update() {
    const { scene, word, over } = this.#app.state;
    const wanted = Number.isInteger(scene) && scene >= 0 && scene < this.#scenes ? scene : 1;
    this.#smooth = over !== "cells";
    this.#drawOverlay();
    if (wanted !== this.#scene) {
      this.#pause();
      this.#scene = wanted;
      this.#open(wanted, Number.isInteger(word) ? word : 0);
    } else if (this.#answer) {
      this.#word = Math.min(Math.max(Number.isInteger(word) ? word : 0, 0), Math.max(this.#answer.words.length - 1, 0));
      this.draw();
    }
  }

  stop() {
    this.#pause();
    this.#stop.abort();
  }

  #caption(scene) {
    if (!this.#known.has(scene)) {
      const promise = this.#app.post("/api/caption", { scene }, { signal: this.#stop.signal }).then((answer) => ({
        ...answer, pixels: Uint8Array.from(atob(answer.image), (character) => character.charCodeAt(0)),
      }));
      promise.catch(() => this.#known.delete(scene));
      this.#known.set(scene, promise);
    }
    return this.#known.get(scene);
  }

  async #open(scene, word) {
    this.#strip();
    try {
      const answer = await this.#caption(scene);
      if (scene !== this.#scene) return; // another one was chosen meanwhile
      this.#answer = answer;
      this.#word = Math.min(Math.max(word, 0), Math.max(answer.words.length - 1, 0));
      this.draw();
      this.#app.announce(`Scene ${scene}: ${answer.words.join(" ")}`);
    } catch (error) {
      this.#app.trouble(error);
    }
  }

  #strip() {
    const { strip, place } = this.#parts, first = this.#scene - Math.floor(STRIP / 2);
    place.textContent = `Scene ${integer(this.#scene)} of 0–${integer(this.#scenes - 1)}`;
    replace(strip, ...Array.from({ length: STRIP }, (_, i) => {
      const scene = (first + i + this.#scenes) % this.#scenes, canvas = h("canvas", { width: 40, height: 40 });
      this.#caption(scene).then((answer) => drawn(canvas, answer, 1), () => {}); // the scene itself says when it cannot be had
      return h("button", { type: "button", class: "align-thumb", "data-key": `scene-${scene}`, "aria-label": `Scene ${scene}`, "aria-current": scene === this.#scene ? "true" : null, onclick: () => this.#app.go({ scene, word: null }, { replace: true }) }, canvas);
    }));
    const current = strip.querySelector("[aria-current]");
    strip.scrollLeft = current.offsetLeft - strip.offsetLeft - (strip.clientWidth - current.offsetWidth) / 2;
  }

  #drawOverlay() {
    replace(this.#parts.overlay, choice("Weights", [["smooth", "smooth"], ["cells", "cells"]], this.#smooth ? "smooth" : "cells", (over) => this.#app.go({ over: over === "smooth" ? null : over }, { replace: true })));
  }

  draw() {
    if (!this.#answer) return;
    const { words, truth, caption } = this.#parts, { words: said, truth: right } = this.#answer, same = said.join(" ") === right;
    caption.replaceChildren(...said.flatMap((word, i) => [h("span", { class: `align-target${i === this.#word ? " align-now" : ""}` }, word), " "]), said.length ? "" : "Nothing.");
    truth.replaceChildren(h("small", {}, "Truth: "), h("span", {}, right), " ", h("b", { class: same ? "align-right" : "align-wrong" }, same ? "✓ word for word" : "✗ differs"));
    replace(words, ...said.map((word, i) => {
      const canvas = h("canvas", {});
      drawn(canvas, this.#answer, SMALL, this.#light(i));
      return h("button", {
        type: "button", class: "align-multiple", "data-key": `said-${i}`, "aria-pressed": i === this.#word ? "true" : "false", onpointerenter: () => this.#turn(i, false), onfocus: () => this.#turn(i, false),
        onclick: () => { this.#pause(); this.#turn(i, true); },
      }, canvas, h("span", {}, word));
    }));
    this.#paint();
  }

  /** Show another word; `keep` writes it into the address. */
  #turn(word, keep) {
    if (this.#play && !keep) return;
    this.#word = word;
    if (keep) this.#app.go({ word }, { replace: true });
    this.#parts.words.querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", i === word));
    this.#parts.caption.querySelectorAll("span").forEach((span, i) => span.classList.toggle("align-now", i === word));
    this.#paint();
  }

  #paint() {
    const { canvas, readout } = this.#parts;
    if (!this.#answer) return;
    drawn(canvas, this.#answer, LARGE, this.#answer.words.length ? this.#light(this.#word) : null);
    canvas.setAttribute("aria-label", `The scene, bright where the model looked. ${this.#sentence()}`);
    readout.textContent = this.#sentence();
  }

  #light(word) {
    return { weights: this.#answer.weights[word], smooth: this.#smooth, dark: this.#dark };
  }

  #sentence() {
    const { words, weights } = this.#answer;
    if (!words.length) return "";
    return `To say “${words[this.#word]}”: at most ${percent(Math.max(...weights[this.#word].flat()))} of the weight in one cell.`;
  }

  #point(event) {
    if (!this.#answer?.words.length) return;
    const { canvas, readout } = this.#parts, { size, gh, gw, weights, words } = this.#answer, frame = canvas.getBoundingClientRect();
    const pixel = [(event.clientY - frame.top) / frame.height, (event.clientX - frame.left) / frame.width].map((share) => share * size - 0.5);
    const [i, j] = pixel.map((at, axis) => Math.min(Math.max(Math.round(at / (size / [gh, gw][axis])), 0), [gh, gw][axis] - 1));
    readout.textContent = `Cell (${i}, ${j}): ${percent(weights[this.#word][i][j])} of the weight, to say “${words[this.#word]}”.`;
  }

  #toggle() {
    if (this.#play) return this.#pause();
    if (!this.#answer?.words.length) return;
    const pace = matchMedia("(prefers-reduced-motion: reduce)").matches ? 2 * PACE : PACE;
    const next = (word) => {
      if (word >= this.#answer.words.length) return this.#pause();
      this.#turn(word, true);
      this.#app.announce(this.#answer.words[word]);
      this.#play = setTimeout(() => next(word + 1), pace);
    };
    this.#parts.play.textContent = "Stop";
    next(this.#word >= this.#answer.words.length - 1 ? 0 : this.#word);
  }

  #pause() {
    clearTimeout(this.#play);
    this.#play = 0;
    this.#parts.play.textContent = "Play";
  }

  picture() {
    const answer = this.#answer;
    if (!answer) return null;
    return {
      name: `${this.#app.session.align.captioner.name}-scene${this.#scene}`,
      svg: () => {
        const side = 120, gap = 14;
        const images = [["the image", null], ...answer.words.map((word, i) => [word, this.#light(i)])].map(([word, light], i) => {
          const canvas = document.createElement("canvas");
          drawn(canvas, answer, SMALL, light);
          return [svgText(i * (side + gap) + side / 2, 12, word, { "text-anchor": "middle", "font-style": i ? "normal" : "italic" }), svgImage(canvas, { x: i * (side + gap), y: 20, width: side, height: side })];
        });
        return svgPicture({
          width: Math.max((answer.words.length + 1) * (side + gap) - gap, 400), height: side + 20, title: answer.words.join(" ") || "(nothing)",
          note: `Held-out scene ${this.#scene}; truth: ${answer.truth}. The image is as bright as the weight with which each word was looked for is strong.`, parts: images,
        });
      },
      csv: () => csvOf(["word", "row", "column", "weight"], answer.words.flatMap((word, w) => answer.weights[w].flatMap((row, i) => row.map((weight, j) => [`${w} ${word}`, i, j, weight])))),
    };
  }
}

const strongest = (row) => row.indexOf(Math.max(...row));

/** Draw a scene, `scale` pixels for one of its own; with `light`, as bright as the weights are strong. */
function drawn(canvas, { size, pixels, gh, gw }, scale, light = null) {
  const side = size * scale, stride = [size / gh, size / gw];
  canvas.width = canvas.height = side;
  const context = canvas.getContext("2d"), image = context.createImageData(side, side);
  const top = light ? Math.max(...light.weights.flat(), 1e-9) : 1;
  // A cell of the convolutions is centred on pixel (i, j) · stride, not on a square of its own.
  const places = [0, 1].map((axis) => Array.from({ length: side }, (_, p) => {
    const cells = axis ? gw : gh, at = Math.min(Math.max(((p + 0.5) / scale - 0.5) / stride[axis], 0), cells - 1);
    const low = light && !light.smooth ? Math.round(at) : Math.floor(at);
    return [low, Math.min(low + 1, cells - 1), light && !light.smooth ? 0 : at - low];
  }));
  for (let y = 0, to = 0; y < side; y++) {
    const [i, i2, down] = places[0][y];
    for (let x = 0; x < side; x++, to += 4) {
      let bright = 1;
      if (light) {
        const [j, j2, right] = places[1][x], { weights } = light;
        const weight = (1 - down) * ((1 - right) * weights[i][j] + right * weights[i][j2]) + down * ((1 - right) * weights[i2][j] + right * weights[i2][j2]);
        bright = 1 - light.dark * (1 - weight / top);
      }
      const from = 3 * (Math.floor(y / scale) * size + Math.floor(x / scale));
      for (let channel = 0; channel < 3; channel++) image.data[to + channel] = bright * pixels[from + channel];
      image.data[to + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}
