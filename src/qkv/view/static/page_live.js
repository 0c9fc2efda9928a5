// Live: a model reads a text as it is typed; chosen heads normalise otherwise, and what that does is shown.

import { css, inkOn, ramp } from "./colour.js";
import { choice, legend, paint } from "./charts.js";
import { h, replace, svg } from "./dom.js";
import { csvOf, svgImage, svgPicture, svgText } from "./export.js";
import { named, percent, visible, written } from "./numbers.js";

const PAUSE = 250; // milliseconds without a key before the text is read
const IN_ADDRESS = 500; // characters of a text that the address holds
const SHOWN = 10; // next tokens that are shown
const SINK = 0.3; // a head with more on the first token is called a sink (Gu et al. 2025)
const CODES = { softmax: "n", "off-by-one": "o", sigmoid: "s" };
const MARKS = { softmax: "n", "off-by-one": "+1", sigmoid: "σ" };
const MEANINGS = {
  softmax: "exp(s), divided by its sum: every row of weights sums to 1.",
  "off-by-one": "One more term, exp(0) = 1, in the sum: a head may attend to little, and rows sum to less than 1.",
  sigmoid: "σ(s − ln n) for each key on its own, n being the keys the query sees: rows need not sum to 1.",
};

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
  #text = "";
  #written; // what of it is in the address
  #ids = null; // tokens of the text where it was made token by token
  #edits = new Map(); // "layer.head" → {normalizer, temperature}
  #chosen = new Set(); // heads that an edit is for
  #shown = "0.0"; // the head whose weights are shown
  #answer = null;
  #step = null; // the last step of generation, while its token is the newest
  #asking = null; // AbortController of the request under way
  #timer = 0;
  #play = null; // AbortController while tokens come by themselves
  #history = []; // {text, ids} before each generated token
  #made = []; // {token, probability} of generated tokens, the last ones of the text
  #seed = 0;
  #heat = 1;
  #speed = 4;
  #stopTheme;
  #parts;

  constructor(root, app) {
    this.#app = app;
    this.#live = app.session.live;
    if (!this.#live) {
      root.append(h("p", { class: "note" }, "No language model is loaded: start qkv view with a model to type a text."));
      return;
    }
    this.#parts = this.#build(root);
    this.#stopTheme = app.onTheme(() => this.#draw());
  }

  update(changed) {
    if (!this.#live) return;
    const { state } = this.#app, prompt = state.prompt === undefined ? undefined : String(state.prompt);
    const edits = codeOf(this.#edits, this.#live), shown = String(state.at ?? "0.0");
    let ask = !this.#answer && !this.#asking;
    if (ask || prompt !== this.#written) {
      this.#halt();
      this.#written = prompt;
      this.#setText(prompt ?? this.#live.example, null);
      this.#parts.text.value = this.#text;
      ask = true;
    }
    if ((state.edits ?? "") !== edits) {
      this.#edits = editsOf(String(state.edits ?? ""), this.#live);
      ask = true;
    }
    if (state.heat !== undefined && Number(state.heat) !== this.#heat) this.#heat = bounded(Number(state.heat), 0, 2, 1);
    const settled = isHead(shown, this.#live) ? shown : "0.0";
    if (settled !== this.#shown || !this.#chosen.size) {
      this.#shown = settled;
      if (!this.#chosen.has(settled)) this.#chosen = new Set([settled]);
      ask = true;
    }
    if (ask) this.#ask();
    else if (changed.has("source") || changed.has("session")) this.#draw(); // colours come with a profile
    this.#drawControls();
  }

  unmount() {
    this.#play?.abort();
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#stopTheme?.();
  }

  // --- asking -------------------------------------------------------------------------------------------------------

  #body() {
    const [layer, head] = this.#shown.split(".").map(Number);
    const edits = [...this.#edits].map(([at, edit]) => ({ layer: Number(at.split(".")[0]), head: Number(at.split(".")[1]), ...edit }));
    return { text: this.#text, edits, layer, head, k: SHOWN, ...(this.#ids ? { ids: this.#ids } : {}) };
  }

  /** `beside`: what a step has shown stays, and the heads and maps come up to the text it made. */
  async #ask({ beside = false } = {}) {
    clearTimeout(this.#timer);
    this.#asking?.abort();
    this.#asking = null;
    if (!this.#text) return this.#say("Type some text for the model to read.");
    const asking = (this.#asking = new AbortController()), at = this.#shown;
    try {
      const answer = await this.#app.post("/api/live", this.#body(), { signal: asking.signal });
      if (asking.signal.aborted) return;
      this.#answer = { ...answer, at, text: this.#text, maps: [floats(answer.map_before), floats(answer.map)], edited: this.#edits.size > 0 };
      this.#say("");
      if (!beside) this.#step = null;
      this.#draw();
      if (!beside) this.#app.announce(this.#headline().join(" "));
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
    } finally {
      if (this.#asking === asking) this.#asking = null;
    }
  }

  /** A sentence at the text field: why there is no new answer. */
  #say(sentence) {
    const { trouble, text } = this.#parts;
    trouble.textContent = sentence;
    trouble.hidden = !sentence;
    text.setAttribute("aria-invalid", sentence ? "true" : "false");
  }

  #setText(text, ids) {
    this.#text = text;
    this.#ids = ids;
    if (!ids) { // typed: what was generated before is now like any other text
      this.#history = [];
      this.#made = [];
    }
  }

  #typed() {
    this.#halt();
    this.#setText(this.#parts.text.value, null);
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => { this.#remember(); this.#ask(); }, PAUSE);
  }

  /** Write the state into the address. */
  #remember() {
    this.#written = this.#text.length <= IN_ADDRESS ? this.#text : undefined;
    this.#app.go(
      { prompt: this.#written ?? null, edits: codeOf(this.#edits, this.#live) || null, at: this.#shown, heat: this.#heat === 1 ? null : this.#heat },
      { replace: true },
    );
  }

  // --- editing heads ------------------------------------------------------------------------------------------------

  #select(at, more) {
    if (more && this.#chosen.has(at) && this.#chosen.size > 1) this.#chosen.delete(at);
    else if (more) this.#chosen.add(at);
    else this.#chosen = new Set([at]);
    const moved = this.#chosen.has(at) && at !== this.#shown;
    if (moved) this.#shown = at;
    else if (!this.#chosen.has(this.#shown)) this.#shown = [...this.#chosen].at(-1);
    this.#remember();
    this.#drawControls();
    this.#drawGrid();
    if (moved && !this.#play) this.#ask();
  }

  #selectMany(heads) {
    if (!heads.length) return;
    this.#chosen = new Set(heads);
    if (!this.#chosen.has(this.#shown)) {
      this.#shown = heads[0];
      this.#ask();
    }
    this.#remember();
    this.#drawControls();
    this.#drawGrid();
  }

  #edit(change) {
    const [own] = this.#live.normalizers;
    for (const at of this.#chosen) {
      const edit = { ...settingOf(this.#edits, at, own), ...change };
      if (edit.normalizer === own && edit.temperature === 1) this.#edits.delete(at);
      else this.#edits.set(at, edit);
    }
    this.#remember();
    this.#drawControls();
    clearTimeout(this.#timer);
    if (!this.#play) this.#timer = setTimeout(() => this.#ask(), "temperature" in change ? 60 : 0); // a slider moves often
  }

  #reset() {
    this.#edits.clear();
    this.#remember();
    this.#drawControls();
    if (!this.#play) this.#ask();
  }

  // --- generating ---------------------------------------------------------------------------------------------------

  async #one(signal) {
    const before = { text: this.#text, ids: this.#ids };
    const step = this.#made.length;
    const body = { ...this.#body(), sampling_temperature: this.#heat, seed: this.#seed, step };
    const found = await this.#app.post("/api/live/step", body, { signal });
    if (signal.aborted) return;
    this.#history.push(before);
    this.#made.push({ token: found.token, probability: found.probability });
    this.#text = found.text;
    this.#ids = found.ids;
    this.#step = { ...found, at: this.#shown };
    const { text } = this.#parts;
    text.value = found.text;
    text.scrollTop = text.scrollHeight;
    this.#say("");
    this.#drawTokens();
    this.#drawNext();
    this.#drawGeneration();
  }

  async #stepOnce() {
    this.#halt();
    const once = new AbortController();
    this.#asking?.abort();
    this.#asking = once;
    try {
      if (!this.#text) throw new Error("Type some text for the model to go on with.");
      await this.#one(once.signal);
      this.#app.announce(`${named(this.#made.at(-1).token)}, probability ${percent(this.#made.at(-1).probability)}`);
      this.#remember();
      this.#ask({ beside: true });
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
    }
  }

  async #start() {
    if (!this.#text) return this.#say("Type some text for the model to go on with.");
    clearTimeout(this.#timer);
    this.#asking?.abort();
    const play = (this.#play = new AbortController());
    this.#drawGeneration();
    try {
      while (!play.signal.aborted) {
        const due = performance.now() + 1000 / this.#speed;
        await this.#one(play.signal);
        await new Promise((resolve) => setTimeout(resolve, Math.max(due - performance.now(), 0)));
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#say(error.message);
      this.#stop();
    }
  }

  /** No more tokens by themselves, because something else follows. */
  #halt() {
    if (!this.#play) return;
    this.#play.abort();
    this.#play = null;
    this.#drawGeneration();
  }

  #stop() {
    this.#halt();
    this.#remember();
    if (this.#step) this.#ask({ beside: true });
  }

  #undo() {
    this.#halt();
    const before = this.#history.pop();
    if (!before) return;
    this.#made.pop();
    this.#text = before.text;
    this.#ids = before.ids;
    this.#parts.text.value = before.text;
    this.#remember();
    this.#ask();
    this.#drawGeneration();
  }

  // --- drawing ------------------------------------------------------------------------------------------------------

  #build(root) {
    const live = this.#live;
    const text = h("textarea", {
      id: "live-text", class: "live-text", rows: 5, spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: live.most_characters,
      "aria-describedby": "live-trouble", oninput: () => this.#typed(),
    });
    const trouble = h("p", { id: "live-trouble", class: "live-trouble", role: "status", hidden: true });
    const parts = {
      text, trouble, generation: h("div", { class: "live-generation" }), tokens: h("div", { class: "live-tokens", role: "group", "aria-label": "Tokens of the text" }),
      tokensTitle: h("figcaption", {}), headline: h("p", { class: "live-headline" }), likeliest: h("p", { class: "note" }), next: h("div", { class: "live-next" }),
      grid: h("div", { class: "live-grid-box" }), quick: h("div", { class: "live-quick" }), setting: h("div", { class: "live-setting" }), maps: h("div", { class: "live-maps" }),
    };
    root.classList.add("live");
    root.append(
      h("div", { class: "live-column" },
        h("label", { for: "live-text", class: "live-label" }, h("h2", {}, "Text"), h("small", {}, `${live.model} reads as you type, at most ${live.most_tokens} tokens`)),
        text, trouble, parts.generation,
        h("figure", { class: "live-figure" }, parts.tokensTitle, parts.tokens)),
      h("div", { class: "live-column" }, h("h2", {}, "Heads to change"), parts.grid, parts.quick, parts.setting),
      h("div", { class: "live-column live-effect" }, h("h2", {}, "The next token"), parts.headline, parts.likeliest, parts.next),
      parts.maps,
    );
    return parts;
  }

  #draw() {
    if (!this.#answer) return;
    this.#drawTokens();
    this.#drawNext();
    this.#drawGrid();
    this.#drawControls();
    this.#drawMaps();
  }

  #drawControls() {
    this.#drawQuick();
    this.#drawSetting();
    this.#drawGeneration();
  }

  #drawGeneration() {
    const { generation, grid, maps } = this.#parts, playing = !!this.#play;
    for (const part of [grid, maps]) part.classList.toggle("live-stale", playing); // they come up when it stops
    if (generation.children.length) { // only what changes: a slider that is being moved must stay
      const [play, step, undo] = generation.querySelectorAll("button");
      play.textContent = playing ? "Stop" : "Play";
      play.setAttribute("aria-pressed", playing);
      step.disabled = playing;
      undo.disabled = !this.#history.length;
      generation.querySelector("[data-of=heat]").textContent = heatWords(this.#heat);
      generation.querySelector("[data-key=heat]").value = this.#heat;
      generation.querySelector("[data-of=speed]").textContent = `${this.#speed} a second`;
      return;
    }
    const slider = (key, label, attributes, value, oninput) => h("label", { class: "live-slider" }, h("span", {}, label),
      h("input", { type: "range", "data-key": key, ...attributes, value, oninput }), h("output", { "data-of": key }));
    generation.append(
      h("div", { class: "live-buttons" },
        h("button", { type: "button", class: "quiet live-play", "aria-pressed": "false", onclick: () => (this.#play ? this.#stop() : this.#start()) }, "Play"),
        h("button", { type: "button", class: "quiet", onclick: () => this.#stepOnce() }, "Step"),
        h("button", { type: "button", class: "quiet", disabled: true, onclick: () => this.#undo() }, "Undo")),
      h("div", { class: "live-sliders" },
        slider("heat", "Sampling temperature", { min: 0, max: 2, step: 0.1 }, this.#heat, (event) => { this.#heat = Number(event.target.value); this.#remember(); this.#drawGeneration(); }),
        slider("speed", "Speed", { min: 1, max: 12, step: 1 }, this.#speed, (event) => { this.#speed = Number(event.target.value); this.#drawGeneration(); })),
    );
    this.#drawGeneration();
  }

  /** The tokens, shaded by the weights of the last query; those that were generated are underlined. */
  #drawTokens() {
    const { tokens, tokensTitle } = this.#parts, step = this.#step;
    const names = step ? step.tokens : this.#answer.tokens;
    const at = (step ?? this.#answer).at, [layer, head] = at.split(".").map(Number);
    const row = step ? step.row : this.#answer.rows[layer][head], top = Math.max(...row, 1e-9);
    const first = names.length - this.#made.length + (step ? 1 : 0); // of those that were generated, if the cuts are the same
    const chips = names.map((name, i) => {
      const made = i >= first ? this.#made[i - first] : null, colour = ramp(Math.sqrt(row[i] / top));
      return [
        h("span", {
          class: `live-token${made ? " live-made" : ""}${i === names.length - 1 ? " live-query" : ""}`, style: { background: css(colour), color: inkOn(colour) },
          "data-tip": `${named(name)}\nweight ${percent(row[i])}${made ? `\ncame with probability ${percent(made.probability)}` : ""}`,
        }, lines(name)),
      ];
    });
    if (step) chips.push(h("span", { class: "live-token live-new", "data-tip": `${named(step.token)}\nprobability ${percent(step.probability)}` }, lines(step.token), h("sub", {}, percent(step.probability))));
    const open = tokens.scrollTop + tokens.clientHeight >= tokens.scrollHeight - 8;
    tokens.replaceChildren(...chips.flat());
    if (step || open) tokens.scrollTop = tokens.scrollHeight;
    tokensTitle.replaceChildren(
      h("span", {}, `Layer ${layer}, head ${head}: where “${named(names.at(-1))}” looks`, step ? ` to say “${named(step.token)}”` : ""),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }));
  }

  /** [what happened to the next token, how much that is]. */
  #headline() {
    const { divergence, next, edited } = this.#answer;
    if (!edited) return ["As it was trained.", "Choose heads and another normalizer or temperature: the effect shows here."];
    const [before, after] = [next.before, next.after].map((list) => list.reduce((best, entry, i) => (entry.probability > list[best].probability ? i : best), 0));
    const size = divergence < 0.005 ? "hardly changes" : divergence < 0.1 ? "changes a little" : divergence < 1 ? "changes clearly" : "is predicted otherwise altogether";
    const was = `“${named(next.before[before].token)}”`;
    const likeliest = before === after
      ? `${was} stays the likeliest: ${percent(next.before[before].probability)} → ${percent(next.after[before].probability)}.`
      : `“${named(next.after[after].token)}” (${percent(next.after[after].probability)}) takes the place of ${was} (${percent(next.before[before].probability)} → ${percent(next.after[before].probability)}).`;
    return [`It ${size}: ${nats(divergence)}.`, likeliest];
  }

  #drawNext() {
    const { headline, likeliest, next } = this.#parts;
    if (this.#step) {
      const { top, token, probability } = this.#step;
      headline.textContent = `“${named(token)}” came, with ${percent(probability)}.`;
      likeliest.textContent = `Drawn at sampling temperature ${heatWords(this.#heat)} from what the model${this.#edits.size ? ", edited," : ""} expected.`;
      const listed = top.slice(0, SHOWN), unlikely = !listed.some((entry) => entry.token === token);
      next.replaceChildren(bars([...listed.slice(0, unlikely ? SHOWN - 1 : SHOWN), ...(unlikely ? [{ token, probability }] : [])]
        .map((entry) => ({ token: entry.token, after: entry.probability, chosen: entry.token === token })), false));
      return;
    }
    const [what, which] = this.#headline();
    headline.textContent = what;
    likeliest.textContent = which;
    next.replaceChildren(bars(this.#nextRows(), this.#answer.edited));
  }

  #nextRows() {
    const { before, after } = this.#answer.next;
    return after.map(({ token, probability }, i) => ({ token, after: probability, before: before[i].probability })).slice(0, SHOWN);
  }

  /** Layers × heads: the weight on the first token, as trained and now. */
  #drawGrid() {
    if (!this.#answer) return;
    const { grid } = this.#parts, { layers, heads } = this.#live, { before, after } = this.#answer.sink;
    const alone = this.#answer.tokens.length < 2, chosen = this.#chosen;
    const cell = (layer, head) => {
      const at = `${layer}.${head}`, edit = this.#edits.get(at), was = before[layer][head], is = after[layer][head];
      const now = css(ramp(Math.min(is, 1))), then = css(ramp(Math.min(was, 1)));
      const mark = edit ? [edit.normalizer === this.#live.normalizers[0] ? null : MARKS[edit.normalizer], edit.temperature === 1 ? null : "T"].filter(Boolean).join(" ") : "";
      const said = alone ? "one token only" : Math.abs(was - is) < 0.0005 ? percent(is) : `${percent(was)} → ${percent(is)}`;
      return h("button", {
        type: "button", role: "gridcell", class: "live-cell", "data-key": `cell-${at}`, tabindex: at === this.#shown ? 0 : -1,
        "aria-selected": chosen.has(at) ? "true" : "false", "aria-current": at === this.#shown ? "true" : null,
        "aria-label": `Layer ${layer}, head ${head}: ${said} on the first token${edit ? `; ${settingWords(edit)}` : ""}`,
        "data-tip": `Layer ${layer}, head ${head}\n${said} on the first token${edit ? `\n${settingWords(edit)}` : ""}`,
        style: { background: `linear-gradient(to right, ${then} 0 26%, ${now} 26%)`, color: inkOn(ramp(Math.min(is, 1))) },
        onclick: (event) => this.#select(at, event.shiftKey || event.ctrlKey || event.metaKey),
      }, h("span", {}, alone ? "–" : String(Math.round(100 * is))), mark ? h("sup", {}, mark) : null);
    };
    const rows = Array.from({ length: layers }, (_, layer) => h("div", { class: "row", role: "row" },
      h("span", { class: "rowhead", role: "rowheader" }, String(layer)), Array.from({ length: heads }, (_, head) => cell(layer, head))));
    replace(grid,
      h("div", { class: "live-grid-title" }, h("span", {}, "Mean weight on the first token, %"), legend({ low: "0", high: "100\u00a0%" })),
      h("div", { class: "live-scroll" },
        h("div", {
          class: "live-grid", role: "grid", "aria-multiselectable": "true", "aria-label": "Heads. Arrow keys move, Enter chooses, Shift and Enter adds.",
          style: { "grid-template-columns": `20px repeat(${heads}, minmax(30px, 1fr))` }, onkeydown: (event) => this.#gridKey(event),
        },
          h("div", { class: "row", role: "row", "aria-hidden": "true" }, h("span", { class: "column" }, ""), Array.from({ length: heads }, (_, head) => h("span", { class: "column" }, String(head)))),
          rows)),
      h("small", {}, "Left edge of a cell: as trained. Click a head; Shift adds more."));
  }

  #gridKey(event) {
    const cell = event.target.closest("[data-key]");
    if (!cell) return;
    const [layer, head] = cell.dataset.key.slice(5).split(".").map(Number), { layers, heads } = this.#live;
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Home: [0, -head], End: [0, heads - 1 - head] }[event.key] ?? [];
    if (down === undefined) return;
    event.preventDefault();
    const to = `${Math.min(Math.max(layer + down, 0), layers - 1)}.${Math.min(Math.max(head + right, 0), heads - 1)}`;
    this.#parts.grid.querySelector(`[data-key="cell-${to}"]`).focus();
  }

  #drawQuick() {
    const { layers, heads } = this.#live, layer = this.#shown.split(".")[0];
    const all = Array.from({ length: layers * heads }, (_, i) => `${Math.floor(i / heads)}.${i % heads}`);
    const sinks = this.#answer ? all.filter((at) => this.#answer.sink.before[at.split(".")[0]][at.split(".")[1]] > SINK) : [];
    const button = (key, label, wanted, title) => h("button", { type: "button", class: "quiet live-small", "data-key": `quick-${key}`, disabled: !wanted.length, title, onclick: () => this.#selectMany(wanted) }, label);
    replace(this.#parts.quick,
      h("span", { class: "live-count" }, this.#chosen.size === 1 ? `Head ${[...this.#chosen][0]}` : `${this.#chosen.size} heads`),
      button("all", "All", all), button("layer", `Layer ${layer}`, all.filter((at) => at.startsWith(`${layer}.`))),
      button("sinks", `Sinks (${sinks.length})`, sinks, "Heads with more than 30 % on the first token"),
      h("button", { type: "button", class: "quiet live-small live-reset", "data-key": "reset", disabled: !this.#edits.size, onclick: () => this.#reset() }, "Reset"));
  }

  #drawSetting() {
    const { setting } = this.#parts, [own] = this.#live.normalizers;
    const settings = [...this.#chosen].map((at) => settingOf(this.#edits, at, own));
    const same = (key) => (settings.every((one) => one[key] === settings[0][key]) ? settings[0][key] : null);
    const normalizer = same("normalizer"), temperature = same("temperature");
    const known = setting.querySelector("[data-key=temperature]");
    const moving = known && document.activeElement === known; // a slider in use is not replaced
    const output = temperature === null ? "mixed" : temperature.toFixed(2);
    const note = h("p", { class: "note" },
      normalizer === null ? "The chosen heads have different normalizers." : MEANINGS[normalizer],
      normalizer !== null && normalizer !== own ? ` The model was trained with ${own}, and nothing is trained again.` : "");
    if (moving) {
      setting.querySelector("[data-of=temperature]").textContent = output;
      return;
    }
    const apply = (event) => {
      const exponent = Number(event.target.value);
      this.#edit({ temperature: Math.abs(exponent) < 0.025 ? 1 : Number((10 ** exponent).toPrecision(2)) });
    };
    replace(setting,
      choice("Normalizer", this.#live.normalizers.map((name) => [name, name]), normalizer, (name) => this.#edit({ normalizer: name })),
      note,
      h("label", { class: "live-slider", title: "Scores are divided by it. Double-click for 1." }, h("span", {}, "Temperature"),
        h("input", {
          type: "range", "data-key": "temperature", min: -1, max: 1, step: 0.01, value: Math.log10(temperature ?? 1), "aria-label": "Temperature of the chosen heads, from 0.1 to 10",
          "aria-valuetext": output, oninput: apply, ondblclick: () => { document.activeElement?.blur(); this.#edit({ temperature: 1 }); },
        }),
        h("output", { "data-of": "temperature" }, output),
        h("button", { type: "button", class: "quiet live-small", "data-key": "one", disabled: temperature === 1, onclick: () => this.#edit({ temperature: 1 }) }, "1")));
  }

  #drawMaps() {
    const { maps } = this.#parts, answer = this.#answer, n = answer.tokens.length, [layer, head] = answer.at.split(".").map(Number);
    const top = Math.max(...answer.maps.map(peak), 1e-9), readout = h("output", { class: "readout", "aria-live": "polite" }, "Point at a cell, or focus a map and use the arrow keys.");
    const crosses = [];
    let at = [n - 1, 0];
    const show = (row, column) => {
      at = [Math.min(Math.max(row, 0), n - 1), Math.min(Math.max(column, 0), n - 1)];
      for (const [across, down] of crosses) {
        across.hidden = down.hidden = false;
        across.style.top = `${((at[0] + 0.5) / n) * 100}%`;
        down.style.left = `${((at[1] + 0.5) / n) * 100}%`;
      }
      const [was, is] = answer.maps.map((map) => map[at[0] * n + at[1]]);
      readout.replaceChildren(`query ${at[0]} `, h("b", {}, `“${named(answer.tokens[at[0]])}”`), ` → key ${at[1]} `, h("b", {}, `“${named(answer.tokens[at[1]])}”`), at[1] > at[0] && !was && !is ? ": hidden" : `: ${percent(was)}${answer.edited ? ` → ${percent(is)}` : ""}`);
    };
    const figure = (title, map) => {
      const canvas = h("canvas", {}), across = h("i", { class: "across", hidden: true }), down = h("i", { class: "down", hidden: true });
      paint(canvas, n, n, (row, column) => Math.sqrt(map[row * n + column] / top));
      crosses.push([across, down]);
      return h("figure", {}, h("figcaption", {}, h("span", {}, title)),
        h("div", {
          class: "map live-map", tabindex: 0, role: "application", "aria-roledescription": "attention map", "aria-label": `${title}: layer ${layer}, head ${head}, ${n} queries by ${n} keys. Arrow keys move between cells.`,
          onpointermove: (event) => {
            const frame = canvas.getBoundingClientRect();
            show(Math.floor(((event.clientY - frame.top) / frame.height) * n), Math.floor(((event.clientX - frame.left) / frame.width) * n));
          },
          onkeydown: (event) => {
            const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
            if (!move) return;
            event.preventDefault();
            const stride = event.shiftKey ? 10 : 1;
            show(at[0] + stride * move[0], at[1] + stride * move[1]);
          },
        }, canvas, across, down));
    };
    const [was, is] = ["before", "after"].map((when) => answer.sink[when][layer][head]), [spread, spreads] = ["before", "after"].map((when) => answer.entropy[when][layer][head]);
    const change = (one, other, unit) => (answer.edited ? `${written(one, unit)} → ${written(other, unit)}` : written(one, unit));
    const facts = [
      [`Mean weight on the first token, “${named(answer.tokens[0])}”`, n > 1 ? change(was, is, "%") : "–"],
      ["Mean entropy of a row", change(spread, spreads, "nats")],
    ];
    const aside = h("div", { class: "live-aside" }, h("h2", {}, `Layer ${layer}, head ${head}`),
      h("dl", {}, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
      legend({ low: "0", high: percent(top), note: "∝ √weight" }), h("small", {}, "Rows are queries, columns are keys."), readout);
    maps.replaceChildren(figure("As trained", answer.maps[0]), figure(answer.edited ? "With the edits" : "With edits (none yet)", answer.maps[1]), aside);
  }

  // --- export -------------------------------------------------------------------------------------------------------

  picture() {
    const answer = this.#answer;
    if (!answer) return null;
    const rows = this.#nextRows();
    return {
      name: `live-${this.#live.model}-layer${answer.at.replace(".", "-head")}`,
      svg: () => this.#svg(rows),
      csv: () => csvOf(["what", "name", "before", "after"], [
        ["KL divergence of the next token (nats)", "", 0, answer.divergence],
        ...answer.next.before.map(({ token, probability }, i) => ["probability of the next token", token, probability, answer.next.after[i].probability]),
        ...["sink", "entropy"].flatMap((what) => answer[what].before.flatMap((layer, l) => layer.map((value, head) =>
          [what === "sink" ? "mean weight on the first token" : "mean entropy (nats)", `layer ${l} head ${head}`, value, answer[what].after[l][head]]))),
        ...this.#weightRows(),
      ]),
    };
  }

  #weightRows() {
    const { maps: [before, after], tokens, at } = this.#answer, n = tokens.length;
    return tokens.flatMap((query, i) => tokens.slice(0, i + 1).map((key, j) => [`weight in ${at}`, `${i} ${query} → ${j} ${key}`, before[i * n + j], after[i * n + j]]));
  }

  #svg(rows) {
    const answer = this.#answer, side = 260, [layer, head] = answer.at.split("."), wide = 300;
    const [what, which] = this.#headline(), tall = Math.max(side + 24, 24 + rows.length * 26);
    const canvases = this.#parts.maps.querySelectorAll("canvas");
    const drawn = rows.flatMap(({ token, before, after }, i) => {
      const y = 22 + i * 26;
      return [
        svgText(96, y + 12, clipped(spaced(token)), { "text-anchor": "end", "font-family": "monospace" }),
        svg("rect", { x: 104, y, width: Math.max(130 * before, 0.5), height: 7, fill: "var(--soft)" }), svg("rect", { x: 104, y: y + 8, width: Math.max(130 * after, 0.5), height: 7, fill: "var(--accent)" }),
        svgText(110 + 130 * Math.max(before, after), y + 12, answer.edited ? `${percent(before)} → ${percent(after)}` : percent(after), { "font-size": 11 }),
      ];
    });
    return svgPicture({
      width: wide + 2 * side + 60, height: tall, title: answer.edited ? `The next token: ${what.replace(/^It /, "it ")}` : `${this.#live.model} as it was trained`,
      note: `${which} Text: “${visible(answer.text.slice(-120))}”. ${editWords(this.#edits, this.#live)}`,
      parts: [
        svgText(0, 10, answer.edited ? "Next token: as trained (grey), edited (blue)" : "Next token", { "font-weight": 600 }), drawn,
        ...[...canvases].flatMap((canvas, i) => {
          const x = wide + 40 + i * (side + 20);
          return [svgText(x, 10, `${i ? "With the edits" : "As trained"}: layer ${layer}, head ${head}`, { "font-weight": 600 }), svgImage(canvas, { x, y: 22, width: side, height: side }), svg("rect", { x, y: 22, width: side, height: side, fill: "none", stroke: "var(--line)" })];
        }),
      ],
    });
  }
}

/** Probabilities of tokens as bars: one above the other where there are two. */
function bars(rows, paired) {
  const top = Math.max(...rows.flatMap(({ before = 0, after }) => [before, after]), 1e-9);
  const bar = (kind, value) => h("i", { class: `live-bar live-${kind}`, style: { width: `${(100 * value) / top}%` } });
  return h("div", {},
    paired ? h("ul", { class: "key live-key" }, h("li", {}, h("i", { class: "live-before" }), "as trained"), h("li", {}, h("i", { class: "live-after" }), "with the edits")) : null,
    h("ol", { class: "live-bars" }, rows.map(({ token, before, after, chosen }) =>
      h("li", { class: chosen ? "live-drawn" : null },
        h("code", { title: spaced(token) }, h("bdi", {}, spaced(token))),
        h("span", { class: "live-tracks" }, paired ? bar("before", before) : null, bar("after", after)),
        h("span", { class: "live-values" }, paired ? [percent(before), h("span", { class: "live-arrow" }, " → "), h("b", {}, percent(after))] : h("b", {}, percent(after)))))));
}

/** A token with its spaces: among the next ones several may differ in them alone. */
const spaced = (token) => visible(token.replace(/ +/g, (spaces) => (spaces.length > 2 ? `␣×${spaces.length}` : "␣".repeat(spaces.length))));

/** A token as it stands in a text: a line break is marked, and breaks the line. */
const lines = (token) => token.split("\n").map(visible).join("⏎\n");
const settingOf = (edits, at, own) => edits.get(at) ?? { normalizer: own, temperature: 1 };
const settingWords = ({ normalizer, temperature }) => `${normalizer}${temperature === 1 ? "" : `, temperature ${temperature}`}`;
const heatWords = (heat) => (heat === 0 ? "0 (greedy)" : heat.toFixed(1));
const nats = (divergence) => `KL divergence ${divergence === 0 ? "0" : divergence < 0.001 ? "under 0.001" : divergence.toPrecision(2)} nats`;
const bounded = (value, low, high, otherwise) => (Number.isFinite(value) ? Math.min(Math.max(value, low), high) : otherwise);
const peak = (values) => values.reduce((most, value) => Math.max(most, value), 0);
const clipped = (text) => (text.length > 13 ? `${text.slice(0, 12)}…` : text);

function isHead(at, { layers, heads }) {
  const [layer, head, ...more] = at.split(".").map(Number);
  return !more.length && Number.isInteger(layer) && Number.isInteger(head) && layer >= 0 && head >= 0 && layer < layers && head < heads;
}

/** Edits in few characters: o1-0.3-1.2_s0.5-all is off-by-one in two heads and a sigmoid of temperature 0.5 in all others. */
function codeOf(edits, { layers, heads }) {
  const groups = new Map();
  for (const [at, { normalizer, temperature }] of edits) {
    const code = `${CODES[normalizer]}${temperature}`;
    groups.set(code, [...(groups.get(code) ?? []), at]);
  }
  return [...groups].map(([code, found]) => `${code}-${found.length === layers * heads ? "all" : found.join("-")}`).join("_");
}

/** What `codeOf` wrote; what cannot be understood is left out. */
function editsOf(code, live) {
  const found = new Map(), names = Object.fromEntries(Object.entries(CODES).map(([name, letter]) => [letter, name]));
  for (const group of code.split("_").filter(Boolean)) {
    const [first, ...places] = group.split("-"), normalizer = names[first[0]], temperature = Number(first.slice(1));
    if (!live.normalizers.includes(normalizer) || !(temperature >= 0.1 && temperature <= 10)) continue;
    const all = Array.from({ length: live.layers * live.heads }, (_, i) => `${Math.floor(i / live.heads)}.${i % live.heads}`);
    for (const at of places[0] === "all" ? all : places) if (isHead(at, live)) found.set(at, { normalizer, temperature });
  }
  return found;
}

function editWords(edits, { layers, heads }) {
  if (!edits.size) return "";
  const groups = Map.groupBy(edits, ([, edit]) => settingWords(edit));
  return [...groups].map(([words, found]) => `${words}: ${found.length === layers * heads ? "all heads" : found.map(([at]) => at).join(", ")}`).join("; ") + ".";
}

function floats(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
