// Attention by hand: a few tokens, every number open to change, and so are the tokens and the sizes of the vectors. It
// starts with three tokens in two dimensions. Used by tutorial/03-by-hand.md. Finds <div id="by-hand">, and needs nothing
// else: no library, no network. What it computes is compared with qkv.reference in tests/lab/test_docs_widget.py.
"use strict";

(() => {
  const root = document.getElementById("by-hand");
  if (!root) return;

  const TOKENS = ["tea", "cools", "slowly"];
  const MOST = { tokens: 24, d: 12, e: 12 }; // more would not be readable
  const START = {
    Q: [[1, 0], [0.5, 1.5], [2, -1]],
    K: [[1, 1], [0, 2], [1.5, -0.5]],
    V: [[2, 0], [0, 2], [-1, -1]],
  };
  const MEANING = { Q: "queries", K: "keys", V: "values" };
  const NORMALIZERS = [["softmax", "softmax"], ["off-by-one", "softmax off by one"], ["sigmoid", "sigmoid"]];
  const LARGE = 20; // beyond, exp(s) is shown after the largest score is taken out
  const FIRST = { causal: true, scaled: true, temperature: 1, normalizer: "softmax", query: 1, d: 2, e: 2 };
  const state = {};

  // ---- the arithmetic ----------------------------------------------------------------------------------------

  const dot = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);
  const exp = Math.exp;
  const range = (n) => [...Array(n).keys()];

  /** What one query does: final scores, weights (0 where hidden), output, and the numbers its weights come from. */
  function row(i) {
    const visible = state.tokens.map((_, j) => !state.causal || j <= i);
    const factor = (state.scaled ? 1 / Math.sqrt(state.d) : 1) / state.temperature;
    const scores = state.K.map((k) => dot(state.Q[i], k) * factor);
    const seen = scores.filter((_, j) => visible[j]);
    const top = Math.max(...seen, state.normalizer === "off-by-one" ? 0 : -Infinity);
    const nobody = state.normalizer === "off-by-one" ? exp(-top) : 0; // the term that no key owns
    const total = seen.reduce((sum, s) => sum + exp(s - top), nobody);
    const weigh = (s) => (state.normalizer === "sigmoid" ? 1 / (1 + seen.length * exp(-s)) : exp(s - top) / total);
    const weights = scores.map((s, j) => (visible[j] ? weigh(s) : 0));
    const out = range(state.e).map((d) => weights.reduce((sum, w, j) => sum + w * state.V[j][d], 0));
    return { visible, scores, seen: seen.length, top, total, weights, out };
  }

  /** A matrix of another size: its numbers are kept, and new places are filled with halves from −2.5 to 2.5. */
  function resized(matrix, rows, columns, seed) {
    const fresh = (i, j) => ((5 * i + 4 * j + Math.floor(i / 11) + seed) % 11 - 5) / 2;
    return range(rows).map((i) => range(columns).map((j) => matrix[i]?.[j] ?? fresh(i, j)));
  }

  /** Another number of tokens or size of vectors. */
  function resize(sizes) {
    Object.assign(state, sizes);
    const n = state.tokens.length;
    for (const [name, columns] of [["Q", state.d], ["K", state.d], ["V", state.e]]) {
      state[name] = resized(state[name], n, columns, name.charCodeAt(0));
    }
    state.query = Math.min(state.query, n - 1);
  }

  /** Random halves, about normal with standard deviation 1. */
  const drawn = () => Math.round(2 * (range(12).reduce((sum) => sum + Math.random(), 0) - 6)) / 2;

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

  function shape(tag, attributes, text) {
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
      const cells = state[name][i].map((_, d) => {
        const change = (event) => {
          const x = event.target.valueAsNumber;
          const good = Number.isFinite(x) && Math.abs(x) <= 99;
          event.target.setAttribute("aria-invalid", String(!good)); // an unfinished number changes nothing
          if (good) state[name][i][d] = x;
          show();
        };
        const label = `${name} of ${token}, dimension ${d + 1}`;
        const field = { type: "number", step: 0.5, min: -99, max: 99, value: state[name][i][d], "aria-label": label };
        return el("td", {}, el("input", { ...field, "data-at": `${name}-${i}-${d}`, oninput: change }));
      });
      table.append(el("tr", {}, el("th", { scope: "row" }, token), ...cells));
    });
    return el("div", { class: "bh-scroll" }, table);
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
    return el("div", { class: "bh-scroll" }, table);
  }

  /** The tokens and the sizes of the vectors, to be changed. An impossible value is marked and changes nothing. */
  function sizes() {
    const field = (name, label, attributes, read) => {
      const onchange = (event) => {
        const value = read(event.target);
        event.target.setAttribute("aria-invalid", String(value === null));
        if (value === null) return;
        resize({ [name]: value });
        build();
        root.querySelector(`[name="${name}"]`).focus();
      };
      return el("label", {}, `${label} `, el("input", { name, onchange, ...attributes }));
    };
    const words = ({ value }) => {
      const tokens = value.trim().split(/\s+/).filter(Boolean);
      return tokens.length && tokens.length <= MOST.tokens ? tokens : null;
    };
    const count = (most) => ({ valueAsNumber: x }) => (Number.isInteger(x) && x >= 1 && x <= most ? x : null);
    const number = (name, label) => {
      const attributes = { type: "number", min: 1, max: MOST[name], value: state[name] };
      return field(name, label, attributes, count(MOST[name]));
    };
    const text = { type: "text", value: state.tokens.join(" "), title: `1 to ${MOST.tokens} words` };
    const random = () => {
      for (const name of ["Q", "K", "V"]) state[name] = state[name].map((row) => row.map(drawn));
      build();
    };
    return el("div", { class: "bh-controls bh-sizes" },
      field("tokens", "tokens", text, words), number("d", "size of queries and keys"), number("e", "size of values"),
      el("button", { type: "button", class: "bh-reset", onclick: random }, "Random numbers"));
  }

  function controls() {
    const set = (name, value) => { state[name] = value; show(); };
    const labelled = (input, text) => el("label", {}, input, ` ${text}`);
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
    const value = Math.log10(state.temperature);
    const slider = el("input", { type: "range", name: "temperature", min: -1, max: 1, step: 0.05, value, oninput });
    return el("div", { class: "bh-controls" },
      el("fieldset", {}, el("legend", {}, "Normalizer"), ...radios),
      el("fieldset", {}, el("legend", {}, "Scores"),
        tick("scaled", `divide by √${state.d}`), tick("causal", "causal mask"),
        el("label", {}, "temperature ", slider, el("output", { id: "bh-temperature" }))),
      el("button", { type: "button", class: "bh-reset", onclick: start }, "Start again"));
  }

  /** The corners of the smallest convex polygon around some points (Andrew's monotone chain). */
  function hull(points) {
    const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const half = (all) => {
      const kept = [];
      for (const [x, y] of all) {
        while (kept.length > 1) {
          const [[ax, ay], [bx, by]] = kept.slice(-2);
          if ((bx - ax) * (y - ay) - (by - ay) * (x - ax) > 0) break;
          kept.pop();
        }
        kept.push([x, y]);
      }
      return kept.slice(0, -1);
    };
    return [...half(sorted), ...half(sorted.reverse())];
  }

  /** Values of two numbers as points, the outputs between them, and a line from each value as thick as its weight. */
  function plane(rows) {
    const points = [[0, 0], ...state.V, ...rows.map((r) => r.out)].flat();
    const low = Math.min(...points), high = Math.max(...points), size = 220, edge = 30;
    const scale = (size - 2 * edge) / (high - low || 1);
    const at = ([x, y]) => [edge + (x - low) * scale, size - edge - (y - low) * scale];
    const label = "values and outputs in the plane";
    const svg = shape("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": label });
    const [ox, oy] = at([0, 0]);
    svg.append(shape("path", { d: `M${ox} 8V${size - 8}M8 ${oy}H${size - 8}`, class: "bh-axis" }));
    svg.append(shape("polygon", { points: hull(state.V).map((v) => at(v).join(",")).join(" "), class: "bh-hull" }));
    const chosen = rows[state.query], [cx, cy] = at(chosen.out);
    state.V.forEach((v, j) => {
      const [x, y] = at(v);
      const width = 8 * Math.min(chosen.weights[j], 1);
      svg.append(shape("line", { x1: x, y1: y, x2: cx, y2: cy, class: "bh-pull", "stroke-width": width }));
      svg.append(shape("circle", { cx: x, cy: y, r: 4, class: "bh-value" }));
      const above = y > size / 2 ? 16 : -9;
      const place = { x: Math.min(Math.max(x, 24), size - 24), y: y + above, "text-anchor": "middle" };
      svg.append(shape("text", place, state.tokens[j]));
    });
    rows.forEach((r, i) => {
      const [x, y] = at(r.out), here = i === state.query;
      svg.append(shape("circle", { cx: x, cy: y, r: here ? 6 : 4, class: here ? "bh-dot bh-chosen" : "bh-dot" }));
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
      fill(`weights-${i}-${state.tokens.length}`, fixed(r.weights.reduce((sum, w) => sum + w, 0), 3), 0, false);
      r.out.forEach((x, d) => fill(`out-${i}-${d}`, fixed(x), 0, false));
    });
    const divided = `${state.scaled ? ` / √${state.d}` : ""}${state.temperature === 1 ? "" : " / T"}`;
    root.querySelector("#bh-scores caption span").textContent = `q · k${divided}`;
    const temperature = `T = ${state.temperature.toFixed(2)}`;
    root.querySelector("#bh-temperature").textContent = temperature;
    root.querySelector("[name=temperature]").setAttribute("aria-valuetext", temperature);
    for (const tr of root.querySelectorAll("[data-query]")) {
      tr.classList.toggle("bh-chosen", Number(tr.dataset.query) === state.query);
    }
    const lines = words(state.query).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
    const title = el("p", { class: "bh-title" }, `Query ${state.query + 1}, ${state.tokens[state.query]}`);
    root.querySelector("#bh-words").replaceChildren(title, el("dl", {}, ...lines));
    const picture = root.querySelector("#bh-plane");
    picture.hidden = state.e !== 2; // a plane has two dimensions
    if (state.e === 2) picture.replaceChildren(plane(rows), el("figcaption", {}, "values: rings, outputs: dots"));
  }

  function start() {
    for (const name of ["Q", "K", "V"]) state[name] = START[name].map((x) => [...x]);
    Object.assign(state, FIRST, { tokens: [...TOKENS] });
    build();
  }

  /** All elements, for the tokens and sizes of the state. */
  function build() {
    const { tokens } = state;
    const dimensions = range(state.e).map((d) => String(d + 1));
    root.replaceChildren(
      sizes(),
      el("div", { class: "bh-matrices" }, inputs("Q"), inputs("K"), inputs("V")),
      controls(),
      el("div", { class: "bh-matrices" },
        results("scores", "Scores", "", tokens), results("weights", "Weights", "a row a query", [...tokens, "sum"]),
        results("out", "Outputs", "weights · V", dimensions), el("figure", { id: "bh-plane" })),
      el("div", { id: "bh-words", "aria-live": "polite" }));
    show();
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
