// Functions that tests/viewer_fixture.py evaluates in a page; the first three return what they found to be wrong.
({

// Texts that overflow their box and cover other elements.
spilt: () => {
  const found = [], walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    let box = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !box.checkVisibility() || box.closest("svg, .unseen, option")) continue;
    while (getComputedStyle(box).display.startsWith("inline") && getComputedStyle(box).display !== "inline-block")
      box = box.parentElement;
    const range = document.createRange();
    range.selectNodeContents(walker.currentNode);
    const [text, room] = [range.getBoundingClientRect(), box.getBoundingClientRect()];
    let clipped = false; // text that an ancestor clips covers nothing
    for (let at = box; at && !clipped; at = at.parentElement) clipped = getComputedStyle(at).overflowX !== "visible";
    if (!clipped && text.right > room.right + 2) found.push(walker.currentNode.data.trim().slice(0, 40));
  }
  return found;
},

// Visible interactive elements without an accessible name.
nameless: () => {
  const name = (x) => {
    const by = (x.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean);
    const said = by.map((id) => document.getElementById(id)?.textContent ?? "").join(" ");
    const labels = Array.from(x.labels ?? [], (label) => label.innerText).join(" ");
    return (x.getAttribute("aria-label") || said || labels || x.innerText || x.title || "").trim();
  };
  const wanted = "a[href], button, input, select, textarea, summary, [tabindex], [role=button], [role=slider]";
  return Array.from(document.querySelectorAll(wanted))
    .filter((x) => x.checkVisibility() && x.id !== "main" && !name(x))
    .map((x) => x.outerHTML.slice(0, 160));
},

// Texts whose contrast with their background is less than 4.5, or 3 for large text.
faint: () => {
  const parsed = (css) => {
    const [r = 0, g = 0, b = 0, a = 1] = (css.match(/[\d.]+/g) || []).map(Number);
    const most = css.startsWith("color(srgb") ? 255 : 1;
    return css === "none" ? [0, 0, 0, 0] : [r * most, g * most, b * most, a];
  };
  const over = ([r, g, b, a], under) => [...[r, g, b].map((x, at) => x * a + under[at] * (1 - a)), 1];
  const behind = (x) => {
    const layers = [];
    for (let at = x; at && layers.at(-1)?.[3] !== 1; at = at.parentElement) {
      if (getComputedStyle(at).backgroundImage !== "none") return null; // the contrast with a picture is unknown
      layers.push(parsed(getComputedStyle(at).backgroundColor));
    }
    return layers.reverse().reduce((under, colour) => over(colour, under), [255, 255, 255, 1]);
  };
  const linear = (x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [r, g, b] = colour.slice(0, 3).map((x) => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = new Set(), walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const said = walker.currentNode.data.trim(), x = walker.currentNode.parentElement;
    if (!said || !x.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    if (x.closest("noscript, .unseen, .skip, option, [aria-disabled=true], :disabled")) continue;
    const style = getComputedStyle(x), ground = behind(x);
    if (!ground) continue;
    let [r, g, b, a] = parsed(x.namespaceURI.endsWith("svg") ? style.fill : style.color);
    for (let at = x; at; at = at.parentElement) a *= Number(getComputedStyle(at).opacity);
    const [less, more] = [light(over([r, g, b, a], ground)), light(ground)].sort((one, other) => one - other);
    const size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < (size >= 24 || (size >= 18.66 && bold) ? 3 : 4.5))
      found.add(`${ratio.toFixed(2)} ${x.tagName}.${x.getAttribute("class")} ${said.slice(0, 40)}`);
  }
  return [...found].slice(0, 20);
},

// ---- what a page shows --------------------------------------------------------------------------------------------

// The text of the page and of its input fields.
text: () => [
  document.querySelector("main").innerText, ...Array.from(document.querySelectorAll("main textarea, main input"), (x) => x.value),
].join("\n"),

// What was parsed as markup although it is text: the mark of a script that ran, and the number of elements.
parsed: () => [document.documentElement.dataset.pwned ?? null, document.querySelectorAll("main img, main script, main iframe").length],

// Name of the focused element, and whether the focus is visible; a radio button is represented by its label.
focused: () => {
  const x = document.activeElement, shown = x.matches("[type=radio]") ? x.nextElementSibling : x;
  const { top, bottom, width } = shown.getBoundingClientRect(), style = getComputedStyle(shown);
  const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return [x === document.body ? null : x.outerHTML.slice(0, 120), outlined && width > 0 && bottom > 0 && top < innerHeight];
},

// Elements that move.
moving: () => Array.from(document.querySelectorAll("*")).filter((x) => {
  const { animationName, transitionDuration } = getComputedStyle(x);
  return animationName !== "none" || transitionDuration.split(", ").some((time) => parseFloat(time) > 0);
}).map((x) => x.outerHTML.slice(0, 100)),

// The tokens of a text that are in view: [position, text].
tokensInView: () => {
  const frame = document.querySelector(".flow").getBoundingClientRect();
  return Array.from(document.querySelectorAll("[data-at]")).filter((x) => {
    const { top, bottom } = x.getBoundingClientRect();
    return top >= frame.top && bottom <= frame.bottom;
  }).map((x) => [Number(x.dataset.at), x.innerText.trim()]);
},

// The layout of the stage of a whole map, by the page's own code.
layout: async ([queries, keys]) => {
  const { layoutOf, fitted } = await import("/static/map_scene.js");
  const { clientWidth: width, clientHeight: height } = document.querySelector(".map-canvas").parentElement;
  const size = { width, height, queries, keys };
  return layoutOf({ ...size, view: fitted(size) });
},

// ---- moving on ----------------------------------------------------------------------------------------------------

// Go to an address. The page has heard of it when this ends, because its own listener came first.
go: async (hash) => {
  const before = location.href, heard = new Promise((done) => addEventListener("hashchange", done, { once: true }));
  location.hash = hash;
  if (location.href !== before) await heard;
},

// The same, with the page of that address mounted anew.
async remount(hash) {
  const pageOf = (address) => address.slice(2).split("?")[0], source = new URLSearchParams(location.hash.split("?")[1]).get("source");
  if (pageOf(location.hash) === pageOf(hash)) await this.go(`#/${pageOf(hash) === "overview" ? "wall" : "overview"}?source=${source}`);
  await this.go(hash);
},

// Whether the next test may use the viewer as it is: nothing is pending or stored, also not the last text of Live.
reusable: () => {
  document.activeElement?.blur();
  const atRest = ["ready", "error"].includes(document.documentElement.dataset.state);
  return atRest && localStorage.length === 0 && !location.hash.startsWith("#/live");
},

back: () => new Promise((done) => { addEventListener("hashchange", () => done(), { once: true }); history.back(); }),

// What was done to the page has arrived there when this ends.
frame: () => new Promise((done) => requestAnimationFrame(() => setTimeout(done))),
})
