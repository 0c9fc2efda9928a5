// Creating elements. Text is never parsed as markup.

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

/** Call `tell` with every error that no code catches. */
export function onUncaught(tell) {
  addEventListener("error", (event) => {
    // When an observed size changes again in the same frame, the browser notifies the observer a frame later, and
    // reports that as an error, which it is not.
    if (!String(event.message).startsWith("ResizeObserver loop")) tell(event.error || event.message);
  });
  addEventListener("unhandledrejection", (event) => tell(event.reason));
}
