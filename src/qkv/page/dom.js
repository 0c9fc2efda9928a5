// Creating elements, whose text is never parsed as markup, lines of elements, errors that nothing catches, and tooltips.

/** Create an element: h("p", {class: "x", onclick: f}, "text", child). Text is never parsed as HTML. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Create an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, css] of Object.entries(value)) element.style.setProperty(key, css);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Replace the children of an element; the keyboard focus moves to the new child with the same `data-key`. */
export function replace(container, ...children) {
  const focused = container.getRootNode().activeElement; // of the document, or of the shadow tree
  const active = focused && container.contains(focused) ? focused.dataset.key : null;
  container.replaceChildren(...children.flat().filter(Boolean));
  const successor = active && container.querySelector(`[data-key="${CSS.escape(active)}"]`);
  if (successor) successor.focus({ preventScroll: true });
}

/**
 * The index of the element in the line above (-1) or below (1) whose middle is nearest to that of the element `from`, or `from` if
 * there is no such line; `boxOf(index)` is the box of an element, or undefined past the ends. Lines may depend on the window.
 */
export function vertically(boxOf, from, way) {
  const here = boxOf(from);
  let best = from, least = Infinity, line = null;
  for (let at = from + way, box; here && (box = boxOf(at)); at += way) {
    if (Math.abs(box.top - here.top) < 6) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > 6) break;
    const apart = Math.abs(box.left + box.width / 2 - here.left - here.width / 2);
    if (apart < least) least = apart, best = at;
  }
  return best;
}

/** Call `tell` with every error that no code catches. */
export function onUncaught(tell) {
  addEventListener("error", (event) => {
    // When an observed size changes again in the same frame, the browser notifies the observer a frame later, and
    // reports that as an error, which it is not.
    if (!String(event.message).startsWith("ResizeObserver loop")) tell(event.error || event.message);
  });
  addEventListener("unhandledrejection", (event) => tell(event.reason));
}

/**
 * Show tooltips, the lines of `data-tip`, of the elements in `root` (a document or a shadow root) in the element `tip`, above
 * the element under the pointer or with the focus. Returns a function that ends it.
 */
export function tooltips(root, tip) {
  const ended = new AbortController(), { signal } = ended;
  const show = (target) => {
    tip.replaceChildren(...target.dataset.tip.split("\n").map((line) => h("span", {}, line)));
    tip.hidden = false;
    const box = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    tip.style.left = `${Math.min(Math.max(box.left + box.width / 2 - size.width / 2, 8), document.documentElement.clientWidth - size.width - 8)}px`;
    tip.style.top = `${box.top - size.height - 8 > 4 ? box.top - size.height - 8 : box.bottom + 8}px`;
  };
  const over = (event) => {
    const target = event.target.closest && event.target.closest("[data-tip]");
    if (target) show(target); else tip.hidden = true;
  };
  root.addEventListener("pointerover", over, { signal });
  root.addEventListener("focusin", (event) => { if (event.target.matches(":focus-visible")) over(event); else tip.hidden = true; }, { signal });
  document.addEventListener("pointerover", (event) => { if (!tip.hidden && !event.composedPath().includes(root)) tip.hidden = true; }, { signal });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true, signal });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") tip.hidden = true; }, { signal });
  return () => ended.abort();
}
