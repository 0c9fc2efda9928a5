// The viewer application: its state, which is the address, and the page that shows it.

import { h, onUncaught } from "./dom.js";
import { useLooks } from "./colour.js";
import { integer, percent } from "./numbers.js";
import { Api, Source, THE_MAP } from "./api.js";
import { PAGES, SHARED, TEXT, addPages, addressOf, parsedAddress, validHead, validPlace } from "./address.js";
import { Shell } from "./shell.js";
import { announceState, begin, counted, Loads } from "./state.js";

const POLL = 600; // milliseconds between requests for the progress of a profile or a map
const SWEEP = 1000; // changes of the head less than this many milliseconds apart share one entry of the history

class App {
  session = null;
  state = { page: "overview" };
  #api = new Api((list) => this.#showWork(list));
  #shell = new Shell(this);
  #sources = new Loads(); // id → promise of a Source
  #opened = new Map(); // id → Source, once loaded
  #pageStates = new Map(); // page id → the keys that only this page has, as they were when the user left it
  #mounted = null; // {id, handle}
  #navigation = 0; // counts navigations, so that a slow one cannot replace a later one
  #work = []; // what is being computed
  #bar = ""; // the state that the bar was last drawn for
  #headChanged = -Infinity; // when only the head last changed
  #poll = 0; // timer of the next refresh
  #progress = null; // the finished share of the map
  #endWaiting = null; // ends the piece of work of waiting for a profile

  async start() {
    const troubles = document.getElementById("troubles");
    announceState(document.documentElement, () => troubles.childElementCount > 0);
    new MutationObserver(() => begin()()).observe(troubles, { childList: true });
    const end = begin();
    addEventListener("hashchange", () => counted(this.#readAddress()));
    onUncaught((error) => this.trouble(error));
    try {
      await this.refresh();
      addPages(this.session);
      useLooks(this.session.looks);
      await this.#readAddress();
    } catch (error) {
      this.trouble(error);
    } finally {
      end();
    }
  }

  /** Get JSON, from a POST of JSON if there is a `body`: see `Api.request`. */
  request(path, options) {
    return this.#api.request(path, options);
  }

  /** Show an error, or any sentence, to the user. */
  trouble(error) {
    if (error instanceof Error && error.name !== "AbortError") console.warn(error); // a plain sentence is no error of the program
    this.#shell.trouble(error);
  }

  /** Have a screen reader announce a text: see `Shell.announce`. */
  announce(text, after) {
    this.#shell.announce(text, after);
  }

  /** Draw the page in the colours of another theme. */
  recolour() {
    this.#mounted?.handle?.recolour?.();
  }

  /** What the shown page exports, or null while it is not drawn: {name, elements, title, note} as of `pictureOf`, and csv(). */
  picture() {
    return this.#mounted?.handle?.picture?.() ?? null;
  }

  /** A promise of a source, which is loaded on the first call. */
  source(id = this.state.source) {
    return this.#sources.once(id, () => this.#open(id));
  }

  /** A source that is already loaded, or null. */
  opened(id = this.state.source) {
    return this.#opened.get(id) ?? null;
  }

  async #open(id) {
    const entry = this.session.sources.find((source) => source.id === id);
    if (!entry) throw new Error(`There is no profile ${id}.`);
    if (entry.state !== "ready") throw new Error(entry.state === "failed" ? failureOf(entry) : `${entry.name} is not ready yet.`);
    const source = new Source(this.#api, entry, await this.request(`/api/sources/${id}/page`), this.session.version);
    this.#opened.set(id, source);
    return source;
  }

  /** Fetch the list of sources again, for instance after an intervention. */
  async refresh() {
    this.session = await this.request("/api/session", { quiet: true });
    this.#progress = this.#work.includes(THE_MAP) ? this.session.computing : null;
    this.#showWork(this.#work);
  }

  /** Refresh while a source is being prepared, or the map of a long text, whose overview needs a pass over all weights. */
  async #pollSession() {
    const waited = this.#running.length > 0;
    try {
      await this.refresh();
      this.#poll = 0;
    } catch (error) {
      this.trouble(error);
      this.#poll = setTimeout(() => this.#pollSession(), 5 * POLL);
      return;
    }
    this.#showWork(this.#work);
    if (!waited) return;
    this.#drawBar();
    if (!this.opened()) await this.#navigate({ ...this.state }, { replace: true }); // it may be ready now
    if (this.#mounted?.id !== "waiting") await counted(this.#show(new Set(["session"])));
  }

  /**
   * Merge changes into the state, write the address and show the page; null or undefined removes a key.
   * `replace`: replace the current entry of the history instead of adding one.
   */
  go(changes, { replace = false } = {}) {
    if (this.#isOtherText(changes)) this.#pageStates.clear();
    return this.#navigate(this.#with(changes), { replace });
  }

  /** The address that `go(changes)` would lead to, for links. */
  address(changes) {
    return addressOf(this.#with(changes));
  }

  #isOtherText(changes) {
    return TEXT.some((key) => key in changes && changes[key] !== this.state[key]);
  }

  /** The state with changes. A page that the user left before gets back the keys that it had. */
  #with(changes) {
    const page = changes.page ?? this.state.page;
    const kept = { ...(page === this.state.page ? pageKeys(this.state) : this.#pageStates.get(page)) };
    if (this.#isOtherText(changes)) for (const key of PAGES.find(({ id }) => id === page)?.places ?? []) delete kept[key];
    const shared = Object.fromEntries(SHARED.map((key) => [key, this.state[key]]));
    return clean({ ...shared, ...kept, ...changes, page });
  }

  /** Show the state in the address bar, after a link or the back button; report and replace what does not exist. */
  async #readAddress() {
    if (this.#mounted && location.hash && !location.hash.startsWith("#/")) return; // an anchor within the page
    this.#shell.clearTroubles();
    const wanted = parsedAddress(location.hash), navigation = ++this.#navigation;
    try {
      // The source may have been added after this list was fetched.
      if (wanted.source !== undefined && !this.session.sources.some(({ id }) => id === wanted.source)) await this.refresh();
    } catch (error) {
      this.trouble(error);
    }
    if (navigation === this.#navigation) await this.#navigate(wanted, { replace: true, report: true });
  }

  #navigate(wanted, { replace, report = false }) {
    const navigation = ++this.#navigation;
    const place = validPlace(wanted, this.session);
    const needs = PAGES.find(({ id }) => id === place.state.page).profile;
    const finish = (source) => {
      const valid = source ? validHead(place.state, source.page) : { state: place.state, notes: [] };
      const otherPage = valid.state.page !== this.state.page;
      this.#commit(valid.state, replace);
      if (otherPage) this.#shell.clearTroubles();
      if (report) for (const sentence of [...place.notes, ...valid.notes]) this.trouble(sentence);
    };
    const id = place.state.source;
    if (this.#opened.has(id)) return finish(this.#opened.get(id));
    const entry = this.session.sources.find((source) => source.id === id);
    if (!needs) {
      // The page works without a source, but the other pages' addresses are complete with one.
      if (entry?.state !== "ready") return finish(null);
    } else if (entry.state !== "ready") return this.#showWaiting(place.state, entry, replace);
    return this.source(id).then(
      (source) => { if (navigation === this.#navigation) finish(source); },
      (error) => { if (navigation === this.#navigation) { this.trouble(error); if (!needs) finish(null); } },
    );
  }

  #commit(state, replace) {
    const before = this.state, changed = new Set();
    for (const key of new Set([...Object.keys(before), ...Object.keys(state)])) if (before[key] !== state[key]) changed.add(key);
    if (before.page !== state.page) this.#pageStates.set(before.page, { ...pageKeys(before), ...this.#mounted?.handle?.unwritten?.() });
    this.state = state;
    this.#write(addressOf(state), replace || this.#isSweep(changed));
    this.#drawBar();
    counted(this.#show(changed));
  }

  #write(address, replace) {
    if (address !== location.hash) history[replace ? "replaceState" : "pushState"](null, "", address);
  }

  /** Whether a change continues a quick sweep from head to head, which the back button undoes in one step. */
  #isSweep(changed) {
    const before = this.#headChanged, onlyHead = [...changed].every((key) => key === "layer" || key === "head");
    this.#headChanged = onlyHead ? performance.now() : -Infinity;
    return onlyHead && this.#headChanged - before < SWEEP;
  }

  #drawBar() {
    // Redraw only after a change, because it closes a list that the user has just opened.
    const shown = JSON.stringify([this.state, this.session.sources.map(({ id, name, state }) => [id, name, state]), Boolean(this.opened())]);
    if (shown === this.#bar) return;
    this.#bar = shown;
    this.#shell.draw(Object.fromEntries(PAGES.map(({ id }) => [id, this.address({ page: id })])));
  }

  async #show(changed) {
    const { page } = this.state;
    try {
      if (this.#mounted?.id === page) {
        // A page that is still loading gets the whole state once it is mounted.
        if (this.#mounted.handle && changed.size) await this.#mounted.handle.update(changed);
        return;
      }
      const root = this.#clear(page);
      const mounted = this.#mounted;
      const { mount } = await pageModule(page);
      if (this.#mounted !== mounted) return; // the user moved on while the page was loading
      mounted.handle = mount(root, this);
      root.removeAttribute("aria-busy");
      await mounted.handle.update(new Set(Object.keys(this.state)));
    } catch (error) {
      this.trouble(error);
    }
  }

  /** Unmount the current page and return an empty section for the next one. */
  #clear(page) {
    this.#endWaiting?.();
    try {
      this.#mounted?.handle?.unmount?.();
    } catch (error) {
      this.trouble(error);
    }
    const title = PAGES.find(({ id }) => id === page)?.title ?? "Waiting";
    const root = h("section", { class: `page page-${page}`, "aria-label": title, "aria-busy": "true" }, h("h1", { class: "unseen" }, title));
    document.getElementById("main").replaceChildren(root);
    scrollTo(0, 0);
    if (this.#mounted) this.announce(title);
    this.#mounted = { id: page, handle: null };
    return root;
  }

  /** Shown instead of a page while its source is being prepared, or if that failed. */
  #showWaiting(state, entry, replace) {
    this.state = state;
    this.#write(addressOf(state), replace);
    const begins = this.#mounted?.id !== "waiting";
    if (begins) this.#clear("waiting");
    const root = document.getElementById("main").firstElementChild;
    const failed = entry.state === "failed", others = this.session.sources.filter((source) => source.state === "ready");
    root.setAttribute("aria-busy", String(entry.state !== "failed"));
    if (failed) this.#endWaiting?.();
    else if (begins) this.#endWaiting = begin();
    root.replaceChildren(h("div", { class: "waiting" },
      h("h2", {}, failed ? "This profile could not be computed" : `Profiling ${entry.name}`),
      h("p", {}, failed ? failureOf(entry) : progressOf(entry)),
      failed ? null : h("progress", { max: entry.total || 1, value: entry.total ? entry.done : null, "aria-label": "Progress" }),
      others.map((other) => h("p", {}, h("a", { href: addressOf({ page: state.page, source: other.id }) }, `Open ${other.name}`), failed ? "" : " meanwhile"))));
    this.#drawBar();
  }

  get #running() {
    return (this.session?.sources ?? []).filter(({ state }) => state === "running");
  }

  #showWork(list) {
    const running = this.#running, map = list.includes(THE_MAP);
    this.#work = list;
    if (!map) this.#progress = null;
    if (map || running.length) this.#poll ||= setTimeout(() => this.#pollSession(), POLL);
    this.#shell.busy(list.map((what) => (what === THE_MAP && this.#progress !== null ? `${what}: ${percent(this.#progress)}` : what)), running.map(progressOf));
  }
}

const clean = (state) => Object.fromEntries(Object.entries(state).filter(([, value]) => value !== undefined && value !== null));
const pageKeys = (state) => Object.fromEntries(Object.entries(state).filter(([key]) => key !== "page" && !SHARED.includes(key)));
const failureOf = (entry) => entry.error || `${entry.name} could not be profiled.`;

function progressOf({ name, stage, done, total }) {
  return total ? `Running ${name}: ${stage || "step"} ${integer(done)} of ${integer(total)}` : `Running ${name} …`;
}

/** The module of a page, loaded when it is first opened, so that a broken page does not affect the others. */
async function pageModule(id) {
  try {
    return await import(`./page_${id}.js`);
  } catch (error) {
    throw new Error(`The page ${PAGES.find((page) => page.id === id).title} could not be loaded: ${error.message}`, { cause: error });
  }
}

new App().start();
