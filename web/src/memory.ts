// A memory S that fades, is written to and is read: weights and what it holds, from queries, keys, values and gates.
// docs/trace-format.md has the formulas; all is computed in float64, token by token.

/** What one head is made of: T tokens, keys of K and values of V numbers, and X decays a token, 1 or K. */
export interface Parts {
  T: number;
  q: Float32Array;
  k: Float32Array;
  v: Float32Array;
  a: Float32Array; // logarithms of the decays
  b: Float32Array | null; // null: everything is written by 1
  skip: number;
  scale: number;
  erases: boolean;
}

/** When half of what a token wrote was gone, and how much of the loss was decay; token −1: never. */
export interface End {
  token: number;
  byDecay: number;
}

const KEPT = 1024; // tokens up to which all rows of weights are kept once they were computed
const HALF = 0.5;
const SAMPLE = 32; // rows that the size of weights is told from

export class Memory {
  readonly T: number;
  private readonly K: number;
  private readonly V: number;
  private readonly decays: Float64Array; // e^a, K a token
  private readonly rows = new Map<number, Float64Array>();
  private readonly found = new Map<number, End>();
  private reading: { t: number; S: Float64Array } | null = null;
  private following: { t: number; W: Float64Array } | null = null;

  constructor(readonly parts: Parts) {
    const { T, k, v, a } = parts;
    this.T = T;
    this.K = k.length / T;
    this.V = v.length / T;
    const X = a.length / T;
    this.decays = Float64Array.from({ length: T * this.K }, (_, n) => Math.exp(a[X === 1 ? Math.floor(n / this.K) : n]));
  }

  /** How strongly token t is written. */
  strength(t: number): number {
    return this.parts.b ? this.parts.b[t] : 1;
  }

  /** What token t leaves of the memory: a share, the mean of its channels where they differ. */
  kept(t: number): number {
    let sum = 0;
    for (let d = 0; d < this.K; d++) sum += this.decays[t * this.K + d];
    return sum / this.K;
  }

  /** The weight without what a delta rule erases: q·k, decayed, written and scaled. */
  usual(i: number, j: number): number {
    const { K } = this;
    const { q, k, scale } = this.parts;
    let sum = 0;
    for (let d = 0; d < K; d++) {
      let left = 1;
      for (let t = j + 1; t <= i; t++) left *= this.decays[t * K + d];
      sum += q[i * K + d] * k[j * K + d] * left;
    }
    return scale * this.strength(j) * sum;
  }

  /** The largest weight of some rows, spread over all. */
  largest(): number {
    const rows = Math.min(this.T, SAMPLE);
    let top = 0;
    for (let n = 0; n < rows; n++) {
      for (const w of this.row(Math.floor(((n + 1) * this.T) / rows) - 1)) top = Math.max(top, Math.abs(w));
    }
    return top;
  }

  weight(i: number, j: number): number {
    return j > i ? 0 : this.row(i)[j];
  }

  /** Row i of the weights: the query is carried back through the tokens before it. */
  row(i: number): Float64Array {
    const known = this.rows.get(i);
    if (known) return known;
    const { K } = this;
    const { q, k, scale, erases, skip } = this.parts;
    const row = new Float64Array(i + 1);
    const r = Float64Array.from(q.subarray(i * K, (i + 1) * K), (x) => scale * x);
    for (let j = i; j >= 0; j--) {
      let w = 0;
      for (let d = 0; d < K; d++) w += r[d] * k[j * K + d];
      w *= this.strength(j);
      row[j] = w;
      for (let d = 0; d < K; d++) r[d] = this.decays[j * K + d] * (erases ? r[d] - w * k[j * K + d] : r[d]);
    }
    row[i] += skip;
    if (this.T > KEPT) this.rows.clear();
    this.rows.set(i, row);
    return row;
  }

  /** How much of v_j the memory answers to key j once token t is written, for j from … to, NaN for later ones. */
  answers(t: number, from: number, to: number, out: Float32Array): void {
    const { K, V } = this;
    const { k, v } = this.parts;
    const S = this.read(t);
    for (let j = from; j < to; j++) {
      out[j - from] = NaN;
      if (j > t) continue;
      let [sum, kk, vv] = [0, 0, 0];
      for (let d = 0; d < K; d++) {
        const x = k[j * K + d];
        kk += x * x;
        if (x) for (let e = 0; e < V; e++) sum += x * S[d * V + e] * v[j * V + e];
      }
      for (let e = 0; e < V; e++) vv += v[j * V + e] ** 2;
      out[j - from] = kk * vv > 0 ? sum / (kk * vv) : 0;
    }
  }

  /** What is left at token t of what tokens from … to wrote, where their own keys read; NaN for later ones. */
  left(t: number, from: number, to: number, out: Float32Array): void {
    const { K } = this;
    const { k } = this.parts;
    const W = this.follow(t);
    for (let j = from; j < to; j++) out[j - from] = j > t ? NaN : share(W, j * K, k, j * K, K);
  }

  /** When half of what token j wrote was gone. */
  end(j: number): End {
    let end = this.found.get(j);
    if (!end) {
      end = this.findEnd(j);
      this.found.set(j, end);
    }
    return end;
  }

  private findEnd(j: number): End {
    const { K, T } = this;
    const { k, erases } = this.parts;
    const key = k.subarray(j * K, (j + 1) * K);
    const u = Float64Array.from(key);
    let [left, decayed] = [1, 0];
    for (let t = j + 1; t < T; t++) {
      for (let d = 0; d < K; d++) u[d] *= this.decays[t * K + d];
      decayed += left - share(u, 0, key, 0, K);
      if (erases) erase(u, 0, k, t * K, K, this.strength(t));
      left = share(u, 0, key, 0, K);
      if (Math.abs(left) <= HALF) return { token: t, byDecay: Math.min(1, Math.max(0, decayed / (1 - left))) };
    }
    return { token: -1, byDecay: 0 };
  }

  /** The memory once token t is written; tokens are best asked for in their order. */
  private read(t: number): Float64Array {
    const { K, V } = this;
    const { k, v, erases } = this.parts;
    if (!this.reading || this.reading.t > t) this.reading = { t: -1, S: new Float64Array(K * V) };
    const { S } = this.reading;
    const fresh = new Float64Array(V);
    for (let n = this.reading.t + 1; n <= t; n++) {
      for (let e = 0; e < V; e++) fresh[e] = v[n * V + e];
      for (let d = 0; d < K; d++) {
        const f = this.decays[n * K + d];
        for (let e = 0; e < V; e++) S[d * V + e] *= f;
        if (erases) for (let e = 0; e < V; e++) fresh[e] -= k[n * K + d] * S[d * V + e];
      }
      const b = this.strength(n);
      for (let d = 0; d < K; d++) for (let e = 0; e < V; e++) S[d * V + e] += b * k[n * K + d] * fresh[e];
    }
    this.reading.t = t;
    return S;
  }

  /** Each key as it was written, and what tokens up to t have left of it. */
  private follow(t: number): Float64Array {
    const { K, T } = this;
    const { k, erases } = this.parts;
    if (!this.following || this.following.t > t) this.following = { t: -1, W: new Float64Array(T * K) };
    const { W } = this.following;
    for (let n = this.following.t + 1; n <= t; n++) {
      for (let j = 0; j < n; j++) {
        for (let d = 0; d < K; d++) W[j * K + d] *= this.decays[n * K + d];
        if (erases) erase(W, j * K, k, n * K, K, this.strength(n));
      }
      for (let d = 0; d < K; d++) W[n * K + d] = k[n * K + d];
    }
    this.following.t = t;
    return W;
  }
}

/** Takes out of u what key n reads of it, b times. */
function erase(u: Float64Array, at: number, k: Float32Array, n: number, K: number, b: number): void {
  let w = 0;
  for (let d = 0; d < K; d++) w += u[at + d] * k[n + d];
  w *= b;
  for (let d = 0; d < K; d++) u[at + d] -= w * k[n + d];
}

/** u·k / ‖k‖², of the part of u that begins at `from` and the key that begins at `at`. */
function share(u: Float64Array, from: number, k: Float32Array, at: number, K: number): number {
  let [sum, size] = [0, 0];
  for (let d = 0; d < K; d++) {
    sum += u[from + d] * k[at + d];
    size += k[at + d] ** 2;
  }
  return size > 0 ? sum / size : 0;
}

/** What was measured of how exact the weights of a head are, in a sentence. */
export function exactness(missed: Record<string, number[]> | undefined, head: number): string {
  const output = missed?.output?.[head];
  if (output === undefined) return "";
  const said = `Weights @ v is what this head gave, to ${output.toExponential(0).replace("-", "−")} of its length, as measured.`;
  const usual = missed!.usual?.[head];
  if (usual === undefined) return said;
  const percent = (x: number) => `${Math.round(100 * x)}%`;
  if (Math.max(usual, missed!.moved[head]) < 0.005)
    return `${said} The usual picture, without what the delta rule erases, is the same to less than 1%.`;
  return `${said} The usual picture, without what the delta rule erases, would miss it by ${percent(usual)}, with the largest weight of ${percent(missed!.moved[head])} of the rows on another token.`;
}
