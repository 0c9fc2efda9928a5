// The main findings, each with its number, its meaning, and the commands that look closer.

import { h } from "./dom.js";

/** A sentence without line breaks inside of its figures. */
export const joined = (text) => text.replace(/ (%|× |= |· (?=H\d))/g, (_, mark) => `\u00a0${mark.replace(" ", "\u00a0")}`);

/** The headline up to its first semicolon: the types of heads that follow are in the key of the wall. */
export const leadOf = ({ headline }) => joined(headline.replace(/;.*/s, "."));

/**
 * One list item for each finding: a number, which leads to its heads, and a line; the reason and the commands unfold.
 * `open(layer, head)` shows a head, given by its numbers; `show({heads, statistic})` shows what the number is about.
 */
export function findingTiles(findings, { open, show }) {
  return findings.map((finding) => {
    const { value, label, detail, steps, heads, statistic } = finding;
    const number = heads.length || statistic
      ? h("button", { type: "button", class: "value", "data-tip": heads.length ? "show these heads" : "show it for every head", onclick: () => show(finding) }, joined(value))
      : joined(value);
    const links = steps.filter(({ layer }) => layer !== null).map(({ purpose, layer, head }) => h("button", { type: "button", class: "link", onclick: () => open(layer, head) }, purpose));
    return h("li", {}, h("strong", {}, number), h("span", {}, label), h("div", { class: "next-links" }, links,
      h("details", {}, h("summary", { "aria-label": `Why: ${value} ${label}` }, "why"), h("small", {}, joined(detail)),
        h("ul", { class: "next-steps" }, steps.map((step) => h("li", {}, h("em", {}, step.purpose), commandOf(step)))))));
  });
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
