// What the rows and columns of a matrix stand for: tokens, or words made of several.

import { shown } from "./dom";
import type { Sequence } from "./format";

export interface Units {
  readonly n: number;
  /** Unit u is tokens from[u] … from[u + 1], end excluded. */
  readonly from: Int32Array;
  /** The unit of each token. */
  readonly of: Int32Array;
  label(u: number): string;
}

export function tokens(sequence: Sequence): Units {
  return spans(
    sequence,
    Array.from(sequence.tokens, (_, t) => t),
  );
}

/** Tokens of one word, one behind the other, as one unit. */
export function words(sequence: Sequence): Units {
  const starts: number[] = [];
  sequence.words.forEach((word, t) => {
    if (t === 0 || word < 0 || word !== sequence.words[t - 1]) starts.push(t);
  });
  return spans(sequence, starts);
}

function spans(sequence: Sequence, starts: number[]): Units {
  const from = Int32Array.from([...starts, sequence.tokens.length]);
  const of = new Int32Array(sequence.tokens.length);
  for (let u = 0; u < starts.length; u++) of.fill(u, from[u], from[u + 1]);
  return { n: starts.length, from, of, label: (u) => joined(sequence, from[u], from[u + 1]) };
}

/** The text of some tokens: as it stands in the text where that is known. */
export function joined(sequence: Sequence, from: number, to: number): string {
  if (to - from === 1) return shown(sequence.tokens[from]);
  const start = sequence.starts[from];
  const end = sequence.ends[to - 1];
  if (start >= 0 && end > start) return shown(letters(sequence).slice(start, end).join(""));
  return shown(sequence.tokens.slice(from, to).join(""));
}

const split = new WeakMap<Sequence, string[]>();

/** The text's code points: offsets count these, not UTF-16 units. */
export function letters(sequence: Sequence): string[] {
  let found = split.get(sequence);
  if (!found) split.set(sequence, (found = Array.from(sequence.text)));
  return found;
}

/** Keys that much weight may rest on without meaning: special tokens and the first visible one. */
export function sinks(sequence: Sequence): number[] {
  const first = sequence.visible.indexOf(1);
  return sequence.tokens.map((_, t) => t).filter((t) => sequence.visible[t] && (t === first || sequence.special[t]));
}
