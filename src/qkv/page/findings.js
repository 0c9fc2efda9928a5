// The main findings, each with its number, its meaning, and the commands that look closer.

import { h } from "./dom.js";

/** A sentence without line breaks inside of its figures. */
export const joined = (text) => text.replace(/ (%|× |= |· (?=H\d))/g, (_, mark) => `\u00a0${mark.replace(" ", "\u00a0")}`);

/**
 * One list item for each finding. `open(layer, head)` shows a head; layers and heads are given by their numbers.
 * `folded`: the commands unfold on demand.
 */
export function findingTiles(findings, open, { folded = false } = {}) {
  return findings.map(({ value, label, detail, steps }) =>
    h("li", {}, h("strong", {}, joined(value)), h("span", {}, label), h("small", {}, joined(detail)), steps.length ? (folded ? foldedSteps(steps, open) : openSteps(steps, open)) : null));
}

const openSteps = (steps, open) => h("ul", { class: "next-steps" }, steps.map((step) => h("li", {}, purposeOf(step, open), commandOf(step))));

function foldedSteps(steps, open) {
  const links = steps.filter(({ layer }) => layer !== null).map((step) => purposeOf(step, open));
  return h("div", { class: "next-links" }, links,
    h("details", {}, h("summary", {}, "commands"), h("ul", { class: "next-steps" }, steps.map((step) => h("li", {}, h("em", {}, step.purpose), commandOf(step))))));
}

function purposeOf({ purpose, layer, head }, open) {
  if (layer === null) return h("em", {}, purpose);
  return h("button", { type: "button", class: "link", onclick: () => open(layer, head) }, purpose);
}

/** The command, which a click selects, and a button that copies it. */
function commandOf({ command }) {
  const code = h("code", {}, command.split(/ (?=--)/).flatMap((part, at) => [at ? " " : "", h("span", {}, part)])); // lines break between options
  const copy = h("button", { type: "button", class: "step-copy", title: "Copy", "aria-label": `Copy: ${command}` }, "copy");
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command);
      copy.textContent = "copied";
    } catch { // the browser does not allow it, for example in a sandboxed frame
      getSelection().selectAllChildren(code);
      copy.textContent = "press Ctrl+C";
    }
    setTimeout(() => { copy.textContent = "copy"; }, 2000);
  });
  return h("div", { class: "step-command" }, code, copy);
}
