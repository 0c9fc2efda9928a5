// The page of `qkv sources`: a chosen sentence of the answer lights the passages that it was read from.
import { h, replace } from "./dom.js";
import { percent } from "./numbers.js";

const page = JSON.parse(document.getElementById("page").textContent);
const at = (id) => document.getElementById(id);
const nats = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)} nats`;
const EFFECTS = { hidden: "hidden", left_out: "left out" };
const PARTS = { passages: "var(--accent)", sink: "#b9a27c", question: "#8a6fa8", answer: "#6f8f6a", template: "#a9b0b5" };

function passage(text, number, row, read) {
  const effects = Object.keys(EFFECTS).filter((name) => name in row).map((name) => h("span", {}, `${EFFECTS[name]} ${nats(row[name])}`));
  return h("li", { class: number === read && "read", style: { "--share": row.share } },
    h("b", {}, number + 1), h("p", {}, text), h("small", {}, h("strong", {}, `${percent(row.share)} of attention`), effects));
}

function bar(sentence, rows) {
  const shares = { passages: rows.reduce((sum, row) => sum + row.share, 0), ...sentence };
  const parts = Object.entries(PARTS);
  return [
    h("div", { class: "stack", "aria-hidden": "true" }, parts.map(([name, colour]) => h("span", { style: { background: colour, flex: `${shares[name]} 0 0` } }))),
    h("ul", { class: "key" }, parts.map(([name, colour]) => h("li", {}, h("i", { style: { background: colour } }), `${name} ${percent(shares[name])}`))),
  ];
}

function choose(number) {
  const sentence = page.sentences[number], rows = page.table.filter((row) => row.sentence === number);
  at("answer").querySelectorAll("button").forEach((button, i) => button.setAttribute("aria-pressed", i === number));
  at("verdict").textContent = `${sentence.verdict}.`;
  replace(at("shares"), bar(sentence, rows).flat());
  replace(at("passages"), page.passages.map((text, i) => passage(text, i, rows[i], sentence.read)));
}

at("model").textContent = page.model;
at("question").textContent = page.question;
at("answer").append(...page.sentences.flatMap(({ text }, i) => {
  const pick = () => choose(i);
  return [h("button", { type: "button", onclick: pick, onfocus: pick, onmouseenter: pick }, text), " "];
}));
at("foot").append(...page.notes.map((note) => h("p", {}, note)));
choose(0);
