// The state of the viewer as an address, "#/map?source=0&layer=1&head=2", and which states there are.

import { tellingHead } from "./heads.js";
import { integer, visible } from "./numbers.js";

export const PAGES = [
  { id: "overview", title: "Overview", profile: true, context: true },
  { id: "map", title: "Map", profile: true, context: true },
  { id: "text", title: "Text", profile: true, context: true },
  { id: "sinks", title: "Sinks", profile: true, context: true },
  { id: "live", title: "Live", profile: false, context: false },
  { id: "compare", title: "Compare", profile: true, context: false },
  { id: "align", title: "Seq2seq & images", profile: false, context: false },
]; // profile: needs an opened profile. context: the bar's choosers (profile, text, head) are about it.

export const SHARED = ["source", "group", "text", "layer", "head"]; // the keys that every page has

/** {page, key: value, …} of an address; numbers as numbers. A place in the page ("#main") is no address of a page. */
export function parsedAddress(hash) {
  const [path, query = ""] = (hash.startsWith("#/") ? hash.slice(2) : "").split(/\?(.*)/s);
  const state = { page: path || "overview" };
  for (const [key, value] of new URLSearchParams(query))
    if (key !== "page") state[key] = String(Number(value)) === value ? Number(value) : value;
  return state;
}

/** The address of a state; keys without a value are left out. */
export function addressOf({ page, ...keys }) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(keys)) if (value !== undefined && value !== null) query.set(key, value);
  return `#/${page}${query.size ? `?${query}` : ""}`;
}

/** Why a page has nothing to show, or null. */
export function reasonAgainst(page, session) {
  if (page.profile && !session.sources.length) return "No profile is open.";
  if (page.id === "live" && !session.live) return "No language model is loaded: open a model instead of a profile to type a text.";
  if (page.id === "align" && !session.align.models.length && !session.align.captioner)
    return "Neither a translation model nor a captioner is installed.";
  return null;
}

/** The nearest page and profile that exist, and sentences on what did not. */
export function settledPlace(state, session) {
  const settled = { ...state }, said = [];
  const page = PAGES.find(({ id }) => id === state.page);
  const reason = page ? reasonAgainst(page, session) : null;
  if (!page || reason) {
    said.push(page ? `${page.title}: ${reason}` : `There is no page “${state.page}”; this is the overview.`);
    settled.page = PAGES.find((other) => !reasonAgainst(other, session))?.id ?? "overview";
  }
  const source = session.sources.find(({ id }) => id === state.source);
  if (!source && session.sources.length) {
    const usable = session.sources.find((other) => other.state === "ready") ?? session.sources[0];
    settled.source = usable.id;
    if (state.source !== undefined) said.push(`There is no profile ${state.source}; ${usable.name} is shown.`);
  }
  return { state: settled, said };
}

/** The nearest group, text, layer and head of a profile, and sentences on what did not exist. */
export function settledHead(state, page) {
  const settled = { ...state }, said = [];
  const within = (key, count, fallback, one, many) => {
    const asked = state[key];
    if (asked === undefined) return fallback;
    if (Number.isInteger(asked) && asked >= 0 && asked < count) return asked;
    const nearest = Number.isFinite(asked) ? Math.min(Math.max(Math.round(asked), 0), count - 1) : fallback;
    said.push(`There is no ${one} ${asked} among ${count} ${count === 1 ? one : many} (counted from 0); ${nearest} is shown.`);
    return nearest;
  };
  settled.group = within("group", page.groups.length, page.main, "kind of attention", "kinds of attention");
  const group = page.groups[settled.group];
  settled.text = within("text", group.texts.length, 0, "text", "texts");
  const opening = tellingHead(group, group.texts[settled.text]);
  settled.layer = within("layer", group.layers.length, opening.layer, "layer", "layers");
  settled.head = within("head", group.heads.length, opening.head, "head", "heads");
  return { state: settled, said };
}

/** A text's first words, for a chooser. */
export function openingWords(text, tokens = 9) {
  const words = visible(text.keys.slice(0, tokens).join("").replace(/\s+/g, " ").trim());
  return text.n_keys > tokens ? `${words} …` : words;
}

/** How long a text is, in words. */
export function lengthWords({ n_queries, n_keys }) {
  if (n_queries === n_keys) return `${integer(n_keys)} ${n_keys === 1 ? "token" : "tokens"}`;
  return `${integer(n_queries)} queries × ${integer(n_keys)} keys`;
}
