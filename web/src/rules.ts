// Who may see whom: the rules of docs/trace-format.md, which need no vectors.

import type { Attention, Sequence } from "./format";

export const REASONS = ["visible", "padding", "later", "window", "chunk", "model"] as const;
export type Reason = (typeof REASONS)[number];

export class Rules {
  readonly seen: Uint8Array; // keys that are no padding
  readonly places: Int32Array; // positions of keys
  hidden: Float32Array | null = null; // a rule of the model's own

  constructor(
    readonly mask: Attention["mask"],
    private readonly queries: Sequence,
    keys: Sequence,
  ) {
    this.seen = Uint8Array.from(keys.visible);
    this.places = Int32Array.from(keys.positions);
  }

  /** Why query i does not see key j: the first reason that applies, 0 where it sees it. */
  reason(i: number, j: number): number {
    const { mask } = this;
    if (!this.seen[j]) return 1;
    const p = this.queries.positions[i];
    const r = this.places[j];
    if (mask.causal && (r > p || (r === p && !this.queries.visible[i]))) return 2;
    if (mask.window !== null && Math.abs(p - r) >= mask.window) return 3;
    if (mask.chunk !== null && Math.floor(p / mask.chunk) !== Math.floor(r / mask.chunk)) return 4;
    return this.hidden && this.hidden[i * this.places.length + j] ? 5 : 0;
  }

  /** Whether all cells of a block are hidden, told from nine of them; no block of these rules hides its corners and
   * middles alone. */
  hides(i0: number, i1: number, j0: number, j1: number): boolean {
    const three = (from: number, to: number) => [from, (from + to - 1) >> 1, to - 1];
    return three(i0, i1).every((i) => three(j0, j1).every((j) => this.reason(i, j) !== 0));
  }
}
