// Two heads over aligned tokens: the difference of their weights, how far apart their rows are where both have tokens, and
// how much weight goes to tokens that only one side has.

import { named, type Cells } from "./cells";
import { aligned, pairLabel, type Pair } from "./align";
import { fixed } from "./dom";
import type { Head } from "./head";
import type { Units } from "./units";

export class Difference implements Cells {
  readonly rows: Units;
  readonly columns: Units;
  readonly signed = true;
  readonly decimals: number; // that hold in a difference
  readonly queries: Pair[];
  readonly keys: Pair[];
  private readonly lines: [Float32Array, Float32Array];
  private readonly sides: [Float32Array, Float32Array];

  constructor(
    readonly a: Head,
    readonly b: Head,
  ) {
    this.queries = aligned(a.queries, b.queries);
    this.keys = a.queries === a.keys && b.queries === b.keys ? this.queries : aligned(a.keys, b.keys);
    this.rows = named(this.queries.length, (u) => pairLabel(this.queries[u], a.queries, b.queries));
    this.columns = named(this.keys.length, (u) => pairLabel(this.keys[u], a.keys, b.keys));
    this.lines = [new Float32Array(a.S), new Float32Array(b.S)];
    this.sides = [new Float32Array(this.keys.length), new Float32Array(this.keys.length)];
    this.decimals = Math.min(a.decimals, b.decimals);
  }

  say(x: number): string {
    return fixed(x, this.decimals);
  }

  get unaligned(): number {
    return this.queries.filter((p) => !p.a || !p.b).length;
  }

  /** b less a; NaN where a token has no partner, or both hide it. */
  row(I: number, from: number, to: number, out: Float32Array): void {
    out.fill(NaN, 0, to - from);
    const pair = this.queries[I];
    if (!pair.a || !pair.b) return;
    const [x, y] = this.both(I);
    for (let J = from; J < to; J++) {
      const { a, b } = this.keys[J];
      if (a && b && (x[J] === x[J] || y[J] === y[J])) out[J - from] = (y[J] || 0) - (x[J] || 0);
    }
  }

  /** The weights of an aligned row on each side: mean over its queries, sums over keys; NaN where hidden. */
  both(I: number): [Float32Array, Float32Array] {
    const { a, b } = this.queries[I];
    this.side(this.a, a!, 0);
    this.side(this.b, b!, 1);
    return this.sides;
  }

  private side(head: Head, [first, last]: [number, number], n: 0 | 1): void {
    const out = this.sides[n].fill(NaN);
    for (let i = first; i < last; i++) {
      head.row(i, 0, head.S, this.lines[n]);
      this.keys.forEach((pair, J) => {
        const span = n ? pair.b : pair.a;
        if (!span) return;
        for (let j = span[0]; j < span[1]; j++) {
          const w = this.lines[n][j];
          if (w === w) out[J] = (out[J] === out[J] ? out[J] : 0) + w / (last - first);
        }
      });
    }
  }

  /** What differs in a row; null where it has no partner. */
  apart(I: number): Apart | null {
    const { a, b } = this.queries[I];
    if (!a || !b) return null;
    const [x, y] = this.both(I);
    const met = this.keys.map(({ a, b }) => Boolean(a && b));
    const mass = (z: Float32Array, kind: boolean) =>
      z.reduce((sum, w, J) => sum + (met[J] === kind ? Math.abs(w) || 0 : 0), 0);
    const [left, right] = [mass(x, true), mass(y, true)];
    const bits = left > 0 && right > 0 ? divergence(x, y, met, left, right) : NaN;
    return { bits, left: mass(x, false), right: mass(y, false) };
  }
}

export interface Apart {
  bits: number; // Jensen–Shannon divergence over tokens that both sides have: 0 alike … 1 apart; NaN where either has no weight there
  left: number; // weight on tokens that only the left has
  right: number;
}

/** Jensen–Shannon divergence in bits of two rows over the keys that both have, each divided by its weight there. */
function divergence(x: Float32Array, y: Float32Array, met: boolean[], left: number, right: number): number {
  let total = 0;
  for (let J = 0; J < x.length; J++) {
    if (!met[J]) continue;
    const [p, q] = [(Math.abs(x[J]) || 0) / left, (Math.abs(y[J]) || 0) / right];
    const m = (p + q) / 2;
    if (p > 0) total += (p / 2) * Math.log2(p / m);
    if (q > 0) total += (q / 2) * Math.log2(q / m);
  }
  return Math.max(0, total);
}

/** The mean of what differs over some rows, spread over all of them. */
export function meanApart(d: Difference, most: number): Apart & { rows: number } {
  const step = Math.max(1, Math.ceil(d.queries.length / most));
  const rows = d.queries.flatMap((_, I) => (I % step === 0 ? (d.apart(I) ?? []) : []));
  const known = rows.filter((r) => !Number.isNaN(r.bits));
  const mean = (values: number[]) => (values.length ? values.reduce((x, y) => x + y, 0) / values.length : NaN);
  return {
    bits: mean(known.map((r) => r.bits)),
    left: mean(rows.map((r) => r.left)),
    right: mean(rows.map((r) => r.right)),
    rows: rows.length,
  };
}
