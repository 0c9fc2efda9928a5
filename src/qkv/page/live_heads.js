// The heads of a live model: which are chosen, how they are edited, and their weight on the first token.

import { choice, legend } from "./charts.js";
import { css, inkOn, ramp } from "./colour.js";
import { h, replace } from "./dom.js";
import { codeOf, editsOf, headAt, headsOf, longName, settingOf, settingWords, shortName } from "./live_edits.js";
import { percent } from "./numbers.js";

const SINK = 0.3; // a head with more on the first token is called a sink (Gu et al. 2025)
const MARKS = { softmax: "n", "off-by-one": "+1", sigmoid: "σ" };
const MEANINGS = {
  softmax: "exp(s), divided by its sum: every row of weights sums to 1.",
  "off-by-one": "One more term, exp(0) = 1, in the sum: a head may attend to little, and rows sum to less than 1.",
  sigmoid: "σ(s − ln n) for each key on its own, n being the keys the query sees: rows need not sum to 1.",
};

export class LiveHeads {
  #live;
  #onshow;
  #onedit;
  #answer = null;

  /** `live`: the model. `onshow(another)`: whether another head is to be shown; `onedit(change)`: what was edited. */
  constructor(live, { onshow, onedit }) {
    this.#live = live;
    this.#onshow = onshow;
    this.#onedit = onedit;
    this.edits = new Map(); // "layer.head" → {normalizer, temperature}
    this.chosen = new Set(); // heads that an edit is for
    this.shown = ""; // the head whose weights are shown
    this.grid = h("div", { class: "live-grid-box" });
    this.quick = h("div", { class: "live-quick" });
    this.setting = h("div", { class: "live-setting" });
    this.element = h("div", { class: "live-column" }, h("h2", {}, "Heads to change"), this.grid, this.quick, this.setting);
  }

  /** Edits in few characters. */
  get code() {
    return codeOf(this.edits, this.#live);
  }

  set code(code) {
    this.edits = editsOf(code, this.#live);
  }

  /** The same as a request has them. */
  get asked() {
    return [...this.edits].map(([at, edit]) => ({ layer: headAt(at)[0], head: headAt(at)[1], ...edit }));
  }

  /** Show a head, as the address says; true if it is another. */
  turnTo(at) {
    if (at === this.shown) return false;
    this.shown = at;
    if (!this.chosen.has(at)) this.chosen = new Set([at]);
    return true;
  }

  #select(at, more) {
    if (more && this.chosen.has(at) && this.chosen.size > 1) this.chosen.delete(at);
    else if (more) this.chosen.add(at);
    else this.chosen = new Set([at]);
    const moved = this.chosen.has(at) && at !== this.shown;
    if (moved) this.shown = at;
    else if (!this.chosen.has(this.shown)) this.shown = [...this.chosen].at(-1);
    this.#moved(moved);
  }

  #selectMany(heads) {
    const moved = !heads.includes(this.shown);
    this.chosen = new Set(heads);
    if (moved) this.shown = heads[0];
    this.#moved(moved);
  }

  #moved(moved) {
    this.drawSetting();
    this.#drawGrid();
    this.#onshow(moved);
  }

  #edit(change) {
    const [own] = this.#live.normalizers;
    for (const at of this.chosen) {
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

  /** `answer` of the page, null until there is one. */
  draw(answer) {
    this.#answer = answer;
    this.drawSetting();
    this.#drawGrid();
  }

  /** Layers × heads: the weight on the first token, as trained and now. */
  #drawGrid() {
    if (!this.#answer) return;
    const { layers, heads } = this.#live, { before, after } = this.#answer.sink, alone = this.#answer.tokens.length < 2;
    const cell = (layer, head) => {
      const at = `${layer}.${head}`, edit = this.edits.get(at), was = before[layer][head], is = after[layer][head];
      const now = css(ramp(Math.min(is, 1))), then = css(ramp(Math.min(was, 1)));
      const mark = edit ? [edit.normalizer === this.#live.normalizers[0] ? null : MARKS[edit.normalizer], edit.temperature === 1 ? null : "T"].filter(Boolean).join(" ") : "";
      const weight = alone ? "one token only" : Math.abs(was - is) < 0.0005 ? percent(is) : `${percent(was)} → ${percent(is)}`;
      return h("button", {
        type: "button", role: "gridcell", class: "live-cell", "data-key": `cell-${at}`, tabindex: at === this.shown ? 0 : -1,
        "aria-selected": this.chosen.has(at) ? "true" : "false", "aria-current": at === this.shown ? "true" : null,
        "aria-label": `${longName(at)}: ${weight} on the first token${edit ? `; ${settingWords(edit)}` : ""}`,
        "data-tip": `${longName(at)}\n${weight} on the first token${edit ? `\n${settingWords(edit)}` : ""}`,
        style: { background: `linear-gradient(to right, ${then} 0 26%, ${now} 26%)`, color: inkOn(ramp(Math.min(is, 1))) },
        onclick: (event) => this.#select(at, event.shiftKey || event.ctrlKey || event.metaKey),
      }, h("span", {}, alone ? "–" : String(Math.round(100 * is))), mark ? h("sup", {}, mark) : null);
    };
    const rows = Array.from({ length: layers }, (_, layer) => h("div", { class: "row", role: "row" },
      h("span", { class: "rowhead", role: "rowheader" }, String(layer)), Array.from({ length: heads }, (_, head) => cell(layer, head))));
    replace(this.grid,
      h("div", { class: "live-grid-title" }, h("span", {}, "Mean weight on the first token, %"), legend({ low: "0", high: "100\u00a0%" })),
      h("div", { class: "live-scroll" },
        h("div", {
          class: "live-grid", role: "grid", "aria-multiselectable": "true", "aria-label": "Heads. Arrow keys move, Enter chooses, Shift and Enter adds.",
          style: { "grid-template-columns": `20px repeat(${heads}, minmax(30px, 1fr))` }, onkeydown: (event) => this.#key(event),
        },
          h("div", { class: "row", role: "row", "aria-hidden": "true" }, h("span", { class: "column" }, ""), Array.from({ length: heads }, (_, head) => h("span", { class: "column" }, String(head)))),
          rows)),
      h("small", {}, "Left edge of a cell: as trained. Click a head; Shift adds more."));
  }

  #key(event) {
    const cell = event.target.closest("[data-key]");
    if (!cell) return;
    const [layer, head] = headAt(cell.dataset.key.slice(5)), { layers, heads } = this.#live;
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -head], End: [0, heads - 1 - head] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const to = `${Math.min(Math.max(layer + down, 0), layers - 1)}.${Math.min(Math.max(head + right, 0), heads - 1)}`;
    this.grid.querySelector(`[data-key="cell-${to}"]`).focus();
  }

  drawSetting() {
    this.#drawQuick();
    this.#drawChoices();
  }

  #drawQuick() {
    const [layer] = headAt(this.shown), all = headsOf(this.#live), { before } = this.#answer?.sink ?? {};
    const sinks = before ? all.filter((at) => before[headAt(at)[0]][headAt(at)[1]] > SINK) : [];
    const button = (key, label, wanted, title) => h("button", { type: "button", class: "quiet live-small", "data-key": `quick-${key}`, disabled: !wanted.length, title, onclick: () => this.#selectMany(wanted) }, label);
    replace(this.quick,
      h("span", { class: "live-count" }, this.chosen.size === 1 ? shortName([...this.chosen][0]) : `${this.chosen.size} heads`),
      button("all", "All", all), button("layer", `Layer ${layer}`, all.filter((at) => headAt(at)[0] === layer)),
      button("sinks", `Sinks (${sinks.length})`, sinks, "Heads with more than 30 % on the first token"),
      h("button", { type: "button", class: "quiet live-small live-reset", "data-key": "reset", disabled: !this.edits.size, onclick: () => this.#reset() }, "Reset"));
  }

  #drawChoices() {
    const [own] = this.#live.normalizers, settings = [...this.chosen].map((at) => settingOf(this.edits, at, own));
    const same = (key) => (settings.every((one) => one[key] === settings[0][key]) ? settings[0][key] : null);
    const normalizer = same("normalizer"), temperature = same("temperature"), words = temperature === null ? "mixed" : temperature.toFixed(2);
    const slider = this.setting.querySelector("[data-key=temperature]");
    if (slider && document.activeElement === slider) { // one that is being moved must stay
      slider.setAttribute("aria-valuetext", words);
      this.setting.querySelector("[data-of=temperature]").textContent = words;
      this.setting.querySelector("[data-key=one]").disabled = temperature === 1;
      return;
    }
    const apply = (event) => {
      const exponent = Number(event.target.value);
      this.#edit({ temperature: Math.abs(exponent) < 0.02 ? 1 : Number((10 ** exponent).toPrecision(2)) });
    };
    const back = () => {
      document.activeElement?.blur();
      this.#edit({ temperature: 1 });
    };
    replace(this.setting,
      choice("Normalizer", this.#live.normalizers.map((name) => [name, name]), normalizer, (name) => this.#edit({ normalizer: name })),
      h("p", { class: "note" },
        normalizer === null ? "The chosen heads have different normalizers." : MEANINGS[normalizer],
        normalizer !== null && normalizer !== own ? ` The model was trained with ${own}, and nothing is trained again.` : ""),
      h("label", { class: "live-slider", title: "Scores are divided by it. Double-click for 1." }, h("span", {}, "Temperature"),
        h("input", {
          type: "range", "data-key": "temperature", min: -1, max: 1, step: 0.05, value: Math.log10(temperature ?? 1), "aria-label": "Temperature of the chosen heads, from 0.1 to 10",
          "aria-valuetext": words, oninput: apply, ondblclick: back,
        }),
        h("output", { "data-of": "temperature" }, words),
        h("button", { type: "button", class: "quiet live-small", "data-key": "one", disabled: temperature === 1, onclick: () => this.#edit({ temperature: 1 }) }, "1")));
  }
}
