// A side of the comparison: {name: "left" or "right", source, at: {source, group, text, layer, head}, view, matrix, curves}.

import { rowOf } from "./heads.js";

export const MARK = { left: "A", right: "B" };

export const groupOf = ({ source, at }) => source.page.groups[at.group];

/** A curve of the side's head among the curves of its text; null if there is none of this name. */
export function alongOf(side, name) {
  if (!side.curves[name]) return null;
  const { values, shape } = side.curves[name], row = rowOf(groupOf(side), side.at.layer, side.at.head);
  return values.subarray(row * shape[2], (row + 1) * shape[2]);
}
