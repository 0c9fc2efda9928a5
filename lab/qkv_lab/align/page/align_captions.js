// Captions of held-out scenes, with the attention weights on the image for each word.

import { alignment } from "./align_weights.js";
import { drawScene } from "./align_scene.js";
import { choice } from "./charts.js";
import { bytesOf } from "./data.js";
import { h, replace } from "./dom.js";
import { csvOf } from "./export.js";
import { integer, percent } from "./numbers.js";
import { Loads } from "./state.js";

const STRIP = 9; // scenes in the strip
const LARGE = 10, SMALL = 4; // pixels on the screen for one of a scene
const PACE = 1100; // milliseconds a word is shown while playing

export class AlignCaptions {
  #app;
  #scenes; // number of scenes
  #cache = new Loads(); // scene → promise of its answer
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
    const { name, scenes } = alignment(app).captioner;
    this.#scenes = scenes;
    const canvas = h("canvas", { class: "align-image", role: "img" });
    this.#parts = {
      canvas, words: h("div", { class: "align-words", role: "group", "aria-label": "Words of the caption" }), truth: h("p", { class: "align-truth" }), strip: h("div", { class: "align-strip", role: "group", "aria-label": "Scenes" }),
      readout: h("output", { class: "readout", "aria-live": "polite" }), caption: h("p", { class: "align-output" }), place: h("span", { class: "align-place" }), play: h("button", { type: "button", class: "quiet", onclick: () => this.#toggle() }, "Play"),
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
        h("div", { class: "align-told" }, h("h2", {}, "Caption"), caption, truth,
          h("p", { class: "note" }, `${name} was not trained on this scene, nor on any scene with this description. The brighter a part of the image, the larger the attention weight on it when the word was generated.`), words)));
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
    return this.#cache.once(scene, async () => {
      const answer = await this.#app.request("/api/caption", { body: { scene }, signal: this.#stop.signal });
      return { ...answer, pixels: bytesOf(answer.image) };
    });
  }

  async #open(scene, word) {
    this.#strip();
    try {
      const answer = await this.#caption(scene);
      if (scene !== this.#scene) return; // another scene was chosen meanwhile
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
      this.#caption(scene).then((answer) => drawScene(canvas, answer, 1), () => {}); // #open reports the error
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
    const { words, truth, caption } = this.#parts, { words: generated, truth: expected } = this.#answer, same = generated.join(" ") === expected;
    caption.replaceChildren(...generated.flatMap((word, i) => [h("span", { class: `align-target${i === this.#word ? " align-now" : ""}` }, word), " "]), generated.length ? "" : "(empty)");
    truth.replaceChildren(h("small", {}, "Truth: "), h("span", {}, expected), " ", h("b", { class: same ? "align-right" : "align-wrong" }, same ? "✓ identical" : "✗ differs"));
    replace(words, ...generated.map((word, i) => {
      const canvas = h("canvas", {});
      drawScene(canvas, this.#answer, SMALL, this.#light(i));
      return h("button", {
        type: "button", class: "align-multiple", "data-key": `word-${i}`, "aria-pressed": i === this.#word ? "true" : "false", onpointerenter: () => this.#turn(i, false), onfocus: () => this.#turn(i, false),
        onclick: () => { this.#pause(); this.#turn(i, true); },
      }, canvas, h("span", {}, word));
    }));
    this.#paint();
  }

  /** Show the weights of another word; `keep` writes it into the address. */
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
    drawScene(canvas, this.#answer, LARGE, this.#answer.words.length ? this.#light(this.#word) : null);
    canvas.setAttribute("aria-label", `The scene, bright where the attention weights are large. ${this.#sentence()}`);
    readout.textContent = this.#sentence();
  }

  #light(word) {
    return { weights: this.#answer.weights[word], smooth: this.#smooth, dark: this.#dark };
  }

  #sentence() {
    const { words, weights } = this.#answer;
    if (!words.length) return "";
    return `“${words[this.#word]}”: the largest weight of a cell is ${percent(Math.max(...weights[this.#word].flat()))}.`;
  }

  #point(event) {
    if (!this.#answer?.words.length) return;
    const { canvas, readout } = this.#parts, { size, gh, gw, weights, words } = this.#answer, frame = canvas.getBoundingClientRect();
    const pixel = [(event.clientY - frame.top) / frame.height, (event.clientX - frame.left) / frame.width].map((share) => share * size - 0.5);
    const [i, j] = pixel.map((at, axis) => Math.min(Math.max(Math.round(at / (size / [gh, gw][axis])), 0), [gh, gw][axis] - 1));
    readout.textContent = `“${words[this.#word]}”: cell (${i}, ${j}) has ${percent(weights[this.#word][i][j])} of the weight.`;
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
      name: `${alignment(this.#app).captioner.name}-scene${this.#scene}`,
      title: answer.words.join(" ") || "(empty)", elements: [this.#parts.words],
      note: `Held-out scene ${this.#scene}; truth: ${answer.truth}. Brightness shows the attention weights when each word was generated.`,
      csv: () => csvOf(["word", "row", "column", "weight"], answer.words.flatMap((word, w) => answer.weights[w].flatMap((row, i) => row.map((weight, j) => [`${w} ${word}`, i, j, weight])))),
    };
  }
}
