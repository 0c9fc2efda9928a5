// Whether a page is at rest. The attribute data-state of the root element is "loading" until the page is drawn for the
// first time, "busy" while anything that will change it is pending (a request, a timer, a frame), and otherwise "ready",
// or "error" while the page shows a message of trouble.

let rootElement = null;
let piecesLeft = 0; // pieces of work that are pending
let isTroubled = () => false;

/** Keep the attribute of `root` up to date. `troubled()`: whether the page shows a message of trouble. */
export function announceState(root, troubled) {
  rootElement = root;
  isTroubled = troubled;
  root.dataset.state = "loading";
}

/** Count a piece of work as pending; returns the function that ends it. */
export function begin() {
  let open = true;
  piecesLeft++;
  if (rootElement && rootElement.dataset.state !== "loading") rootElement.dataset.state = "busy";
  return () => {
    if (!open) return;
    open = false;
    piecesLeft--;
    if (!piecesLeft && rootElement) requestAnimationFrame(() => setTimeout(rested)); // what has ended may begin more
  };
}

function rested() {
  if (!piecesLeft) rootElement.dataset.state = isTroubled() ? "error" : "ready";
}

/** Count a promise as pending until it is settled; returns it. */
export function counted(promise) {
  const end = begin();
  promise.then(end, end);
  return promise;
}

/** Schedule `act` by `start`, counted as pending until it has ended, too. Returns what `cancel` takes. */
function scheduled(start, stop, act) {
  const end = begin();
  const id = start(async (now) => {
    try {
      await act(now);
    } finally {
      end();
    }
  });
  return () => { stop(id); end(); };
}

/** As setTimeout and requestAnimationFrame, counted as pending. */
export const later = (act, milliseconds) => scheduled((run) => setTimeout(run, milliseconds), clearTimeout, act);
export const nextFrame = (act) => scheduled((run) => requestAnimationFrame(run), (id) => cancelAnimationFrame(id), act);

/** Cancel what `later` or `nextFrame` has begun, if anything. */
export const cancel = (pending) => pending?.();

/** What was loaded, by its id. */
export class Loads extends Map {
  /** What `load(id)` gives, loaded once; what failed may be loaded again. */
  once(id, load) {
    if (!this.has(id)) {
      this.set(id, load(id));
      this.get(id).catch?.(() => this.delete(id));
    }
    return this.get(id);
  }
}
