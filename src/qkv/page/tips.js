// Tooltips: the text of `data-tip`, one line after another, above the element under the pointer or with the focus.

import { h } from "./dom.js";

/** Show tooltips of the elements in `root` (a document or a shadow root) in the element `tip`. Returns a function that ends it. */
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
