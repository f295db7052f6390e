// One head: any weight from queries, keys and a normaliser a row. Formulas: docs/trace-format.md.

import type { Extent } from "./colour";
import { featured, type Features } from "./features";
import type { Attention, Sequence } from "./format";
import type { Loader } from "./loader";
import { Memory } from "./memory";
import { REASONS, Rules, type Reason } from "./rules";

/** All that went into one weight. */
export interface Explained {
  product: number | null; // q·k
  scale: number | null;
  score: number | null; // after scale and softcap, or the similarity a(i, j)
  bias: number;
  normaliser: number | null; // its logarithm
  weight: number;
  reason: Reason;
  gradient: number | null;
}

export class Head {
  readonly T: number;
  readonly S: number;
  readonly extents = new Map<string, Extent>(); // of its scales, as far as they were asked for
  private readonly rules: Rules;
  q: Float32Array | null = null;
  k: Float32Array | null = null;
  K = 0;
  V = 0;
  private n: Float32Array | null = null;
  private sign: Float32Array | null = null;
  private choice: Float32Array | null = null;
  private slope = 0;
  private offsets: Float32Array | null = null;
  private tiles: Float32Array[] | null = null;
  private features: Features | null = null;
  memory: Memory | null = null; // of gated and delta attention
  private values: Promise<Float32Array | null> | null = null;
  private v: Float32Array | null = null;
  private g: Float32Array | null = null;
  private lengths: Float32Array | null = null; // of what each key hands on at weight 1

  private constructor(
    private readonly loader: Loader,
    readonly attention: Attention,
    readonly head: number,
    readonly queries: Sequence,
    readonly keys: Sequence,
  ) {
    this.T = queries.tokens.length;
    this.S = keys.tokens.length;
    this.rules = new Rules(attention.mask, queries, keys);
  }

  get group(): number {
    return Math.floor(this.head / (this.attention.heads / this.attention.groups));
  }

  static async open(
    loader: Loader,
    attention: Attention,
    head: number,
    queries: Sequence,
    keys: Sequence,
  ): Promise<Head> {
    const made = new Head(loader, attention, head, queries, keys);
    const { arrays, heads } = attention;
    const mine = async (ref: typeof arrays.n) => {
      const all = await loader.maybe(ref);
      return all && all.subarray((all.length / heads) * head, (all.length / heads) * (head + 1));
    };
    const tiles = arrays.tiles ? Promise.all(arrays.tiles[head].map((t) => loader.array(t))) : null;
    [made.q, made.k, made.n, made.sign, made.choice, made.offsets, made.rules.hidden, made.tiles] = await Promise.all([
      loader.maybe(arrays.q?.[head]),
      loader.maybe(arrays.k?.[made.group]),
      mine(arrays.n),
      mine(arrays.sign),
      mine(arrays.choice),
      mine(arrays.offsets),
      loader.maybe(arrays.hidden),
      tiles,
    ]);
    if (made.q) made.K = made.q.length / made.T;
    made.lengths = await mine(arrays.vo);
    made.slope = (await mine(arrays.slopes))?.[0] ?? 0;
    if (attention.weights.kind === "recurrence") await made.remember(attention.weights);
    if (attention.weights.kind === "feature") made.features = await featured(loader, made, attention.weights.map);
    return made;
  }

  /** Makes the memory of gated or delta attention: it needs values and gates beside queries and keys. */
  private async remember(how: { scale: number; erases: boolean }): Promise<void> {
    const { arrays, groups } = this.attention;
    const [v, a, b, skip] = await Promise.all([
      this.loader.array(arrays.v![this.group]),
      this.loader.array(arrays.a![this.group]),
      this.loader.maybe(arrays.b),
      this.loader.maybe(arrays.skip),
    ]);
    const mine = b && b.subarray((b.length / groups) * this.group, (b.length / groups) * (this.group + 1));
    this.memory = new Memory({ T: this.T, q: this.q!, k: this.k!, v, a, b: mine, skip: skip?.[this.head] ?? 0, ...how });
  }

  /** Values, and gradients of the head's output where they were recorded; needed for no weight. */
  vectors(): Promise<Float32Array | null> {
    const { arrays } = this.attention;
    this.values ??= Promise.all([
      this.loader.maybe(arrays.v?.[this.group]),
      this.loader.maybe(arrays.g?.[this.head]),
    ]).then(([v, g]) => {
      this.v = v;
      this.g = g;
      if (v) this.V = v.length / this.S;
      return v;
    });
    return this.values;
  }

  get hasGradient(): boolean {
    return this.attention.arrays.g !== undefined;
  }

  get hasLengths(): boolean {
    return this.attention.arrays.vo !== undefined;
  }

  /** ‖weight · v · Wₒ‖ of a row, NaN where the mask hides it. */
  handed(i: number, from: number, to: number, out: Float32Array): void {
    this.row(i, from, to, out);
    for (let j = from; j < to; j++) out[j - from] = Math.abs(out[j - from]) * this.lengths![j];
  }

  /** Why query i does not see key j: the first reason that applies, 0 where it sees it. */
  reason(i: number, j: number): number {
    return this.rules.reason(i, j);
  }

  /** Decimals of a weight that hold: half a unit of the last is no less than the largest error of the head. */
  get decimals(): number {
    return this.decimalsTimes(1);
  }

  /** Decimals that hold of a weight times a number. */
  decimalsTimes(factor: number): number {
    if (this.memory) return this.significant(factor);
    const error = (this.attention.error[this.head] || 0) * factor;
    return Math.max(1, Math.min(3, Math.floor(-Math.log10(2 * Math.max(error, 1e-9)))));
  }

  /** Weights of a memory are of any size, and stored without loss: three digits of the largest. */
  private significant(factor: number): number {
    this.largest ??= this.memory!.largest();
    return Math.max(1, Math.min(9, 2 - Math.floor(Math.log10(this.largest * factor || 1))));
  }

  private largest: number | null = null;

  bias(i: number, j: number): number {
    let b = 0;
    if (this.slope) b -= this.slope * Math.abs(this.queries.positions[i] - this.keys.positions[j]);
    if (this.offsets) b += this.offsets[j - i + this.T - 1];
    return b;
  }

  product(i: number, j: number): number {
    return dot(this.q!, i * this.K, this.k!, j * this.K, this.K);
  }

  /** q·k after scale and softcap; for kernels a(i, j), without its bias. */
  score(i: number, j: number): number | null {
    const how = this.attention.weights;
    if (how.kind === "feature") return this.features!.similarity(i, j, 0);
    if (!this.q || !this.k) return null;
    if (how.kind === "onehot") return this.product(i, j) / Math.sqrt(this.K);
    if (how.kind === "dense" || how.kind === "recurrence") return null;
    const s = how.scale * this.product(i, j);
    return how.softcap === null ? s : how.softcap * Math.tanh(s / how.softcap);
  }

  /** The weight of a cell that the mask lets through. */
  private raw(i: number, j: number): number {
    const how = this.attention.weights;
    switch (how.kind) {
      case "softmax":
        return Math.exp(this.score(i, j)! + this.bias(i, j) - this.n![i]);
      case "feature":
        return (this.sign ? this.sign[i] : 1) * this.features!.similarity(i, j, this.n![i]);
      case "onehot":
        return this.choice![i] === j ? 1 : 0;
      case "recurrence":
        return this.memory!.weight(i, j);
      case "dense":
        return this.tiles![Math.floor(i / how.tile)][(i % how.tile) * this.S + j];
    }
  }

  private empty(i: number): boolean {
    return this.n !== null && this.n[i] === -Infinity;
  }

  weight(i: number, j: number): number {
    return this.reason(i, j) || this.empty(i) ? 0 : this.raw(i, j);
  }

  /** The weights of query i on keys from … to, NaN where the mask hides them. */
  row(i: number, from: number, to: number, out: Float32Array): void {
    const empty = this.empty(i);
    const { weights: how, mask, bias } = this.attention;
    const plain = mask.window === null && mask.chunk === null && !this.rules.hidden && !bias.length && !empty;
    if (how.kind === "softmax" && how.softcap === null && plain) return this.softmax(i, from, to, how.scale, out);
    for (let j = from; j < to; j++) {
      out[j - from] = this.reason(i, j) ? NaN : empty ? 0 : this.raw(i, j);
    }
  }

  /** The same for the plainest case, without a call a cell: long texts have hundreds of millions. */
  private softmax(i: number, from: number, to: number, scale: number, out: Float32Array): void {
    const { K } = this;
    const { seen, places } = this.rules;
    const [q, k, n] = [this.q!, this.k!, this.n![i]];
    const last = this.attention.mask.causal ? this.queries.positions[i] - (this.queries.visible[i] ? 0 : 1) : Infinity;
    for (let j = from; j < to; j++) {
      out[j - from] = seen[j] && places[j] <= last ? Math.exp(scale * dot(q, i * K, k, j * K, K) - n) : NaN;
    }
  }

  /** Gradients of the loss with respect to the weights of a row, NaN where the mask hides them. Needs `vectors`. */
  gradients(i: number, from: number, to: number, out: Float32Array): void {
    for (let j = from; j < to; j++) out[j - from] = this.reason(i, j) ? NaN : this.gradient(i, j)!;
  }

  gradient(i: number, j: number): number | null {
    return this.g && this.v ? dot(this.g, i * this.V, this.v, j * this.V, this.V) : null;
  }

  value(j: number): Float32Array | null {
    return this.v && this.v.subarray(j * this.V, (j + 1) * this.V);
  }

  query(i: number): Float32Array | null {
    return this.q && this.q.subarray(i * this.K, (i + 1) * this.K);
  }

  key(j: number): Float32Array | null {
    return this.k && this.k.subarray(j * this.K, (j + 1) * this.K);
  }

  /** Σ_j weight·v_j, what the head gives for query i. */
  output(i: number): Float32Array | null {
    if (!this.v) return null;
    const out = new Float32Array(this.V);
    for (let j = 0; j < this.S; j++) {
      const w = this.weight(i, j);
      if (w) for (let d = 0; d < this.V; d++) out[d] += w * this.v[j * this.V + d];
    }
    return out;
  }

  /** Two vectors whose product is the score (before scale, or before exponents), and what they are. */
  factors(i: number, j: number): { q: Float32Array; k: Float32Array; name: string } | null {
    if (!this.q || !this.k) return null;
    const how = this.attention.weights;
    if (how.kind === "feature" && how.map !== "quadratic") {
      return { q: this.features!.query(i), k: this.features!.key(j), name: "φ(q) ∘ φ(k)" };
    }
    return { q: this.query(i)!, k: this.key(j)!, name: "q ∘ k" };
  }

  explain(i: number, j: number): Explained {
    const how = this.attention.weights;
    return {
      product: this.q && this.k ? this.product(i, j) : null,
      scale: how.kind === "softmax" || how.kind === "recurrence" ? how.scale : how.kind === "onehot" ? 1 / Math.sqrt(this.K) : null,
      score: this.score(i, j),
      bias: this.attention.bias.length ? this.bias(i, j) : 0,
      normaliser: this.n ? this.n[i] : null,
      weight: this.weight(i, j),
      reason: REASONS[this.reason(i, j)],
      gradient: this.reason(i, j) ? null : this.gradient(i, j),
    };
  }
}

/** a·b over n entries, four at a time. */
export function dot(a: Float32Array, at: number, b: Float32Array, bt: number, n: number): number {
  let w = 0,
    x = 0,
    y = 0,
    z = 0,
    d = 0;
  for (; d + 3 < n; d += 4) {
    w += a[at + d] * b[bt + d];
    x += a[at + d + 1] * b[bt + d + 1];
    y += a[at + d + 2] * b[bt + d + 2];
    z += a[at + d + 3] * b[bt + d + 3];
  }
  for (; d < n; d++) w += a[at + d] * b[bt + d];
  return w + x + y + z;
}

export function norm(x: Float32Array): number {
  return Math.sqrt(dot(x, 0, x, 0, x.length));
}
