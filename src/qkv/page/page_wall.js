// All maps: the attention map of every head at once, sorted and filtered; a click opens one.

import { h, replace } from "./dom.js";
import { Wall } from "./wall.js";

/** Keys of its state: `sort`, an order of the wall; `by`, a statistic; `only`, a type of head. */
export function mount(root, app) {
  const wall = new Wall({
    similar: true, onset: (changes) => app.go(changes),
    select: (layer, head) => app.go({ layer, head }, { replace: true }), open: (layer, head) => app.go({ page: "map", layer, head }),
  });
  root.append(h("h2", {}, "All maps"), wall.controls, wall.box);
  let drawings = 0; // counts drawings, so that a slow one cannot replace a later one

  async function draw() {
    const drawing = ++drawings, { state } = app, { group, text, layer, head } = state, source = app.opened();
    const shown = source.at(group, text, layer, head);
    if (!shown.maps) {
      replace(wall.controls);
      replace(wall.box, h("p", { class: "note" }, "This profile holds no small maps: it was made with map_bins=0, or its weights came from elsewhere. Open the model itself instead."));
      return;
    }
    const alike = state.sort === "similar" ? await source.similar(group, text, layer, head) : null;
    if (drawing === drawings) wall.draw(shown, state, alike);
  }

  return {
    update(changed) {
      if (["page", "source", "group", "text", "sort", "by", "only"].some((key) => changed.has(key))) draw();
    },
    recolour: draw,
  };
}
