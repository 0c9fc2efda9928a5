// The shell around every page: the bar, menus, errors, the busy indicator, tooltips, keyboard shortcuts, the help dialog.

import { h, replace, tooltips } from "./dom.js";
import { themeButton } from "./colour.js";
import { PAGES, lengthWords, missingReason } from "./address.js";
import { chooser, selectFrom } from "./charts.js";
import { download, pictureOf, pngOf } from "./export.js";
import { headName, openingWords, stepped, textChoosers } from "./heads.js";
import { counted } from "./state.js";

const SETTINGS = "qkv-viewer"; // key in localStorage: the theme, and whether single keys act
const byId = (id) => document.getElementById(id);

const keys = () => [
  [`1 – ${PAGES.length}`, PAGES.map(({ title }) => title).join(", ")],
  ["n, p", "next, previous head"],
  ["Shift + n, p", "the same head of the next, previous layer"],
  ["t", "light or dark theme"],
  ["Arrow keys", "move in a grid or map that has the focus"],
  ["Enter", "in the grid of heads: open the map of the head"],
  ["Esc", "close a menu or a message"],
  ["?", "show this list"],
];

/** The shell of `app`: draws the bar and navigates through `app.go`. */
export class Shell {
  #app;
  #settings = storedSettings();
  #busyTimer = 0;
  #speaking = 0; // timer of the announcement

  constructor(app) {
    this.#app = app;
    if (this.#settings.theme) document.documentElement.dataset.theme = this.#settings.theme;
    themeButton(byId("theme"), (theme) => { if (theme) this.#store({ theme }); app.recolour(); });
    this.#exports();
    this.#help();
    tooltips(document, byId("tip"));
    byId("skip").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });
    addEventListener("keydown", (event) => this.#key(event));
    // Pages that fill the window need the height of the bar.
    new ResizeObserver(([{ target }]) =>
      document.documentElement.style.setProperty("--top", `${target.offsetHeight}px`)).observe(byId("top"));
  }

  /** Draw navigation and choosers for the app's state. `addresses`: page id → its address. */
  draw(addresses) {
    const { state, session } = this.#app;
    byId("brand").setAttribute("href", addresses.overview);
    replace(byId("nav"), ...PAGES.map((page) => {
      const reason = missingReason(page, session);
      if (reason) return h("a", { role: "link", "aria-disabled": "true", tabindex: 0, title: reason, "data-key": page.id }, page.title);
      return h("a", { href: addresses[page.id], "aria-current": page.id === state.page ? "page" : null, "data-key": page.id }, page.title);
    }));
    // On a phone the list of pages scrolls sideways: keep the current one visible.
    const current = byId("nav").querySelector("[aria-current]");
    if (current) byId("nav").scrollLeft = current.offsetLeft - byId("nav").clientWidth / 2 + current.offsetWidth / 2;
    byId("help-keys").replaceChildren(...keys().map(([key, does]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, does))));
    this.#context();
  }

  #context() {
    const app = this.#app, { state, session } = app, page = PAGES.find(({ id }) => id === state.page);
    const source = app.opened(state.source), bar = byId("context"), group = page.context && source?.page.groups[state.group];
    const name = page.profile && session.sources.find(({ id }) => id === state.source)?.name;
    document.title = [page.title, group && headName(group, state.layer, state.head), name, "qkv"].filter(Boolean).join(" · ");
    bar.hidden = !page.context || !session.sources.length;
    if (!bar.hidden) replace(bar, profileChooser(session.sources, state.source, (chosen) => app.go({ source: chosen })), ...(source ? this.#within(source.page) : []));
  }

  #within(page) {
    const app = this.#app, { state } = app, group = page.groups[state.group], text = group.texts[state.text];
    return [
      ...textChoosers(page.groups, state.group, state.text, (value) => app.go({ group: value }), (value) => app.go({ text: value })),
      group.texts.length > 1 ? null : h("span", { class: "context-text" }, `“${openingWords(text, 14)}”`),
      h("span", { class: "context-size" }, lengthWords(text)),
      headChooser(group, state.layer, state.head, (changes) => app.go(changes)),
    ].filter(Boolean);
  }

  /** Show what is being computed, unless it ends at once. */
  busy(list, running) {
    const lines = [...running, ...new Set(list.map((what) => `Computing ${what}`))];
    const box = byId("busy");
    box.lastElementChild.textContent = lines[0] ?? "";
    box.title = lines.join("\n");
    if (!lines.length) {
      clearTimeout(this.#busyTimer);
      this.#busyTimer = 0;
      box.hidden = true;
    } else if (!this.#busyTimer) {
      this.#busyTimer = setTimeout(() => { box.hidden = false; }, 120);
    }
  }

  /** Show an error, or any sentence, until it is dismissed or the user leaves the page. */
  trouble(error) {
    if (error && error.name === "AbortError") return; // cancelled on purpose
    const sentence = String(error && error.message ? error.message : error), box = byId("troubles");
    if ([...box.children].some((note) => note.firstChild.textContent === sentence)) return;
    const note = h("div", { class: "trouble" }, h("p", {}, sentence),
      h("button", { type: "button", class: "trouble-close", "aria-label": "Dismiss", onclick: () => note.remove() }, "×"));
    box.append(note);
    while (box.children.length > 3) box.firstChild.remove();
  }

  /** Remove all sentences, because they are about the previous page. */
  clearTroubles() {
    byId("troubles").replaceChildren();
  }

  /** Have a screen reader announce a text, or what a function then gives: after so many milliseconds without another announcement. */
  announce(text, after = 0) {
    clearTimeout(this.#speaking);
    this.#speaking = setTimeout(() => { byId("live").textContent = typeof text === "function" ? text() : text; }, after);
  }

  #exports() {
    const menu = byId("export-menu");
    menu.addEventListener("click", async (event) => {
      const kind = event.target.closest("button")?.dataset.kind;
      if (!kind) return;
      menu.hidePopover();
      try {
        await counted(this.#save(kind));
      } catch (error) {
        this.trouble(error);
      }
    });
  }

  async #save(kind) {
    const picture = this.#app.picture();
    if (!picture) throw new Error("There is nothing to export yet: wait until the page is drawn.");
    const name = picture.name.replace(/[^\w.-]+/g, "-");
    if (kind === "csv") download(`${name}.csv`, new Blob([await picture.csv()], { type: "text/csv;charset=utf-8" }));
    else {
      const drawing = pictureOf(picture);
      download(`${name}.${kind}`, kind === "svg" ? new Blob([drawing], { type: "image/svg+xml" }) : await pngOf(drawing));
    }
    this.announce(`${name}.${kind} is saved.`);
  }

  #help() {
    const dialog = byId("help-dialog"), box = byId("single-keys");
    byId("help").addEventListener("click", () => dialog.showModal());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    box.checked = this.#settings.keys !== false;
    box.addEventListener("change", () => this.#store({ keys: box.checked }));
  }

  /** Keyboard shortcuts of single keys, which users of speech input can turn off. */
  #key(event) {
    const typing = event.target.closest?.("input:not([type=radio], [type=checkbox], [type=range]), textarea, select, dialog, [contenteditable]");
    if (event.key === "Escape" && !event.defaultPrevented && !typing) byId("troubles").lastElementChild?.remove();
    if (event.defaultPrevented || typing || event.ctrlKey || event.metaKey || event.altKey || this.#settings.keys === false) return;
    if (event.key === "?") byId("help-dialog").showModal();
    else if (event.key === "t") byId("theme").click();
    else if (event.key.toLowerCase() === "n" || event.key.toLowerCase() === "p") this.#step(event.key.toLowerCase() === "n" ? 1 : -1, event.shiftKey);
    else if (PAGES[Number(event.key) - 1] && !missingReason(PAGES[Number(event.key) - 1], this.#app.session)) this.#app.go({ page: PAGES[Number(event.key) - 1].id });
  }

  #step(by, byLayer) {
    const { state } = this.#app, source = this.#app.opened(state.source);
    if (!source || !PAGES.find(({ id }) => id === state.page).profile) return;
    const next = stepped(source.page.groups[state.group], state.layer, state.head, by, byLayer);
    this.#app.go(next);
  }

  #store(changes) {
    Object.assign(this.#settings, changes);
    try {
      localStorage.setItem(SETTINGS, JSON.stringify(this.#settings));
    } catch {
      // without localStorage, the setting lasts as long as the page
    }
  }
}

/** A list to choose a profile from; its name, if there is only one. */
export const profileChooser = (sources, chosen, onchoose, key = "source") => (sources.length > 1
  ? chooser("Profile", key, chosen, sources.map(({ id, name, state }) => [id, state === "ready" ? name : `${name} (${state})`]), onchoose)
  : h("strong", { class: "context-name" }, sources[0].name));

/** "‹ L 3 · H 7 ›": two selects between two buttons. `prefix` makes the focus keys of several choosers unique. */
export function headChooser(group, layer, head, onselect, prefix = "") {
  const pick = (name, mark, ids, chosen, key) =>
    h("label", {}, h("span", { "aria-hidden": "true" }, mark), selectFrom(`${prefix}${key}`, chosen, ids.map((id, index) => [index, String(id)]), (index) => onselect({ layer, head, [key]: index }), { "aria-label": name }));
  const step = (by, mark, name) =>
    h("button", { type: "button", class: "tool", "aria-label": name, "data-key": `${prefix}step${by}`, onclick: () => onselect(stepped(group, layer, head, by)) }, mark);
  return h("div", { class: "head-chooser", role: "group", "aria-label": "Selected head" },
    step(-1, "‹", "Previous head"),
    h("span", { class: "head-name" }, pick("Layer", "L", group.layers, layer, "layer"), " · ", pick("Head", "H", group.heads, head, "head")),
    step(1, "›", "Next head"));
}

function storedSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}
