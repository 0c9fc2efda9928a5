// The viewer: its state, which is the page's address, and the page that shows it.

import { h } from "./dom.js";
import { useLooks } from "./colour.js";
import { integer, percent } from "./numbers.js";
import { Api, Source, THE_MAP } from "./api.js";
import { PAGES, SHARED, addressOf, parsedAddress, settledHead, settledPlace } from "./address.js";
import { Shell } from "./shell.js";

const POLL = 600; // milliseconds between looks at a profile that is being made
const STROLL = 1000; // milliseconds between steps from head to head that belong together

class App {
  session = null;
  state = { page: "overview" };
  #api = new Api((list) => this.#working(list));
  #shell = new Shell(this);
  #sources = new Map(); // id → promise of a Source
  #opened = new Map(); // id → Source, once it is there
  #own = new Map(); // page id → the keys that only this page has, as they were when it was left
  #mounted = null; // {id, handle}
  #journey = 0; // counts navigations, so that a slow one does not overtake a later one
  #work = [];
  #bar = ""; // what the bar was last drawn for
  #strolled = -Infinity; // when the head last changed, and nothing else
  #poll = 0;
  #following = 0; // the timer until the next question how far the map is
  #share = null; // of the map, that is computed

  async start() {
    addEventListener("hashchange", () => this.#arrive());
    addEventListener("error", (event) => this.trouble(event.error || event.message));
    addEventListener("unhandledrejection", (event) => this.trouble(event.reason));
    try {
      await this.refresh();
      useLooks(this.session.looks);
      await this.#arrive();
    } catch (error) {
      this.trouble(error);
    }
  }

  /** GET JSON. */
  get(path, options) {
    return this.#api.get(path, options);
  }

  /** POST JSON, get JSON. */
  post(path, body, options) {
    return this.#api.post(path, body, options);
  }

  /** Show an error as a sentence. */
  trouble(error) {
    if (error instanceof Error && error.name !== "AbortError") console.warn(error); // a sentence needs no trace
    this.#shell.trouble(error);
  }

  /** Have a screen reader say something. */
  announce(text) {
    this.#shell.announce(text);
  }

  /** Call back when light and dark change; returns a function that stops it. */
  onTheme(callback) {
    return this.#shell.onTheme(callback);
  }

  /** The picture of the page that is shown, for export; null while there is none. */
  picture() {
    return this.#mounted?.handle?.picture?.() ?? null;
  }

  /** A profile, loaded when it is first asked for. */
  source(id = this.state.source) {
    if (!this.#sources.has(id)) {
      const promise = this.#open(id);
      promise.catch(() => this.#sources.delete(id));
      this.#sources.set(id, promise);
    }
    return this.#sources.get(id);
  }

  /** A profile that is loaded already, or null. */
  opened(id = this.state.source) {
    return this.#opened.get(id) ?? null;
  }

  async #open(id) {
    const entry = this.session.sources.find((source) => source.id === id);
    if (!entry) throw new Error(`There is no profile ${id}.`);
    if (entry.state !== "ready") throw new Error(entry.state === "failed" ? failure(entry) : `${entry.name} is not ready yet.`);
    const source = new Source(this.#api, entry, await this.get(`/api/sources/${id}/page`), this.session.version);
    this.#opened.set(id, source);
    return source;
  }

  /** Read the list of profiles again, as after a new one was asked for; keeps reading while one is being made. */
  async refresh() {
    clearTimeout(this.#poll);
    this.session = await this.get("/api/session", { quiet: true });
    this.#working(this.#work);
    if (this.session.sources.some(({ state }) => state === "running")) this.#poll = setTimeout(() => this.#look(), POLL);
  }

  async #look() {
    try {
      await this.refresh();
    } catch (error) {
      this.trouble(error);
      this.#poll = setTimeout(() => this.#look(), 5 * POLL);
      return;
    }
    this.#drawBar();
    if (!this.opened()) await this.#travel({ ...this.state }, { replace: true }); // its time may have come
    if (this.#mounted?.id !== "waiting") await this.#show(new Set(["session"]));
  }

  /**
   * Merge changes into the state, write the address and show it; null or undefined removes a key.
   * `replace`: rewrite the current address instead of adding one to the history.
   */
  go(changes, { replace = false } = {}) {
    const moved = ["source", "group", "text"].some((key) => key in changes && changes[key] !== this.state[key]);
    if (moved) this.#own.clear(); // positions in one text mean nothing in another
    return this.#travel(this.#with(changes), { replace });
  }

  /** The address that `go(changes)` would lead to, for links. */
  address(changes) {
    return addressOf(this.#with(changes));
  }

  /** The state with changes; a page that was left is found as it was. */
  #with(changes) {
    const page = changes.page ?? this.state.page;
    const own = page === this.state.page ? ownKeys(this.state) : this.#own.get(page);
    const shared = Object.fromEntries(SHARED.map((key) => [key, this.state[key]]));
    return clean({ ...shared, ...own, ...changes, page });
  }

  /** Follow the address bar: a link, the back button. What does not exist is said and mended. */
  async #arrive() {
    if (this.#mounted && location.hash && !location.hash.startsWith("#/")) return; // a place in the page
    this.#shell.calm();
    const asked = parsedAddress(location.hash), journey = ++this.#journey;
    try {
      // The profile may be younger than this page's list of them.
      if (asked.source !== undefined && !this.session.sources.some(({ id }) => id === asked.source)) await this.refresh();
    } catch (error) {
      this.trouble(error);
    }
    if (journey === this.#journey) await this.#travel(asked, { replace: true, said: true });
  }

  #travel(wanted, { replace, said = false }) {
    const journey = ++this.#journey;
    const place = settledPlace(wanted, this.session);
    const needs = PAGES.find(({ id }) => id === place.state.page).profile;
    const finish = (source) => {
      const settled = source ? settledHead(place.state, source.page) : { state: place.state, said: [] };
      const page = settled.state.page !== this.state.page;
      this.#commit(settled.state, replace);
      if (page) this.#shell.calm();
      if (said) for (const sentence of [...place.said, ...settled.said]) this.trouble(sentence);
    };
    const here = place.state.source;
    if (this.#opened.has(here)) return finish(this.#opened.get(here));
    const entry = this.session.sources.find(({ id }) => id === here);
    if (!needs) {
      // The page does without, but colours and choosers are better off with a profile that can be had.
      if (entry?.state !== "ready") return finish(null);
    } else if (entry.state !== "ready") return this.#wait(place.state, entry, replace);
    return this.source(here).then(
      (source) => { if (journey === this.#journey) finish(source); },
      (error) => { if (journey === this.#journey) { this.trouble(error); if (!needs) finish(null); } },
    );
  }

  #commit(state, replace) {
    const before = this.state, changed = new Set();
    for (const key of new Set([...Object.keys(before), ...Object.keys(state)])) if (before[key] !== state[key]) changed.add(key);
    if (before.page !== state.page) this.#own.set(before.page, ownKeys(before));
    this.state = state;
    this.#write(addressOf(state), replace || this.#strolling(changed));
    this.#drawBar();
    this.#show(changed);
  }

  #write(address, replace) {
    if (address !== location.hash) history[replace ? "replaceState" : "pushState"](null, "", address);
  }

  /** Whether this only goes on from head to head, in one sweep: the back button then leaves it at once. */
  #strolling(changed) {
    const before = this.#strolled, step = [...changed].every((key) => key === "layer" || key === "head");
    this.#strolled = step ? performance.now() : -Infinity;
    return step && this.#strolled - before < STROLL;
  }

  #drawBar() {
    // Only when something in it changed: a list that somebody has just opened would close.
    const shown = JSON.stringify([this.state, this.session.sources.map(({ id, name, state }) => [id, name, state]), Boolean(this.opened())]);
    if (shown === this.#bar) return;
    this.#bar = shown;
    this.#shell.draw(Object.fromEntries(PAGES.map(({ id }) => [id, this.address({ page: id })])));
  }

  async #show(changed) {
    const { page } = this.state;
    try {
      if (this.#mounted?.id === page) {
        // A page that is still loading is told everything once it is there.
        if (this.#mounted.handle && changed.size) await this.#mounted.handle.update(changed);
        return;
      }
      const root = this.#clear(page);
      const mounted = this.#mounted;
      const made = await pageModule(page);
      if (this.#mounted !== mounted) return; // the user moved on while the page was loading
      mounted.handle = made.mount(root, this);
      root.removeAttribute("aria-busy");
      await mounted.handle.update(new Set(Object.keys(this.state)));
    } catch (error) {
      this.trouble(error);
    }
  }

  /** An empty section for a page, after the one before has put its things away. */
  #clear(page) {
    try {
      this.#mounted?.handle?.unmount?.();
    } catch (error) {
      this.trouble(error);
    }
    const title = PAGES.find(({ id }) => id === page)?.title ?? "Waiting";
    const root = h("section", { class: `page page-${page}`, "aria-label": title, "aria-busy": "true" });
    document.getElementById("main").replaceChildren(root);
    scrollTo(0, 0);
    if (this.#mounted) this.announce(title);
    this.#mounted = { id: page, handle: null };
    return root;
  }

  /** Stand in for a page whose profile is being made, or could not be made. */
  #wait(state, entry, replace) {
    this.state = state;
    this.#write(addressOf(state), replace);
    if (this.#mounted?.id !== "waiting") this.#clear("waiting");
    const root = document.getElementById("main").firstElementChild;
    const failed = entry.state === "failed", others = this.session.sources.filter((source) => source.state === "ready");
    root.setAttribute("aria-busy", String(entry.state !== "failed"));
    root.replaceChildren(h("div", { class: "waiting" },
      h("h2", {}, failed ? "This profile could not be made" : `Measuring where ${entry.name} attends`),
      h("p", {}, failed ? failure(entry) : progress(entry)),
      failed ? null : h("progress", { max: entry.total || 1, value: entry.total ? entry.done : null, "aria-label": "Progress" }),
      others.map((other) => h("p", {}, h("a", { href: addressOf({ page: state.page, source: other.id }) }, `Look at ${other.name}`), failed ? "" : " meanwhile"))));
    this.#drawBar();
  }

  #working(list) {
    this.#work = list;
    const running = (this.session?.sources ?? []).filter(({ state }) => state === "running").map(progress);
    if (!list.includes(THE_MAP)) this.#share = null;
    else this.#following ||= setTimeout(() => this.#follow(), POLL);
    this.#shell.busy(list.map((what) => (what === THE_MAP && this.#share !== null ? `${what}: ${percent(this.#share)}` : what)), running);
  }

  /** How far the map is: one seen from afar is a pass over all its weights. */
  async #follow() {
    try {
      if (this.#work.includes(THE_MAP)) this.#share = (await this.get("/api/session", { quiet: true })).computing;
    } catch {
      // whoever waits for the map hears what is wrong
    }
    this.#following = 0;
    this.#working(this.#work);
  }
}

const clean = (state) => Object.fromEntries(Object.entries(state).filter(([, value]) => value !== undefined && value !== null));
const ownKeys = (state) => Object.fromEntries(Object.entries(state).filter(([key]) => key !== "page" && !SHARED.includes(key)));
const failure = (entry) => entry.error || `${entry.name} could not be profiled.`;

function progress({ name, what, done, total }) {
  return total ? `Running ${name}: ${what || "step"} ${integer(done)} of ${integer(total)}` : `Running ${name} …`;
}

/** A page's module, loaded when it is first opened: one that is broken leaves the others alone. */
async function pageModule(id) {
  try {
    return (await import(`./page_${id}.js`))[`${id}Page`];
  } catch (error) {
    throw new Error(`The page ${PAGES.find((page) => page.id === id).title} could not be loaded: ${error.message}`, { cause: error });
  }
}

new App().start();
