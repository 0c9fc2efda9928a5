// Text generation by a live model: single steps, continuous play, and undo.

import { h } from "./dom.js";
import { counted } from "./state.js";

const SEED = 0; // the same text, edits and temperature give the same continuation

export class LiveWriting {
  text = null; // the text that the model reads; null at first
  ids = null; // token ids of the text, if it was generated token by token
  generated = []; // {token, probability} of the generated tokens at the end of the text
  step = null; // the answer to the last step, while its token is the last of the text
  temperature = 1; // sampling temperature
  #speed = 4; // tokens a second
  #history = []; // {text, ids} before each generated token
  #run = null; // while tokens are generated: an AbortController, and whether it is a single one
  #app;
  #requestOptions;
  #listeners;

  /**
   * `requestOptions()`: fields of the request except the text. Listeners: onbegin() before the first token, onstep() after
   * each, onend() after the last, ontemperature(), onundo(), onplay() when play begins or ends, ontrouble(sentence).
   */
  constructor(app, requestOptions, listeners) {
    this.#app = app;
    this.#requestOptions = requestOptions;
    this.#listeners = listeners;
    const slider = (key, label, attributes, value, oninput) => h("label", { class: "live-slider" }, h("span", {}, label),
      h("input", { type: "range", "data-key": key, ...attributes, value, oninput: (event) => { oninput(Number(event.target.value)); this.draw(); } }), h("output", { "data-of": key }));
    this.element = h("div", { class: "live-generation" },
      h("div", { class: "live-buttons" },
        h("button", { type: "button", class: "quiet live-play", onclick: () => (this.playing ? this.#stop() : counted(this.#generate({ single: false }))) }, "Play"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#generate({ single: true }) }, "Step"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#undo() }, "Undo")),
      h("div", { class: "live-sliders" },
        slider("heat", "Sampling temperature", { min: 0, max: 2, step: 0.1 }, this.temperature, (temperature) => { this.temperature = temperature; listeners.ontemperature(); }),
        slider("speed", "Speed", { min: 1, max: 12, step: 1 }, this.#speed, (speed) => { this.#speed = speed; })));
    this.draw();
  }

  get playing() {
    return this.#run?.single === false;
  }

  /** Set a text that the user typed; it no longer has generated tokens. */
  set(text) {
    Object.assign(this, { text, ids: null, generated: [], step: null });
    this.#history = [];
    this.draw();
  }

  /** Cancel a single step, or stop play. */
  halt() {
    const { playing } = this;
    this.#run?.controller.abort();
    this.#run = null;
    if (!playing) return;
    this.draw();
    this.#listeners.onplay();
  }

  async #one(signal) {
    const before = { text: this.text, ids: this.ids };
    const body = { ...this.#requestOptions(), text: this.text, ...(this.ids ? { ids: this.ids } : {}), sampling_temperature: this.temperature, seed: SEED, step: this.generated.length };
    const found = await this.#app.post("/api/live/step", body, { signal });
    if (signal.aborted) return;
    this.#history.push(before);
    this.generated.push({ token: found.token, probability: found.probability });
    Object.assign(this, { text: found.text, ids: found.ids, step: { ...found, at: `${body.layer}.${body.head}` } });
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
    if (!single) this.draw(), this.#listeners.onplay();
    try {
      do {
        const due = performance.now() + 1000 / this.#speed;
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
    element.querySelector("[data-of=speed]").textContent = `${this.#speed} a second`;
  }
}

export const temperatureWords = (temperature) => (temperature === 0 ? "0 (greedy)" : temperature.toFixed(1));
