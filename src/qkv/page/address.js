// The list of pages, and the state of the viewer as an address such as "#/map?source=0&layer=1&head=2".

import { firstHead } from "./heads.js";
import { integer } from "./numbers.js";

/**
 * The pages of the viewer. Page `id` is the module page_<id>.js, which exports `mount(root, app)`, and may have a style
 * sheet page_<id>.css. `profile`: the page needs a profile. `context`: the choosers of the bar (profile, text, head)
 * apply to it. `places`: keys of its state that are positions in a text, meaningless in another one. `missing(session)`:
 * the reason why it has nothing to show, if any.
 */
export const PAGES = [
  { id: "overview", title: "Overview", profile: true, context: true },
  { id: "wall", title: "All maps", profile: true, context: true },
  { id: "map", title: "Map", profile: true, context: true, places: ["x", "y", "z", "cq", "ck"] },
  { id: "text", title: "Text", profile: true, context: true, places: ["pins", "trail"] },
  { id: "sinks", title: "Sinks", profile: true, context: true },
  { id: "live", title: "Live", missing: ({ live }) => !live && "No language model is loaded: open a model instead of a profile to type a text." },
  { id: "compare", title: "Compare", profile: true },
];

/** Add the pages of other packages, which the session names, to the list. */
export function addPages(session) {
  for (const { id, title } of session.pages) if (!PAGES.some((page) => page.id === id)) PAGES.push({ id, title, missing: ({ pages }) => pages.find((page) => page.id === id)?.missing });
}

export const TEXT = ["source", "group", "text"], SHARED = [...TEXT, "layer", "head"]; // keys of the state that all pages share

/** Parse an address into {page, key: value, …}, with numbers as numbers. An anchor such as "#main" gives the overview. */
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

/** The reason why a page has nothing to show, or null. */
export function missingReason(page, session) {
  if (page.profile && !session.sources.length) return "No profile is open.";
  return page.missing?.(session) || null;
}

/** Replace a page or profile that does not exist: {state, notes}, with a sentence in `notes` for each replacement. */
export function validPlace(state, session) {
  const valid = { ...state }, notes = [];
  const page = PAGES.find(({ id }) => id === state.page);
  const reason = page ? missingReason(page, session) : null;
  if (!page || reason) {
    notes.push(page ? `${page.title}: ${reason}` : `There is no page “${state.page}”; this is the overview.`);
    valid.page = PAGES.find((other) => !missingReason(other, session))?.id ?? "overview";
  }
  const source = session.sources.find(({ id }) => id === state.source);
  if (!source && session.sources.length) {
    const usable = session.sources.find((other) => other.state === "ready") ?? session.sources[0];
    valid.source = usable.id;
    if (state.source !== undefined) notes.push(`There is no profile ${state.source}; ${usable.name} is shown.`);
  }
  return { state: valid, notes };
}

/** Replace indices of group, text, layer and head that do not exist by the nearest: {state, notes}. */
export function validHead(state, page) {
  const valid = { ...state }, notes = [];
  const within = (key, count, fallback, one, many) => {
    const index = state[key];
    if (index === undefined) return fallback;
    if (Number.isInteger(index) && index >= 0 && index < count) return index;
    const nearest = Number.isFinite(index) ? Math.min(Math.max(Math.round(index), 0), count - 1) : fallback;
    notes.push(`There is no ${one} ${index} among ${count} ${count === 1 ? one : many} (counted from 0); ${nearest} is shown.`);
    return nearest;
  };
  valid.group = within("group", page.groups.length, page.main, "kind of attention", "kinds of attention");
  const group = page.groups[valid.group];
  valid.text = within("text", group.texts.length, 0, "text", "texts");
  const first = firstHead(group);
  valid.layer = within("layer", group.layers.length, first.layer, "layer", "layers");
  valid.head = within("head", group.heads.length, first.head, "head", "heads");
  return { state: valid, notes };
}

/** The length of a text in words. */
export function lengthWords({ n_queries, n_keys }) {
  if (n_queries === n_keys) return `${integer(n_keys)} ${n_keys === 1 ? "token" : "tokens"}`;
  return `${integer(n_queries)} queries × ${integer(n_keys)} keys`;
}
