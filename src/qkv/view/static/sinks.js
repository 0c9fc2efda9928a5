// Attention sinks, without fetches.

export function sinkFigures() {
  return [];
}
