// Pairs of texts: which part of a matrix goes from the one to the other.

import type { Sequence } from "./format";

export interface Part {
  name: string;
  zoom: string;
}

/** The tokens of one text of a pair, from … to; null where it has none. */
function run(sequence: Sequence, text: number): [number, number] | null {
  const first = sequence.segment?.indexOf(text) ?? -1;
  return first < 0 ? null : [first, sequence.segment!.lastIndexOf(text) + 1];
}

/** A to B, B to A, and each to itself; empty where there is no pair. */
export function parts(queries: Sequence, keys: Sequence): Part[] {
  const found: Part[] = [];
  for (const [from, to] of [
    [0, 1],
    [1, 0],
    [0, 0],
    [1, 1],
  ]) {
    const [rows, columns] = [run(queries, from), run(keys, to)];
    if (rows && columns && run(keys, 1 - to)) found.push({ name: `${"AB"[from]} → ${"AB"[to]}`, zoom: `${rows.join("-")},${columns.join("-")}` });
  }
  return found;
}
