// Predictions of a trace as numbers, and what is asked of a model besides.

import { times } from "./dom";
import type { Predictions } from "./format";
import type { Seen } from "./loader";

/** A possible next token at a position, and what adds up to its logit. */
export interface Candidate {
  id: number;
  text: string;
  logit: number;
  p: number;
  heads: ArrayLike<number>[]; // of each block; none where heads do not add up
  rest: ArrayLike<number>; // embeddings, the MLP of each block, a constant
}

export class Predicted {
  readonly texts: Map<number, string>;
  readonly T: number;
  readonly M: number; // the stream before the first block and after each
  readonly K: number;
  readonly C: number;

  private constructor(
    readonly about: Predictions,
    readonly ids: number[],
    private readonly top: Float32Array,
    private readonly p: Float32Array,
    private readonly candidates: Float32Array,
    private readonly logits: Float32Array,
    private readonly rest: Float32Array,
    private readonly heads: Float32Array[],
  ) {
    this.texts = new Map(about.tokens);
    [this.M, this.T, this.K] = about.arrays.top.shape;
    this.C = about.arrays.candidates.shape[1];
  }

  static async open(seen: Seen): Promise<Predicted | null> {
    const about = seen.recording.predictions;
    if (!about) return null;
    const { arrays } = about;
    const plain = [arrays.top, arrays.p, arrays.candidates, arrays.logits, arrays.rest].map((x) => seen.loader.array(x));
    const [top, p, candidates, logits, rest] = await Promise.all(plain);
    const heads = await Promise.all(arrays.heads.map((x) => seen.loader.array(x)));
    return new Predicted(about, seen.recording.sequences[about.sequence].ids ?? [], top, p, candidates, logits, rest, heads);
  }

  /** The likeliest tokens by the stream at row m, after position t. */
  likeliest(m: number, t: number): { id: number; text: string; p: number }[] {
    const at = (m * this.T + t) * this.K;
    return times(this.K, (k) => {
      const id = this.top[at + k];
      return { id, text: this.texts.get(id) ?? String(id), p: this.p[at + k] };
    });
  }

  /** What may come after position t: the likeliest, and what comes. */
  at(t: number): Candidate[] {
    const best = this.likeliest(this.M - 1, t)[0];
    const found = times(this.C, (c) => this.candidate(t, c));
    const most = found.find((x) => x.id === best.id)!;
    const total = most.logit - Math.log(best.p); // the normaliser's logarithm
    return found.map((x) => ({ ...x, p: Math.exp(x.logit - total) })).sort((x, y) => y.logit - x.logit);
  }

  private candidate(t: number, c: number): Candidate {
    const at = t * this.C + c;
    const id = this.candidates[at];
    const part = (x: Float32Array) => x.subarray((at * x.length) / (this.T * this.C), ((at + 1) * x.length) / (this.T * this.C));
    return { id, text: this.texts.get(id) ?? String(id), logit: this.logits[at], p: 0, heads: this.heads.map(part), rest: part(this.rest) };
  }
}

/** What one part adds. */
export interface Part {
  name: string;
  value: number;
  a: number; // attention and head, −1 where it is none
  h: number;
}

/** All that adds up to a logit; `against`: less what it adds to that of another token. */
export function parts(one: Candidate, against: Candidate | null, about: Predictions): Part[] {
  const value = (x: ArrayLike<number>, y: ArrayLike<number> | undefined, n: number) => x[n] - (y ? y[n] : 0);
  const heads = one.heads.flatMap((x, l) =>
    times(x.length, (h) => ({
      name: `layer ${l}, head ${h}`,
      value: value(x, against?.heads[l], h),
      a: about.attentions[l],
      h,
    })),
  );
  const last = one.rest.length - 1;
  const rest = times(one.rest.length, (n) => ({
    name: n === 0 ? "embeddings" : n === last ? "constant" : `MLP of layer ${n - 1}`,
    value: value(one.rest, against?.rest, n),
    a: -1,
    h: -1,
  }));
  return [...heads, ...rest];
}
