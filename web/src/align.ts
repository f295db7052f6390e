// Two texts laid side by side by their characters: which tokens stand for the same.

import { times } from "./dom";
import { joined, letters } from "./units";
import type { Sequence } from "./format";

/** Tokens of one side that belong together with tokens of the other; [from, to) each, null where there are none. */
export interface Pair {
  a: [number, number] | null;
  b: [number, number] | null;
}

/** All tokens of both, in order. Tokens share a pair where they share characters; what shares none stands alone.
 * The space before a word is no reason to pair two words: it counts where a token is nothing but space. */
export function aligned(a: Sequence, b: Sequence): Pair[] {
  if ((!a.text || !b.text) && a.tokens.length && b.tokens.length) return aligned(lettered(a), lettered(b));
  const [x, y] = [letters(a), letters(b)];
  const partner = characters(x, y);
  const back = new Int32Array(y.length).fill(-1);
  partner.forEach((d, c) => d >= 0 && (back[d] = c));
  const [inA, inB] = [inks(a, x, partner), inks(b, y, back)];
  const ofB = owners(b);
  // links[t]: the tokens of b that token t of a shares characters with.
  const links = a.tokens.map((_, t) => {
    const found = new Set<number>();
    for (let c = Math.max(0, a.starts[t]); c < a.ends[t]; c++) {
      const u = partner[c] >= 0 ? ofB[partner[c]] : -1;
      const blank = SPACE.test(x[c]);
      if (u >= 0 && (!blank || (inA[t] !== "lost" && inB[u] !== "lost" && (inA[t] === "none" || inB[u] === "none"))))
        found.add(u);
    }
    return found;
  });
  specials(a, b, links);
  const pairs: Pair[] = [];
  let next = 0;
  for (let t = 0; t < a.tokens.length; ) {
    const mine = [...links[t]].filter((u) => u >= next);
    if (!mine.length) {
      pairs.push({ a: [t, t + 1], b: null });
      t++;
      continue;
    }
    let [from, to, end] = [Math.min(...mine), Math.max(...mine) + 1, t + 1];
    // Grow until no link leaves the pair.
    for (let grown = true; grown; ) {
      grown = false;
      while (end < a.tokens.length && [...links[end]].some((u) => u >= from && u < to)) {
        to = Math.max(to, Math.max(...links[end]) + 1);
        end++;
        grown = true;
      }
    }
    for (; next < from; next++) pairs.push({ a: null, b: [next, next + 1] });
    pairs.push({ a: [t, end], b: [from, to] });
    [t, next] = [end, to];
  }
  for (; next < b.tokens.length; next++) pairs.push({ a: null, b: [next, next + 1] });
  return pairs;
}

const SPACE = /\s/;

/** Whether each token has letters, and whether the other side has any of them. */
function inks(sequence: Sequence, text: string[], partner: Int32Array): ("none" | "lost" | "met")[] {
  return sequence.tokens.map((_, t) => {
    const places = times(Math.max(0, sequence.ends[t] - sequence.starts[t]), (n) => sequence.starts[t] + n);
    const ink = places.filter((c) => c >= 0 && !SPACE.test(text[c]));
    return !ink.length ? "none" : ink.some((c) => partner[c] >= 0) ? "met" : "lost";
  });
}

/** Where there is no text, each token stands for one sign of its own: equal tokens get equal signs. */
function lettered(sequence: Sequence): Sequence {
  const starts = sequence.tokens.map((_, t) => t);
  return { ...sequence, text: sequence.tokens.map(sign).join(""), starts, ends: starts.map((t) => t + 1) };
}

const signs = new Map<string, string>();

function sign(token: string): string {
  // Private characters: none is a letter, so none merges with its neighbour into a word.
  if (!signs.has(token)) signs.set(token, String.fromCodePoint(0xf0000 + signs.size));
  return signs.get(token)!;
}

/** The token that each character of the text belongs to. */
function owners(sequence: Sequence): Int32Array {
  const found = new Int32Array(letters(sequence).length).fill(-1);
  sequence.tokens.forEach((_, t) => {
    if (sequence.starts[t] >= 0) found.fill(t, sequence.starts[t], sequence.ends[t]);
  });
  return found;
}

/** Tokens that are not in the text: the first of a kind with the first of the same kind, and so on. */
function specials(a: Sequence, b: Sequence, links: Set<number>[]): void {
  const waiting = new Map<string, number[]>();
  b.tokens.forEach((token, t) => {
    if (b.starts[t] < 0) waiting.set(token, [...(waiting.get(token) ?? []), t]);
  });
  a.tokens.forEach((token, t) => {
    const found = a.starts[t] < 0 ? waiting.get(token)?.shift() : undefined;
    if (found !== undefined) links[t].add(found);
  });
}

/** For each character of x the character of y that it is, or −1: equal words in the longest common order. White space is
 * no word: it goes with the word beside it, or spaces that are everywhere alike would outvote words. */
function characters(x: string[], y: string[]): Int32Array {
  const partner = new Int32Array(x.length).fill(-1);
  const [u, v] = [pieces(x), pieces(y)];
  const of = new Int32Array(u.length).fill(-1); // the word of y that each word of x is
  let [start, endU, endV] = [0, u.length, v.length];
  const same = (n: number, m: number) => u[n].text === v[m].text;
  const match = (n: number, m: number) => (of[n] = m);
  while (start < endU && start < endV && same(start, start)) match(start, start++);
  while (endU > start && endV > start && same(endU - 1, endV - 1)) match(--endU, --endV);
  const [n, m] = [endU - start, endV - start];
  if (n * m <= 25e6 && n && m) {
    const longest = new Uint16Array((n + 1) * (m + 1));
    for (let i = n - 1; i >= 0; i--) {
      for (let j = m - 1; j >= 0; j--) {
        const at = i * (m + 1) + j;
        longest[at] = same(start + i, start + j)
          ? longest[at + m + 2] + 1
          : Math.max(longest[at + m + 1], longest[at + 1]);
      }
    }
    for (let i = 0, j = 0; i < n && j < m; ) {
      const at = i * (m + 1) + j;
      if (same(start + i, start + j)) match(start + i++, start + j++);
      else if (longest[at + m + 1] >= longest[at + 1]) i++;
      else j++;
    }
  }
  of.forEach((w, k) => {
    if (w >= 0) for (let c = 0; c < u[k].size; c++) partner[u[k].at + c] = v[w].at + c;
  });
  spaces(x, y, u, v, of, partner);
  return partner;
}

/** White space before and after words that stand for each other. */
function spaces(x: string[], y: string[], u: Piece[], v: Piece[], of: Int32Array, partner: Int32Array): void {
  const taken = new Set<number>();
  const walk = (c: number, d: number, step: 1 | -1) => {
    for (; x[c] !== undefined && x[c] === y[d] && SPACE.test(x[c]) && partner[c] < 0 && !taken.has(d); c += step, d += step) {
      partner[c] = d;
      taken.add(d);
    }
  };
  of.forEach((w, k) => w >= 0 && walk(u[k].at + u[k].size, v[w].at + v[w].size, 1));
  of.forEach((w, k) => w >= 0 && walk(u[k].at - 1, v[w].at - 1, -1));
}

interface Piece {
  text: string;
  at: number;
  size: number;
}

/** The words, numbers and single signs of a text. */
function pieces(x: string[]): Piece[] {
  const word = (c: string) => /[\p{L}\p{N}\p{M}]/u.test(c);
  const found: Piece[] = [];
  for (let at = 0; at < x.length; ) {
    let end = at + 1;
    while (word(x[at]) && end < x.length && word(x[end])) end++;
    if (!SPACE.test(x[at])) found.push({ text: x.slice(at, end).join(""), at, size: end - at });
    at = end;
  }
  return found;
}

/** The text of a pair, as it stands on the left where it stands there. */
export function pairLabel(pair: Pair, a: Sequence, b: Sequence): string {
  return pair.a ? joined(a, ...pair.a) : joined(b, ...pair.b!);
}
