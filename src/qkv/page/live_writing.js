// Text generation by a live model: single steps, continuous play, and undo.

import { h, replace } from "./dom.js";
import { counted } from "./state.js";

const PACE = 250; // milliseconds from token to token, at least
const SEED = 0; // the same text, edits and temperature give the same continuation

export class LiveWriting {
  text = null; // the text that the model reads; null at first
  ids = null; // token ids of the text, if it was generated token by token
  generated = []; // {token, probability} of the generated tokens at the end of the text
  step = null; // the answer to the last step, while its token is the last of the text
  temperature = 1; // sampling temperature
  plain = null; // once a token was generated with edits, what the model writes without them: {text, ids, tokens, from}
  #history = []; // {text, ids, plain} before each generated token
  #run = null; // while tokens are generated: an AbortController, and whether it is a single one
  #app;
  #requestOptions;
  #listeners;

  /**
   * `requestOptions()`: fields of the request except the text. Listeners: onbegin() before the first token, onstep() after
   * each, onend() after the last, ontemperature(), onundo(), ontrouble(sentence).
   */
  constructor(app, requestOptions, listeners) {
    this.#app = app;
    this.#requestOptions = requestOptions;
    this.#listeners = listeners;
    this.element = h("div", { class: "live-generation" },
      h("div", { class: "live-buttons" },
        h("button", { type: "button", class: "quiet live-play", onclick: () => (this.playing ? this.#stop() : counted(this.#generate({ single: false }))) }, "Play"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#generate({ single: true }) }, "Step"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#undo() }, "Undo")),
      h("div", { class: "live-sliders" },
        h("label", { class: "live-slider" }, h("span", {}, "Sampling temperature"),
          h("input", { type: "range", "data-key": "heat", min: 0, max: 2, step: 0.1, value: this.temperature, oninput: ({ target }) => { this.temperature = Number(target.value); listeners.ontemperature(); this.draw(); } }), h("output", { "data-of": "heat" }))),
      this.held = h("small", { role: "status" }), this.both = h("dl", { class: "live-both" }));
    this.draw();
  }

  get playing() {
    return this.#run?.single === false;
  }

  /** Set a text that the user typed; it no longer has generated tokens. */
  set(text) {
    Object.assign(this, { text, ids: null, generated: [], step: null, plain: null });
    this.#history = [];
    this.draw();
  }

  /** Cancel a single step, or stop play. */
  halt() {
    const { playing } = this;
    this.#run?.controller.abort();
    this.#run = null;
    if (playing) this.draw();
  }

  async #one(signal) {
    const before = { text: this.text, ids: this.ids, plain: this.plain }, options = this.#requestOptions(), step = this.generated.length;
    const ask = ({ text, ids }, edits) => this.#app.request("/api/live/step", { body: { ...options, edits, text, ...(ids ? { ids } : {}), sampling_temperature: this.temperature, seed: SEED, step }, signal });
    const plain = this.plain ?? (options.edits.length ? { ...before, tokens: [], from: step } : null);
    const [found, trained] = await Promise.all([ask(before, options.edits), plain && ask(plain, [])]);
    if (signal.aborted) return;
    this.plain = plain && { text: trained.text, ids: trained.ids, tokens: [...plain.tokens, trained.token], from: plain.from };
    this.#history.push(before);
    this.generated.push({ token: found.token, probability: found.probability });
    Object.assign(this, { text: found.text, ids: found.ids, step: { ...found, at: `${options.layer}.${options.head}` } });
    this.draw();
    this.#listeners.onstep();
  }

  /** Generate a single token, or tokens until `halt`. */
  async #generate({ single }) {
    this.halt();
    if (!this.text) return this.#listeners.ontrouble("Type some text for the model to continue.");
    this.#listeners.onbegin();
    const controller = new AbortController(), { signal } = controller;
    this.#run = { controller, single };
    if (!single) this.draw();
    try {
      do {
        const due = performance.now() + PACE;
        await this.#one(signal);
        if (!single) await new Promise((resolve) => setTimeout(resolve, Math.max(due - performance.now(), 0)));
      } while (!single && !signal.aborted);
      if (!signal.aborted) this.#stop();
    } catch (error) {
      if (signal.aborted) return;
      if (single) this.halt(); else this.#stop();
      this.#listeners.ontrouble(error.message);
    }
  }

  #stop() {
    this.halt();
    if (this.step) this.#listeners.onend();
  }

  #undo() {
    this.halt();
    const before = this.#history.pop();
    if (!before) return;
    this.generated.pop();
    Object.assign(this, { ...before, step: null });
    this.draw();
    this.#listeners.onundo();
  }

  draw() {
    const { element } = this, [play, step, undo] = element.querySelectorAll("button");
    play.textContent = this.playing ? "Stop" : "Play";
    play.setAttribute("aria-pressed", this.playing);
    step.disabled = this.playing;
    undo.disabled = !this.#history.length;
    element.querySelector("[data-of=heat]").textContent = temperatureWords(this.temperature);
    element.querySelector("[data-key=heat]").value = this.temperature;
    this.held.textContent = this.playing ? "The grid and the maps follow when it stops." : "";
    replace(this.both, ...(this.plain ? [["With the edits", this.generated.slice(this.plain.from).map(({ token }) => token)], ["As trained", this.plain.tokens]].map(([name, tokens]) => h("div", {}, h("dt", {}, name), h("dd", {}, tokens.join("")))) : []));
  }
}

export const temperatureWords = (temperature) => (temperature === 0 ? "0 (greedy)" : temperature.toFixed(1));
