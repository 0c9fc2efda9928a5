// One side of a comparison: {name: "left" or "right", source, at: {source, group, text, layer, head}, view, matrix, curves}.

import { rowOf } from "./heads.js";

export const LABEL = { left: "A", right: "B" };

export const groupOf = ({ source, at }) => source.page.groups[at.group];

/** The curve of this name for the head of a side, or null. */
export function curveOf(side, name) {
  if (!side.curves[name]) return null;
  const { values, shape } = side.curves[name], row = rowOf(groupOf(side), side.at.layer, side.at.head);
  return values.subarray(row * shape[2], (row + 1) * shape[2]);
}
