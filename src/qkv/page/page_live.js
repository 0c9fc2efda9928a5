// Live: edit the normalizer or temperature of chosen heads, and see the effect on a text while typing.

import { textField } from "./charts.js";
import { bytesOf } from "./data.js";
import { h } from "./dom.js";
import { editWords, headlineOf, isHead, nextBars, nextRows, quoted, sampledRows, SHOWN } from "./live_words.js";
import { liveCsv, liveFileName, liveMaps, LiveTokens } from "./live_maps.js";
import { LiveHeads } from "./live_heads.js";
import { LiveWriting, temperatureWords } from "./live_writing.js";
import { named, percent } from "./numbers.js";
import { cancel, later } from "./state.js";

const PAUSE = 250; // milliseconds after the last key before the text is sent
const SLIDER_PAUSE = 60; // milliseconds after the last move of a slider before a request is sent

/** Keys of its state: `prompt`, `edits` (see `codeOf`), `at` ("layer.head"), `heat` (sampling temperature). */
export const mount = (root, app) => new LivePage(root, app);

class LivePage {
  #app;
  #live; // description of the model in the session
  #answer = null;
  #request = null; // AbortController of the pending request
  #timer = null;
  #writing;
  #heads;
  #tokens = new LiveTokens();
  #parts;

  constructor(root, app) {
    this.#app = app;
    this.#live = app.session.live;
    this.#writing = new LiveWriting(app, () => this.#body(), {
      onbegin: () => this.#cancel(),
      onstep: () => this.#stepped(),
      onend: () => this.#generated(),
      ontemperature: () => this.#writeAddress(),
      onundo: () => { this.#parts.field.value = this.#writing.text; this.#writeAddress(); this.#ask(); },
      ontrouble: (sentence) => this.#parts.tell(sentence),
    });
    this.#heads = new LiveHeads(this.#live, {
      onshow: (another) => { this.#writeAddress(); if (another && !this.#writing.playing) this.#ask(); },
      onedit: (change) => this.#edited(change),
    });
    this.#build(root);
  }

  #build(root) {
    const live = this.#live;
    const input = textField("live", { rows: 5, maxlength: live.most_characters, oninput: () => this.#typed() });
    const parts = (this.#parts = {
      ...input,
      headline: h("p", { class: "live-headline" }), likeliest: h("p", { class: "note" }), next: h("div", { class: "live-next" }), maps: h("div", { class: "live-maps" }),
    });
    parts.effect = h("div", { class: "live-column live-effect" }, h("h2", {}, "The next token"), parts.headline, parts.likeliest, parts.next);
    root.classList.add("live");
    root.append(
      h("div", { class: "live-column" },
        h("label", { for: "live-text", class: "live-label" }, h("h2", {}, "Text"), h("small", {}, `${live.model} reads the text as you type, at most ${live.most_tokens} tokens`)),
        input.field, input.trouble, this.#writing.element, this.#tokens.element),
      this.#heads.element,
      parts.effect,
      parts.maps,
    );
  }

  update(changed) {
    const { state } = this.#app, writing = this.#writing, heads = this.#heads;
    const text = String(state.prompt ?? this.#live.example), edits = String(state.edits ?? "");
    let outdated = false;
    if (writing.text === null || (changed.has("prompt") && text !== writing.text)) {
      writing.halt();
      writing.set(text);
      this.#parts.field.value = text;
      outdated = true;
    }
    if (edits !== heads.code) {
      heads.code = edits;
      outdated = true;
    }
    const temperature = Number(state.heat ?? 1);
    if (temperature >= 0 && temperature <= 2) writing.temperature = temperature;
    const at = [String(state.at), `${state.layer}.${state.head}`, "0.0"].find((one) => isHead(one, this.#live));
    if (heads.show(at)) outdated = true;
    if (outdated) this.#ask();
    else if (changed.has("source") || changed.has("session")) this.#draw();
    writing.draw();
    heads.drawSetting();
  }

  /** Keys of its state that the address does not hold yet. */
  unwritten() {
    return { prompt: this.#writing.text };
  }

  recolour() { this.#draw(); }

  unmount() {
    this.#writing.halt();
    this.#cancel();
  }

  // --- requests -----------------------------------------------------------------------------------------------------

  #body() {
    const [layer, head] = this.#heads.shown.split(".").map(Number);
    return { edits: this.#heads.list, layer, head, k: SHOWN };
  }

  /** Request the answer for the text. `keepStep`: keep showing the last sampled token; only heads and maps are updated. */
  async #ask({ keepStep = false } = {}) {
    const writing = this.#writing, { text, ids } = writing, at = this.#heads.shown, edited = this.#heads.edits.size > 0;
    writing.halt();
    this.#cancel();
    if (!text) return this.#parts.tell("Type some text for the model to read.");
    const request = (this.#request = new AbortController());
    try {
      const answer = await this.#app.request("/api/live", { body: { ...this.#body(), text, ...(ids ? { ids } : {}) }, signal: request.signal });
      if (request.signal.aborted) return;
      const maps = [answer.before, answer.after].map(({ map }) => new Float32Array(bytesOf(map).buffer));
      this.#answer = { ...answer, at, text, edited, maps };
      if (!keepStep) writing.step = null;
      this.#parts.tell("");
      this.#draw();
      if (!keepStep) this.#app.announce([this.#parts.headline, this.#parts.likeliest].map((part) => part.textContent).join(" "));
    } catch (error) {
      if (error.name !== "AbortError") this.#parts.tell(error.message);
    } finally {
      if (this.#request === request) this.#request = null;
    }
  }

  /** Cancel the pending request and the one that is scheduled. */
  #cancel() {
    cancel(this.#timer);
    this.#request?.abort();
  }

  #typed() {
    this.#writing.halt();
    this.#cancel();
    this.#writing.set(this.#parts.field.value);
    this.#timer = later(() => { this.#writeAddress(); this.#ask(); }, PAUSE);
  }

  #edited(change) {
    this.#writeAddress();
    if (this.#writing.playing) return;
    cancel(this.#timer);
    this.#timer = later(() => this.#ask(), "temperature" in change ? SLIDER_PAUSE : 0);
  }

  /** A token was generated. */
  #stepped() {
    const { field } = this.#parts;
    field.value = this.#writing.text;
    field.scrollTop = field.scrollHeight;
    this.#parts.tell("");
    this.#drawTokens();
    this.#drawNext();
  }

  /** The last token was generated. */
  #generated() {
    const { token, probability } = this.#writing.generated.at(-1);
    this.#app.announce(`${named(token)}, probability ${percent(probability)}`);
    this.#writeAddress();
    this.#ask({ keepStep: true });
  }

  /** Write the state into the address. */
  #writeAddress() {
    const { text, temperature } = this.#writing, { code, shown } = this.#heads;
    this.#app.go({ prompt: text, edits: code || null, at: shown, heat: temperature === 1 ? null : temperature }, { replace: true });
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
    const { step, generated } = this.#writing;
    if (step) return this.#tokens.draw({ tokens: step.tokens, row: step.row, at: step.at, generated, step });
    const { tokens, rows, at } = this.#answer, [layer, head] = at.split(".").map(Number);
    this.#tokens.draw({ tokens, row: rows[layer][head], at, generated, step: null });
  }

  #drawNext() {
    const { headline, likeliest, next } = this.#parts, { step, temperature } = this.#writing;
    if (step) {
      headline.replaceChildren(quoted(step.token), ` was sampled, with probability ${percent(step.probability)}.`);
      likeliest.replaceChildren(`Sampled at temperature ${temperatureWords(temperature)} from the prediction of the ${this.#heads.edits.size ? "edited " : ""}model.`);
      next.replaceChildren(nextBars(sampledRows(step), false));
      return;
    }
    const [change, token] = headlineOf(this.#answer);
    headline.replaceChildren(...change);
    likeliest.replaceChildren(...token);
    next.replaceChildren(nextBars(nextRows(this.#answer), this.#answer.edited));
  }

  picture() {
    const answer = this.#answer, live = this.#live;
    if (!answer) return null;
    return {
      name: liveFileName(answer, live),
      title: `${live.model} ${answer.edited ? "with edits" : "as trained"}`,
      note: `Text: “${answer.text.slice(-120)}”. ${editWords(this.#heads.edits, live)}`,
      elements: [this.#parts.effect, this.#parts.maps], csv: () => liveCsv(answer),
    };
  }
}
