// Sinks: attention sinks at the first token, their values, and the effect of interventions on the normalizer.

import { sameSize, sinkFigures } from "./sinks.js";
import { csvOf } from "./export.js";
import { selectFrom } from "./charts.js";
import { h, replace } from "./dom.js";
import { sizeWords } from "./heads.js";

const INTERVENTIONS = [["off-by-one", "Off by one"], ["sigmoid", "Sigmoid"]];

/** Key of its state: `after`, the id of the source to compare with. */
export function mount(root, app) {
  const controls = h("div", { class: "controls sinks-controls" }), noteBox = h("p", { class: "note sinks-note" }), figures = h("div", { class: "sinks-figures" });
  root.append(h("h2", {}, "Attention sinks"), controls, noteBox, figures);
  let shown = null, drawings = 0;
  const stop = new AbortController();

  const entryOf = (id) => app.session.sources.find((source) => source.id === id);

  /** A chooser of the source to compare with, and buttons for interventions. */
  function drawControls() {
    const { source, after } = app.state, here = entryOf(source), others = app.session.sources.filter(({ id }) => id !== source);
    const profiles = [[null, others.length ? "nothing" : "no other profile yet"], ...others.map(({ id, name, state }) => [id, state === "ready" ? name : `${name} (${state})`])];
    const chooser = h("label", {}, "Compare with ", selectFrom("after", after, profiles, (id) => app.go({ after: id }), { disabled: !others.length }));
    const interventions = here?.kind === "model"
      ? h("div", { class: "sinks-interventions", role: "group", "aria-label": "Try an intervention" }, h("span", {}, "Try an intervention"),
        INTERVENTIONS.map(([normalizer, word]) => h("button", { type: "button", class: "quiet", "data-key": normalizer, onclick: () => intervene(normalizer) }, word)),
        h("small", {}, "in all heads · same weights, no retraining"))
      : here?.kind === "profile" ? h("small", {}, "To try an intervention, open the model itself instead of its profile.") : null;
    replace(controls, chooser, interventions);
  }

  async function intervene(normalizer) {
    for (const button of controls.querySelectorAll("button")) button.disabled = true;
    try {
      const { id } = await app.request("/api/interventions", { body: { source: app.state.source, normalizer }, signal: stop.signal });
      await app.refresh();
      app.go({ after: id });
    } catch (error) {
      app.trouble(error);
    } finally {
      drawControls();
    }
  }

  async function drawFigures() {
    const drawing = ++drawings, { source, group, layer, head, after } = app.state;
    const here = await app.source(source), compared = after === undefined ? null : entryOf(after);
    let other = null, sentence = "";
    if (after !== undefined && !compared) sentence = `There is no profile ${after}.`;
    else if (compared?.state === "running") sentence = `${compared.name} is being profiled${compared.total > 1 ? `: ${compared.stage} ${compared.done} of ${compared.total}` : ""}. Its figures will appear when it is ready.`;
    else if (compared?.state === "failed") sentence = compared.error || `${compared.name} could not be profiled.`;
    else if (compared && compared.id !== source) other = await app.source(after);
    if (drawing !== drawings) return;
    const own = here.page.groups[group];
    const counterpart = other && (other.page.groups.find(({ name }) => name === own.name) ?? other.page.groups[other.page.main]);
    const overlaid = counterpart && sameSize(own, counterpart);
    if (counterpart && !overlaid) sentence = `${other.name} has ${sizeWords(counterpart)} instead of ${own.layers.length} × ${own.heads.length}: its figures are shown below.`;
    if (counterpart && !sentence) sentence = other.page.effects[counterpart.name] ?? "";
    shown = { name: here.name, own, other: counterpart && { name: other.name, group: counterpart, overlaid } };
    noteBox.textContent = sentence;
    noteBox.hidden = !sentence;
    const options = { name: here.name, chosen: { layer, head }, select: (l, k) => app.go({ layer: l, head: k }), reveal: (to, at) => app.go({ page: "text", text: to, pins: `${own.texts[to].queries ? "k" : ""}${at}` }) };
    replace(figures,
      ...sinkFigures(here.page, group, overlaid ? { ...options, after: { group: counterpart, name: other.name } } : options),
      ...(counterpart && !overlaid ? [h("h2", { class: "sinks-other" }, other.name), ...sinkFigures(other.page, other.page.groups.indexOf(counterpart), { name: other.name })] : []));
  }

  return {
    update(changed) {
      if (["session", "source", "after"].some((key) => changed.has(key))) drawControls();
      // The progress of a profile changes only the sentence; the figures of a finished comparison stay as they are.
      const waiting = shown && !shown.other && app.state.after !== undefined;
      if (["source", "group", "layer", "head", "after"].some((key) => changed.has(key)) || (changed.has("session") && waiting)) return drawFigures();
      return undefined;
    },
    picture() {
      return shown && {
        name: ["sinks", shown.name, shown.other?.name].filter(Boolean).join("-"),
        title: `Attention sinks of ${shown.name}${shown.other ? ` and ${shown.other.name}` : ""}`, elements: [figures],
        csv: () => csvOfSinks(shown),
      };
    },
    unmount() {
      drawings++;
      stop.abort();
    },
  };
}

/** One row per head, then one per depth of the residual stream, for one or both sources. */
function csvOfSinks({ name, own, other }) {
  const sources = [[name, own], ...(other ? [[other.name, other.group]] : [])];
  const columns = [...new Set(sources.flatMap(([, group]) => Object.keys(group.sinks ?? {})))];
  const heads = sources.flatMap(([of, group]) => group.sink.map((weight, at) =>
    [of, group.layers[Math.floor(at / group.heads.length)], group.heads[at % group.heads.length], weight, ...columns.map((column) => group.sinks?.[column]?.[at] ?? null)]));
  const blank = Array.from({ length: 3 + columns.length }, () => null);
  const depths = sources.flatMap(([of, { residual }]) => (residual?.largest ?? []).map((largest, depth) => [of, ...blank, depth, largest, residual.median[depth]]));
  const stream = depths.length ? ["depth", "largest_activation", "median_activation"] : [];
  return csvOf(["profile", "layer", "head", "weight_on_first", ...columns, ...stream], [...heads.map((row) => [...row, ...stream.map(() => null)]), ...depths]);
}
