// Seq2seq & images: attention weights of small models for translation, reversal and captions, for each output word.

import { AlignCaptions } from "./align_captions.js";
import { alignment } from "./align_weights.js";
import { AlignWords } from "./align_words.js";
import { choice } from "./charts.js";
import { h, replace } from "./dom.js";

/** Keys of its state: `view`, `say` (the input text), `look` ("mean" or "layer.head"), `scene`, `word`, `over`. */
export function mount(root, app) {
  const { models, captioner } = alignment(app);
  const views = [...models.map(({ kind }) => [kind, kind === "translation" ? "Translation" : "Reversal"]), ...(captioner ? [["captions", "Captions"]] : [])];
  const tabs = h("div", { class: "controls align-tabs" }), body = h("div", { class: "align-body" });
  root.append(tabs, body);
  let view = null, shown = null;

  return {
    update(changed) {
      const wanted = views.some(([id]) => id === app.state.view) ? app.state.view : views[0][0];
      if (wanted !== view) {
        shown?.stop();
        view = wanted;
        replace(tabs, choice("Show", views, view, (id) => app.go({ view: id, say: null, look: null, word: null })));
        body.replaceChildren();
        shown = view === "captions" ? new AlignCaptions(body, app) : new AlignWords(body, app, models.find(({ kind }) => kind === view));
        shown.update();
      } else if (changed.has("source") || changed.has("session")) shown.draw();
      else shown.update();
    },
    picture: () => shown?.picture() ?? null,
    recolour: () => shown?.draw(),
    unmount: () => shown?.stop(),
  };
}
