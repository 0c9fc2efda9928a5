// The grid of heads of a live model: selection, edits, and the weight on the first token.

import { choice, legend } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { h, replace } from "./dom.js";
import { arrowKeys, headButton, layerGrid, MANY } from "./heads.js";
import { codeOf, editsOf, headAt, headsOf, settingOf, settingWords, shortName } from "./live_words.js";
import { percent } from "./numbers.js";

const MARKS = { softmax: "n", "off-by-one": "+1", sigmoid: "σ" };
const MEANINGS = {
  softmax: "exp(s) divided by its sum over the keys: every row of weights sums to 1.",
  "off-by-one": "The denominator has an additional term exp(0) = 1, so rows sum to less than 1 and a head may attend to nothing.",
  sigmoid: "σ(s − ln n) for each key independently, where n is the number of visible keys: rows need not sum to 1.",
};

export class LiveHeads {
  #live;
  #onshow;
  #onedit;
  #answer = null;
  #inView = null; // the head to which the grid was scrolled

  /** `live`: the model. `onshow(another)` is called after a selection, with whether another head is shown; `onedit(change)` after an edit. */
  constructor(live, { onshow, onedit }) {
    this.#live = live;
    this.#onshow = onshow;
    this.#onedit = onedit;
    this.edits = new Map(); // "layer.head" → {normalizer, temperature}
    this.selected = new Set(); // heads that the next edit applies to
    this.shown = ""; // the head whose weights are shown
    this.grid = h("div", { class: "live-grid-box" });
    this.quick = h("div", { class: "live-quick" });
    this.setting = h("div", { class: "live-setting" });
    this.element = h("div", { class: "live-column" }, h("h2", {}, "Heads to change"), this.grid, this.quick, this.setting);
  }

  /** Edits as a short code: see `codeOf`. */
  get code() {
    return codeOf(this.edits, this.#live);
  }

  set code(code) {
    this.edits = editsOf(code, this.#live);
  }

  /** Edits as a list for the body of a request. */
  get list() {
    return [...this.edits].map(([at, edit]) => ({ layer: headAt(at)[0], head: headAt(at)[1], ...edit }));
  }

  /** Show the head that the address names; returns whether it is another one. */
  show(at) {
    if (at === this.shown) return false;
    this.shown = at;
    if (!this.selected.has(at)) this.selected = new Set([at]);
    return true;
  }

  #select(at, more) {
    if (more && this.selected.has(at) && this.selected.size > 1) this.selected.delete(at);
    else if (more) this.selected.add(at);
    else this.selected = new Set([at]);
    const moved = this.selected.has(at) && at !== this.shown;
    if (moved) this.shown = at;
    else if (!this.selected.has(this.shown)) this.shown = [...this.selected].at(-1);
    this.#selected(moved);
  }

  #selectAll(heads) {
    const moved = !heads.includes(this.shown);
    this.selected = new Set(heads);
    if (moved) this.shown = heads[0];
    this.#selected(moved);
  }

  #selected(moved) {
    this.drawSetting();
    this.#drawGrid();
    this.#onshow(moved);
  }

  #edit(change) {
    const [own] = this.#live.normalizers;
    for (const at of this.selected) {
      const edit = { ...settingOf(this.edits, at, own), ...change };
      if (edit.normalizer === own && edit.temperature === 1) this.edits.delete(at);
      else this.edits.set(at, edit);
    }
    this.drawSetting();
    this.#onedit(change);
  }

  #reset() {
    this.edits.clear();
    this.drawSetting();
    this.#onedit({});
  }

  /** Draw the answer of the server. */
  draw(answer) {
    this.#answer = answer;
    this.drawSetting();
    this.#drawGrid();
  }

  /** The grid, layers × heads: the weight on the first token, as trained and with the edits. */
  #drawGrid() {
    if (!this.#answer) return;
    const { layers, heads } = this.#live, group = { layers: [...Array(layers).keys()], heads: [...Array(heads).keys()] };
    const { before, after } = this.#answer, single = this.#answer.tokens.length < 2;
    const cell = (layer, head) => {
      const at = `${layer}.${head}`, edit = this.edits.get(at), was = before.sink[layer][head], is = after.sink[layer][head];
      const now = css(ramp(Math.min(is, 1))), then = css(ramp(Math.min(was, 1)));
      const mark = edit ? [edit.normalizer === this.#live.normalizers[0] ? null : MARKS[edit.normalizer], edit.temperature === 1 ? null : "T"].filter(Boolean).join(" ") : "";
      const weight = single ? "one token only" : Math.abs(was - is) < 0.0005 ? percent(is) : `${percent(was)} → ${percent(is)}`;
      return headButton(group, layer, head, `${weight} on the first token${edit ? `\n${settingWords(edit)}` : ""}`, {
        role: "gridcell", class: "live-cell", "data-key": `cell-${at}`, tabindex: at === this.shown ? 0 : -1,
        "aria-selected": this.selected.has(at) ? "true" : "false", "aria-current": at === this.shown ? "true" : null,
        style: { background: `${now} linear-gradient(to right, ${then} 26%, transparent 26%)`, color: inkOn(ramp(Math.min(is, 1))) },
        onclick: (event) => this.#select(at, event.shiftKey || event.ctrlKey || event.metaKey),
      }, h("span", {}, single ? "–" : String(Math.round(100 * is))), mark ? h("sup", {}, mark) : null);
    };
    const scrolled = this.grid.querySelector(".live-scroll")?.scrollTop ?? 0;
    replace(this.grid,
      h("div", { class: "live-grid-title" }, h("span", {}, "Mean weight on the first token, %"), legend({ low: "0", high: "100\u00a0%" })),
      h("div", { class: "live-scroll" },
        layerGrid(group, cell, 1, {
          class: layers > MANY ? "live-grid tight" : "live-grid", "aria-multiselectable": "true", "aria-label": "Heads. Arrow keys move, Enter selects, Shift and Enter adds.",
          style: { "grid-template-columns": `20px repeat(${heads}, minmax(30px, 1fr))` },
        })),
      h("small", {}, "The left edge of a cell is the weight before the edits. Click a head to select it; Shift-click adds heads."));
    const box = this.grid.querySelector(".live-scroll");
    arrowKeys(box, (cell) => cell.focus());
    box.scrollTop = scrolled;
    if (this.#inView === this.shown) return;
    this.#inView = this.shown;
    const current = box.querySelector("[aria-current]").getBoundingClientRect(), around = box.getBoundingClientRect();
    box.scrollTop += Math.max(0, current.bottom + 8 - around.bottom) - Math.max(0, around.top + 8 - current.top);
  }

  drawSetting() {
    this.#drawQuick();
    this.#drawChoices();
  }

  #drawQuick() {
    const [layer] = headAt(this.shown), all = headsOf(this.#live), before = this.#answer?.before.sinks;
    const sinks = before ? all.filter((at) => before[headAt(at)[0]][headAt(at)[1]]) : [];
    const button = (key, label, wanted, title) => h("button", { type: "button", class: "quiet live-small", "data-key": `quick-${key}`, disabled: !wanted.length, title, onclick: () => this.#selectAll(wanted) }, label);
    replace(this.quick,
      h("span", { class: "live-count" }, this.selected.size === 1 ? shortName([...this.selected][0]) : `${this.selected.size} heads`),
      button("all", "All", all), button("layer", `Layer ${layer}`, all.filter((at) => headAt(at)[0] === layer)),
      button("sinks", `Sinks (${sinks.length})`, sinks, "Heads with an attention sink at the first token: a mean weight on it above 30 % over the first 64 queries, as a profile counts them"),
      h("button", { type: "button", class: "quiet live-small live-reset", "data-key": "reset", disabled: !this.edits.size, onclick: () => this.#reset() }, "Reset"));
  }

  #drawChoices() {
    const [own] = this.#live.normalizers, settings = [...this.selected].map((at) => settingOf(this.edits, at, own));
    const same = (key) => (settings.every((one) => one[key] === settings[0][key]) ? settings[0][key] : null);
    const normalizer = same("normalizer"), temperature = same("temperature"), words = temperature === null ? "mixed" : temperature.toFixed(2);
    const slider = this.setting.querySelector("[data-key=temperature]");
    if (slider && document.activeElement === slider) { // replacing the slider would end a drag
      slider.setAttribute("aria-valuetext", words);
      this.setting.querySelector("[data-of=temperature]").textContent = words;
      this.setting.querySelector("[data-key=one]").disabled = temperature === 1;
      return;
    }
    const apply = (event) => {
      const exponent = Number(event.target.value);
      this.#edit({ temperature: Math.abs(exponent) < 0.02 ? 1 : Number((10 ** exponent).toPrecision(2)) });
    };
    replace(this.setting,
      choice("Normalizer", this.#live.normalizers.map((name) => [name, name]), normalizer, (name) => this.#edit({ normalizer: name })),
      h("p", { class: "note" },
        normalizer === null ? "The selected heads have different normalizers." : MEANINGS[normalizer],
        normalizer !== null && normalizer !== own ? ` The model was trained with ${own}, and is not retrained.` : ""),
      h("label", { class: "live-slider", title: "Scores are divided by it." }, h("span", {}, "Temperature"),
        h("input", {
          type: "range", "data-key": "temperature", min: -1, max: 1, step: 0.05, value: Math.log10(temperature ?? 1), "aria-label": "Temperature of the selected heads, from 0.1 to 10",
          "aria-valuetext": words, oninput: apply,
        }),
        h("output", { "data-of": "temperature" }, words),
        h("button", { type: "button", class: "quiet live-small", "data-key": "one", disabled: temperature === 1, onclick: () => this.#edit({ temperature: 1 }) }, "1")));
  }
}
