// Colours: the ramp for numbers, the colours of destinations, and readable ink on either.

/** Labels of statistics, destinations with their colours, and colour ramps. */
export const looks = { statistics: {}, destinations: [], ramps: { light: [[255, 255, 255]], dark: [[0, 0, 0]] } };

/** "#rrggbb" as [r, g, b]. */
export const rgbOf = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

/** Set the looks from the page of a report or the session of a viewer. */
export function useLooks({ statistics, destinations, ramp: { light, dark } }) {
  Object.assign(looks, { statistics: { ...looks.statistics, ...statistics }, destinations, ramps: { light: light.map(rgbOf), dark: dark.map(rgbOf) } });
}

/** Add statistics of a profile that the session does not have, such as user-defined ones. */
export const addStatistics = (statistics) => { looks.statistics = { ...statistics, ...looks.statistics }; };

let dark = null; // whether the page is dark, if it is a part of another document with themes of its own
export const useDark = (value) => { dark = value; };

export const isDark = () => dark ??
  (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";

/** Let a button change the theme, and name it; `changed(theme)` is called after each change, with null if the system made it. */
export function themeButton(button, changed) {
  const name = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", isDark() ? "Light theme" : "Dark theme");
  };
  const root = document.documentElement;
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; name(); changed(root.dataset.theme); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); changed(null); });
  name();
}

/** The colour of a number from 0 to 1, as [r, g, b]. */
export function ramp(x) {
  const stops = looks.ramps[isDark() ? "dark" : "light"];
  const place = Math.min(Math.max(x, 0), 1) * (stops.length - 1);
  const low = Math.max(Math.min(Math.floor(place), stops.length - 2), 0), high = Math.min(low + 1, stops.length - 1);
  return stops[low].map((channel, i) => Math.round(channel + (stops[high][i] - channel) * (place - low)));
}

/** The colour of a CSS variable in the current theme: colourOf("--ink"). */
export const colourOf = (variable) => getComputedStyle(document.documentElement).getPropertyValue(variable).trim();

/** [r, g, b] as CSS writes it. */
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Black or white, whichever has more contrast on a colour. */
export function inkOn([r, g, b]) {
  const linear = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return luminance > 0.179 ? "#000000" : "#ffffff"; // here both have a contrast of 4.6 to 1
}

/** The colour of a destination of weight in the current theme. */
export const destinationColour = (destination) => destination[isDark() ? "dark" : "light"];
