// Requests to the server with errors as sentences, and the data of one profile or model, fetched on demand.

import { addStatistics } from "./colour.js";
import { begin } from "./state.js";
import { PageData } from "./data.js";

const RETRIES = 4; // of a request that the server's full job queue rejected

export const THE_MAP = "the map";

// What a request computes, by the last word of its path that is here, for the busy indicator.
const WORK = {
  page: "the profile", curves: "the profile", pools: "the profile", tiles: THE_MAP, similar: "similar heads",
  live: "the model's answer", step: "the next token", align: "the alignment", caption: "the caption", interventions: "the intervention",
};
const workOf = (path) => path.split(/[/?]/).map((word) => WORK[word]).findLast(Boolean) ?? "attention weights";

/** Requests to the server. `onwork(list)` is called with what is being computed whenever that changes. */
export class Api {
  #running = new Map(); // request → what it computes
  #onwork;

  constructor(onwork) {
    this.#onwork = onwork;
  }

  /**
   * What `read`, a function or the name of a method, makes of a Response with status 2xx; anything else throws an Error whose
   * message is one sentence. With a `body`, which is sent as JSON, the request is a POST. `quiet`: the page is not busy meanwhile.
   */
  async request(path, { read = "json", body, signal, quiet = false } = {}) {
    const init = body === undefined ? { signal } : { signal, method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const request = {}, end = quiet ? null : begin();
    if (!quiet) this.#running.set(request, workOf(path));
    this.#onwork([...this.#running.values()]);
    try {
      for (let attempt = 1; ; attempt++) {
        const response = await fetched(path, init);
        if (response.ok) return await (typeof read === "function" ? read(response) : response[read]());
        // A full queue empties soon. Only requests that change nothing on the server are sent again.
        if (response.status !== 503 || body !== undefined || attempt > RETRIES) throw new Error(await sentenceOf(response));
        await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(Number(response.headers.get("Retry-After")) || 1, 3)));
        signal?.throwIfAborted();
      }
    } finally {
      end?.();
      this.#running.delete(request);
      this.#onwork([...this.#running.values()]);
    }
  }
}

async function fetched(path, init) {
  try {
    return await fetch(path, { credentials: "same-origin", ...init });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer: is qkv view still running?");
  }
}

async function sentenceOf(response) {
  try {
    const { error } = await response.json();
    if (typeof error === "string" && error) return error;
  } catch {
    // not JSON: only the status is known
  }
  return `The server answered ${response.status} ${response.statusText}.`;
}

/** One profile or model: its page (see qkv.report.payload) and its weights on demand. g, t, layer, head are indices. */
export class Source extends PageData {
  #api;
  #version;

  constructor(api, { id, name, kind }, page, version) {
    super(page, (part) => this.#get(part.replaceAll("-", "/"), { read: "text" }));
    this.#api = api;
    this.#version = version;
    Object.assign(this, { id, name, kind });
    addStatistics(page.statistics);
  }

  /**
   * The similarity of every head to one, by their maps: {maps, values}, values by layer × number of heads + head, null
   * where not defined. `maps` is "weights" or "pooled"; null, with no values, if there are no maps to compare.
   */
  similar(g, t, layer, head) {
    return this.cache.once(`similar/${g}/${t}/${layer}/${head}`, (path) => this.#get(path));
  }

  /** The tile in row i and column j of tiles, pooled by "max" or "mean": {rows, columns, values}, row by row; null if all of it is masked. */
  async tile(g, t, layer, head, pool, zoom, i, j, { signal } = {}) {
    const read = async (response) => {
      if (response.status === 204) return null;
      const values = new Float32Array(await response.arrayBuffer());
      return { rows: Number(response.headers.get("X-Rows")), columns: Number(response.headers.get("X-Columns")), values };
    };
    return this.#get(`tiles/${this.#version}/${g}/${t}/${layer}/${head}/${pool}/${zoom}/${i}/${j}`, { signal, read });
  }

  /** Exact curves of a head: {received: share per key, entropy: nats per query}. */
  async profiles(g, t, layer, head, { signal } = {}) {
    const both = await this.#floats(`profiles/${g}/${t}/${layer}/${head}`, signal);
    const n = this.page.groups[g].texts[t].n_keys;
    return { received: both.subarray(0, n), entropy: both.subarray(n) };
  }

  /** The exact weights of a `query` on all keys, of all queries on a `key`, or of one on the other; means over heads without `head`. */
  weights(g, t, layer, { head, query, key }, { signal } = {}) {
    const of = Object.entries({ head, query, key }).filter(([, at]) => at !== undefined);
    return this.#floats(`weights/${g}/${t}/${layer}?${new URLSearchParams(of)}`, signal);
  }

  /** The key with the largest weight of a query in each head of a layer: {keys, weights}. */
  links(g, t, layer, query, { signal } = {}) {
    return this.#get(`links/${g}/${t}/${layer}?query=${query}`, { signal });
  }

  #get(path, options) {
    return this.#api.request(`/api/sources/${this.id}/${path}`, options);
  }

  async #floats(path, signal) {
    return new Float32Array(await this.#get(path, { signal, read: "arrayBuffer" }));
  }
}
