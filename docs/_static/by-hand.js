// Attention by hand: a few tokens in a few dimensions, every token, size and number open to change. Used by
// tutorial/03-by-hand.md, which starts with three tokens in two dimensions.
// Finds <div id="by-hand">, and needs nothing else: no library, no network. What it computes is compared with
// qkv.reference in tests/test_docs_widget.py.
"use strict";

(() => {
  const root = document.getElementById("by-hand");
  if (!root) return;

  const TOKENS = ["tea", "cools", "slowly"];
  const START = {
    Q: [[1, 0], [0.5, 1.5], [2, -1]],
    K: [[1, 1], [0, 2], [1.5, -0.5]],
    V: [[2, 0], [0, 2], [-1, -1]],
  };
  const MEANING = { Q: "queries", K: "keys", V: "values" };
  const NORMALIZERS = [["softmax", "softmax"], ["off-by-one", "softmax off by one"], ["sigmoid", "sigmoid"]];
  const MOST = 8; // tokens, and dimensions: more do not fit a page
  const LARGE = 20; // beyond, exp(s) is shown after the largest score is taken out
  const state = {};

  const resize = (matrix, rows, columns, shift) => Array.from({ length: rows }, (_, i) =>
    Array.from({ length: columns }, (_, j) => matrix[i]?.[j] ?? ((7 * i + 5 * j + shift) % 9 - 4) / 2));

  /** Fit Q, K and V to the tokens and sizes. Numbers that stay are kept; new ones are multiples of 0.5 up to 2. */
  function fit() {
    const n = state.tokens.length;
    state.Q = resize(state.Q, n, state.size, 0);
    state.K = resize(state.K, n, state.size, 3);
    state.V = resize(state.V, n, state.valueSize, 6);
    state.query = Math.min(state.query, n - 1);
  }

  // ---- the arithmetic ----------------------------------------------------------------------------------------

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
  const exp = Math.exp;

  /** What one query does: final scores, weights (0 where hidden), output, and the numbers its weights come from. */
  function row(i) {
    const visible = state.tokens.map((_, j) => !state.causal || j <= i);
    const factor = (state.scaled ? 1 / Math.sqrt(state.size) : 1) / state.temperature;
    const scores = state.K.map((k) => dot(state.Q[i], k) * factor);
    const seen = scores.filter((_, j) => visible[j]);
    const top = Math.max(...seen, state.normalizer === "off-by-one" ? 0 : -Infinity);
    const nobody = state.normalizer === "off-by-one" ? exp(-top) : 0; // the term that no key owns
    const total = seen.reduce((sum, s) => sum + exp(s - top), nobody);
    const weigh = (s) => (state.normalizer === "sigmoid" ? 1 / (1 + seen.length * exp(-s)) : exp(s - top) / total);
    const weights = scores.map((s, j) => (visible[j] ? weigh(s) : 0));
    const out = state.V[0].map((_, d) => weights.reduce((sum, w, j) => sum + w * state.V[j][d], 0));
    return { visible, scores, seen: seen.length, top, total, weights, out };
  }

  // ---- words and numbers -------------------------------------------------------------------------------------

  const minus = (text) => text.replace(/^-(?=0\.?0*$)/, "").replaceAll("-", "−");
  const fixed = (x, digits = 2) => minus(x.toFixed(digits));
  const short = (x) => minus(String(Number(x.toPrecision(3))));
  const amount = (x) => (x !== 0 && (x >= 1e4 || x < 0.005) ? minus(x.toExponential(1)) : fixed(x));
  const vector = (x) => `(${x.map(short).join(", ")})`;

  /** How the selected query came by its weights and output: a line for each key, then the sum, then the output. */
  function words(i) {
    const r = row(i);
    const shift = r.top > LARGE ? r.top : 0;
    const power = (s) => (shift ? `exp(${fixed(s)} − ${fixed(shift)})` : `exp(${fixed(s)})`);
    const sum = r.total * exp(r.top - shift);
    const lines = state.tokens.map((token, j) => {
      if (!r.visible[j]) return [token, "in the future: hidden, weight 0"];
      const weight = fixed(r.weights[j], 3);
      const s = r.scores[j];
      if (state.normalizer === "sigmoid") return [token, `1 / (1 + ${r.seen} · exp(${fixed(-s)})) = ${weight}`];
      return [token, `${power(s)} / ${amount(sum)} = ${amount(exp(s - shift))} / ${amount(sum)} = ${weight}`];
    });
    const terms = r.scores.filter((_, j) => r.visible[j]).map(power);
    if (state.normalizer === "sigmoid") {
      lines.push(["", `each key on its own; the ${r.seen} in front of exp is the number of visible keys`]);
    } else {
      if (state.normalizer === "off-by-one") terms.push(shift ? `exp(−${fixed(shift)}), of no key` : "1, of no key");
      lines.push(["the sum", `${terms.join(" + ")} = ${amount(sum)}`]);
    }
    const parts = state.V.map((v, j) => `${fixed(r.weights[j], 3)} · ${vector(v)}`).filter((_, j) => r.visible[j]);
    lines.push(["output", `${parts.join(" + ")} = (${r.out.map((x) => fixed(x, 3)).join(", ")})`]);
    return lines;
  }

  // ---- the page ----------------------------------------------------------------------------------------------

  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== false) node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children);
    return node;
  }

  function drawn(tag, attributes, text) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text) node.textContent = text;
    return node;
  }

  const caption = (title, note) => el("caption", {}, el("b", {}, title), " ", el("span", {}, note));

  /** A matrix to type in: Q, K or V. */
  function inputs(name) {
    const table = el("table", { class: "bh-in" }, caption(name, MEANING[name]));
    state.tokens.forEach((token, i) => {
      const cells = state[name][i].map((value, d) => {
        const change = (event) => {
          const x = event.target.valueAsNumber;
          const good = Number.isFinite(x) && Math.abs(x) <= 99;
          event.target.setAttribute("aria-invalid", String(!good)); // an unfinished number changes nothing
          if (good) state[name][i][d] = x;
          show();
        };
        const label = `${name} of ${token}, dimension ${d + 1}`;
        const field = { type: "number", step: 0.5, min: -99, max: 99, value, "aria-label": label };
        return el("td", {}, el("input", { ...field, "data-at": `${name}-${i}-${d}`, oninput: change }));
      });
      table.append(el("tr", {}, el("th", { scope: "row" }, token), ...cells));
    });
    return el("div", { class: "bh-wide" }, table);
  }

  /** A matrix to look at: a row a query. `cells` are filled by `show`. */
  function results(name, title, note, columns) {
    const head = el("tr", {}, el("td"), ...columns.map((c) => el("th", { scope: "col" }, c)));
    const table = el("table", { class: "bh-out", id: `bh-${name}` }, caption(title, note), el("thead", {}, head));
    const body = el("tbody");
    state.tokens.forEach((token, i) => {
      const choose = () => { state.query = i; show(); };
      const button = el("button", { type: "button", "aria-label": `explain query ${token}`, onfocus: choose }, token);
      const cells = columns.map((_, j) => el("td", { "data-at": `${name}-${i}-${j}` }));
      body.append(el("tr", { "data-query": i, onclick: choose }, el("th", { scope: "row" }, button), ...cells));
    });
    table.append(body);
    return el("div", { class: "bh-wide" }, table);
  }

  /** The tokens and the sizes of the vectors. An entry that cannot be used is marked, and changes nothing. */
  function sizes() {
    const change = (name, read) => (event) => {
      const value = read(event.target);
      event.target.setAttribute("aria-invalid", String(value === null));
      if (value === null) return;
      state[name] = value;
      build();
    };
    const words = (input) => {
      const found = input.value.trim().split(/\s+/).filter(Boolean);
      return found.length >= 1 && found.length <= MOST ? found : null;
    };
    const whole = ({ valueAsNumber: x }) => (Number.isInteger(x) && x >= 1 && x <= MOST ? x : null);
    const number = (name, text) => el("label", {}, `${text} `,
      el("input", { type: "number", name, min: 1, max: MOST, value: state[name], oninput: change(name, whole) }));
    const text = { type: "text", name: "tokens", maxlength: 80, value: state.tokens.join(" "), spellcheck: "false" };
    return el("div", { class: "bh-controls" },
      el("label", { class: "bh-tokens" }, `tokens, 1 to ${MOST} `,
        el("input", { ...text, oninput: change("tokens", words) })),
      number("size", "dimensions of Q, K"), number("valueSize", "dimensions of V"));
  }

  function controls() {
    const set = (name, value) => { state[name] = value; show(); };
    const labelled = (input, text) => el("label", {}, input, " ", text);
    const tick = (name, text) => {
      const onchange = (event) => set(name, event.target.checked);
      return labelled(el("input", { type: "checkbox", name, checked: state[name], onchange }), text);
    };
    const radios = NORMALIZERS.map(([value, text]) => {
      const onchange = () => set("normalizer", value);
      const checked = state.normalizer === value;
      return labelled(el("input", { type: "radio", name: "bh-normalizer", value, checked, onchange }), text);
    });
    const oninput = (event) => set("temperature", 10 ** event.target.valueAsNumber);
    const range = el("input", { type: "range", name: "temperature", min: -1, max: 1, step: 0.05, value: 0, oninput });
    return el("div", { class: "bh-controls" },
      el("fieldset", {}, el("legend", {}, "Normalizer"), ...radios),
      el("fieldset", {}, el("legend", {}, "Scores"), tick("scaled", el("span", { id: "bh-root" })), tick("causal", "causal mask"),
        el("label", {}, "temperature ", range, el("output", { id: "bh-temperature" }))),
      el("button", { type: "button", class: "bh-reset", onclick: start }, "Start again"));
  }

  /** The corners of the convex hull of points in the plane (Andrew's monotone chain). */
  function hull(points) {
    const sorted = [...points].sort(([a, b], [c, d]) => a - c || b - d);
    const half = (some) => some.reduce((chain, [x, y]) => {
      const right = ([a, b], [c, d]) => (c - a) * (y - b) - (d - b) * (x - a) <= 0;
      while (chain.length > 1 && right(chain.at(-2), chain.at(-1))) chain.pop();
      return [...chain, [x, y]];
    }, []);
    return [...half(sorted).slice(0, -1), ...half(sorted.reverse()).slice(0, -1)];
  }

  /** Values and outputs as points, and a line from each value as thick as its weight; values have two dimensions. */
  function plane(rows) {
    const points = [[0, 0], ...state.V, ...rows.map((r) => r.out)].flat();
    const low = Math.min(...points), high = Math.max(...points), size = 220, edge = 30;
    const scale = (size - 2 * edge) / (high - low || 1);
    const at = ([x, y]) => [edge + (x - low) * scale, size - edge - (y - low) * scale];
    const label = "values and outputs in the plane";
    const svg = drawn("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label });
    const [ox, oy] = at([0, 0]);
    svg.append(drawn("path", { d: `M${ox} 8V${size - 8}M8 ${oy}H${size - 8}`, class: "bh-axis" }));
    svg.append(drawn("polygon", { points: hull(state.V).map((v) => at(v).join(",")).join(" "), class: "bh-hull" }));
    const chosen = rows[state.query], [cx, cy] = at(chosen.out);
    state.V.forEach((v, j) => {
      const [x, y] = at(v);
      const width = 8 * Math.min(chosen.weights[j], 1);
      svg.append(drawn("line", { x1: x, y1: y, x2: cx, y2: cy, class: "bh-pull", "stroke-width": width }));
      svg.append(drawn("circle", { cx: x, cy: y, r: 4, class: "bh-value" }));
      const above = y > size / 2 ? 16 : -9;
      const place = { x: Math.min(Math.max(x, 24), size - 24), y: y + above, "text-anchor": "middle" };
      svg.append(drawn("text", place, state.tokens[j]));
    });
    rows.forEach((r, i) => {
      const [x, y] = at(r.out), here = i === state.query;
      svg.append(drawn("circle", { cx: x, cy: y, r: here ? 6 : 4, class: here ? "bh-dot bh-chosen" : "bh-dot" }));
    });
    return svg;
  }

  function fill(at, text, weight, hidden) {
    const cell = root.querySelector(`[data-at="${at}"]`);
    cell.textContent = text;
    cell.classList.toggle("bh-hidden", hidden);
    cell.style.setProperty("--weight", Math.min(weight, 1).toFixed(4));
  }

  /** Everything that follows from the state. */
  function show() {
    const rows = state.tokens.map((_, i) => row(i));
    rows.forEach((r, i) => {
      state.tokens.forEach((_, j) => {
        fill(`scores-${i}-${j}`, r.visible[j] ? fixed(r.scores[j]) : "hidden", 0, !r.visible[j]);
        fill(`weights-${i}-${j}`, fixed(r.weights[j], 3), r.weights[j], !r.visible[j]);
      });
      fill(`weights-${i}-${rows.length}`, fixed(r.weights.reduce((sum, w) => sum + w, 0), 3), 0, false);
      r.out.forEach((x, d) => fill(`out-${i}-${d}`, fixed(x), 0, false));
    });
    const divided = `${state.scaled ? ` / √${state.size}` : ""}${state.temperature === 1 ? "" : " / T"}`;
    root.querySelector("#bh-scores caption span").textContent = `q · k${divided}`;
    root.querySelector("#bh-root").textContent = `divide by √${state.size}`;
    const temperature = `T = ${state.temperature.toFixed(2)}`;
    root.querySelector("#bh-temperature").textContent = temperature;
    root.querySelector("[name=temperature]").setAttribute("aria-valuetext", temperature);
    for (const tr of root.querySelectorAll("[data-query]")) {
      tr.classList.toggle("bh-chosen", Number(tr.dataset.query) === state.query);
    }
    const lines = words(state.query).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
    const title = el("p", { class: "bh-title" }, `Query ${state.query + 1}, ${state.tokens[state.query]}`);
    root.querySelector("#bh-words").replaceChildren(title, el("dl", {}, ...lines));
    if (state.valueSize === 2) {
      const key = el("figcaption", {}, "values: rings, outputs: dots");
      root.querySelector("#bh-plane").replaceChildren(plane(rows), key);
    }
  }

  /** The tables, for the present tokens and sizes. */
  function build() {
    fit();
    root.querySelector("#bh-inputs").replaceChildren(inputs("Q"), inputs("K"), inputs("V"));
    const tables = [
      results("scores", "Scores", "", state.tokens),
      results("weights", "Weights", "a row a query", [...state.tokens, "sum"]),
      results("out", "Outputs", "weights · V", state.V[0].map((_, d) => String(d + 1))),
    ];
    if (state.valueSize === 2) tables.push(el("figure", { id: "bh-plane" })); // other sizes are not drawn
    root.querySelector("#bh-results").replaceChildren(...tables);
    show();
  }

  function start() {
    for (const name of ["Q", "K", "V"]) state[name] = START[name].map((x) => [...x]);
    Object.assign(state, { tokens: TOKENS, size: 2, valueSize: 2, query: 1 });
    Object.assign(state, { causal: true, scaled: true, temperature: 1, normalizer: "softmax" });
    root.replaceChildren(
      sizes(),
      el("div", { class: "bh-matrices", id: "bh-inputs" }),
      controls(),
      el("div", { class: "bh-matrices", id: "bh-results" }),
      el("div", { id: "bh-words", "aria-live": "polite" }));
    build();
  }

  let last = "";
  root.addEventListener("pointermove", (event) => {
    const where = `${event.clientX} ${event.clientY}`; // the same when the page scrolls under a pointer at rest
    const tr = event.target.closest("[data-query]");
    if (tr && where !== last && Number(tr.dataset.query) !== state.query) {
      state.query = Number(tr.dataset.query);
      show();
    }
    last = where;
  });
  start();
})();
