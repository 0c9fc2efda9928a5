// A live model writes: one token at a time, or one after another until it is stopped; each can be taken back.

import { h } from "./dom.js";

const SEED = 0; // the same text, edits and temperature go on in the same way

export class LiveWriting {
  text = null; // what the model reads; null until there is one
  ids = null; // its tokens, where it was made token by token
  made = []; // {token, probability} of tokens that the model wrote, the last ones of the text
  step = null; // the answer to the last step, while its token is the newest
  heat = 1; // sampling temperature
  #speed = 4; // tokens a second
  #history = []; // {text, ids} before each token that was written
  #flight = null; // AbortController of a single step
  #play = null; // AbortController while tokens come by themselves
  #app;
  #asked;
  #listeners;

  /**
   * `asked()`: what a request holds beside the text. Listeners: onbegin() before tokens come, onstep() after each,
   * onend() after the last, onheat(), onundo(), onplay() when that begins or ends, onsay(sentence).
   */
  constructor(app, asked, listeners) {
    this.#app = app;
    this.#asked = asked;
    this.#listeners = listeners;
    const slider = (key, label, attributes, value, oninput) => h("label", { class: "live-slider" }, h("span", {}, label),
      h("input", { type: "range", "data-key": key, ...attributes, value, oninput: (event) => { oninput(Number(event.target.value)); this.draw(); } }), h("output", { "data-of": key }));
    this.element = h("div", { class: "live-generation" },
      h("div", { class: "live-buttons" },
        h("button", { type: "button", class: "quiet live-play", onclick: () => (this.#play ? this.#stop() : this.#start()) }, "Play"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#stepOnce() }, "Step"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#undo() }, "Undo")),
      h("div", { class: "live-sliders" },
        slider("heat", "Sampling temperature", { min: 0, max: 2, step: 0.1 }, this.heat, (heat) => { this.heat = heat; listeners.onheat(); }),
        slider("speed", "Speed", { min: 1, max: 12, step: 1 }, this.#speed, (speed) => { this.#speed = speed; })));
    this.draw();
  }

  get playing() {
    return this.#play !== null;
  }

  /** Another text, which somebody typed: what the model wrote before is now like any other. */
  set(text, ids = null) {
    Object.assign(this, { text, ids, made: [], step: null });
    this.#history = [];
    this.draw();
  }

  /** The token of a single step is not wanted any more. */
  cancel() {
    this.#flight?.abort();
  }

  /** No more tokens, because something else follows. */
  halt() {
    this.cancel();
    if (!this.#play) return;
    this.#play.abort();
    this.#play = null;
    this.draw();
    this.#listeners.onplay();
  }

  async #one(signal) {
    const before = { text: this.text, ids: this.ids };
    const body = { ...this.#asked(), text: this.text, ...(this.ids ? { ids: this.ids } : {}), sampling_temperature: this.heat, seed: SEED, step: this.made.length };
    const found = await this.#app.post("/api/live/step", body, { signal });
    if (signal.aborted) return;
    this.#history.push(before);
    this.made.push({ token: found.token, probability: found.probability });
    Object.assign(this, { text: found.text, ids: found.ids, step: { ...found, at: `${body.layer}.${body.head}` } });
    this.draw();
    this.#listeners.onstep();
  }

  async #stepOnce() {
    this.halt();
    if (!this.text) return this.#listeners.onsay("Type some text for the model to go on with.");
    this.#listeners.onbegin();
    const flight = (this.#flight = new AbortController());
    try {
      await this.#one(flight.signal);
      if (!flight.signal.aborted) this.#listeners.onend();
    } catch (error) {
      if (error.name !== "AbortError") this.#listeners.onsay(error.message);
    } finally {
      if (this.#flight === flight) this.#flight = null;
    }
  }

  async #start() {
    this.halt();
    if (!this.text) return this.#listeners.onsay("Type some text for the model to go on with.");
    this.#listeners.onbegin();
    const play = (this.#play = new AbortController());
    this.draw();
    this.#listeners.onplay();
    try {
      while (!play.signal.aborted) {
        const due = performance.now() + 1000 / this.#speed;
        await this.#one(play.signal);
        await new Promise((resolve) => setTimeout(resolve, Math.max(due - performance.now(), 0)));
      }
    } catch (error) {
      if (play.signal.aborted) return;
      this.#stop();
      this.#listeners.onsay(error.message);
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
    this.made.pop();
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
    element.querySelector("[data-of=heat]").textContent = heatWords(this.heat);
    element.querySelector("[data-key=heat]").value = this.heat;
    element.querySelector("[data-of=speed]").textContent = `${this.#speed} a second`;
  }
}

export const heatWords = (heat) => (heat === 0 ? "0 (greedy)" : heat.toFixed(1));
