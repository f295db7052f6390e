// Kernel attention: similarities as products of features, with exponents of each token kept apart.

import type { FeatureMap } from "./format";
import { dot, type Head } from "./head";
import type { Loader } from "./loader";

export interface Features {
  /** a(i, j) · exp(−n). */
  similarity(i: number, j: number, n: number): number;
  /** φ of a query and of a key, where a(i, j) is their product times exp of their exponents. */
  query(i: number): Float32Array;
  key(j: number): Float32Array;
}

/** Rows of F features, and one exponent a row. */
interface Side {
  x: Float32Array;
  c: Float32Array;
  F: number;
}

export async function featured(loader: Loader, head: Head, map: FeatureMap): Promise<Features> {
  const { arrays, heads, groups } = head.attention;
  const part = (all: Float32Array | null, of: number, n: number, rows: number) =>
    all ? all.subarray((all.length / of) * n, (all.length / of) * (n + 1)) : new Float32Array(rows);
  const w = await loader.maybe(arrays.w);
  const cq = part(await loader.maybe(arrays.cq), heads, head.head, head.T);
  const ck = part(await loader.maybe(arrays.ck), groups, head.group, head.S);
  const side = (x: Float32Array, rows: number, c: Float32Array): Side => {
    if (map === "performer") return positive(x, rows, w!);
    if (map === "fourier") return waves(x, rows, w!);
    if (map === "elu") return { x: x.map((e) => (e > 0 ? e + 1 : Math.exp(e))), c, F: x.length / rows };
    return { x, c, F: x.length / rows };
  };
  const q = side(head.q!, head.T, cq);
  const k = side(head.k!, head.S, ck);
  const product = (i: number, j: number) => dot(q.x, i * q.F, k.x, j * k.F, q.F);
  return {
    similarity: (i, j, n) =>
      map === "quadratic" ? (product(i, j) + 1) ** 2 * Math.exp(-n) : product(i, j) * Math.exp(q.c[i] + k.c[j] - n),
    query: (i) => q.x.subarray(i * q.F, (i + 1) * q.F),
    key: (j) => k.x.subarray(j * k.F, (j + 1) * k.F),
  };
}

/** Projections w_f·x with x over the fourth root of its width, and ‖x‖²/2. */
function projected(x: Float32Array, rows: number, w: Float32Array): { p: Float64Array; half: Float64Array; F: number } {
  const K = x.length / rows;
  const F = w.length / K;
  const root = K ** -0.25;
  const p = new Float64Array(rows * F);
  const half = new Float64Array(rows);
  for (let t = 0; t < rows; t++) {
    half[t] = (dot(x, t * K, x, t * K, K) * root * root) / 2;
    for (let f = 0; f < F; f++) p[t * F + f] = dot(w, f * K, x, t * K, K) * root;
  }
  return { p, half, F };
}

/** exp(w_f·x − ‖x‖²/2)/√F, the largest exponent of each row taken out. */
function positive(x: Float32Array, rows: number, w: Float32Array): Side {
  const { p, half, F } = projected(x, rows, w);
  const out = new Float32Array(rows * F);
  const c = new Float32Array(rows);
  for (let t = 0; t < rows; t++) {
    let most = -Infinity;
    for (let f = 0; f < F; f++) most = Math.max(most, p[t * F + f]);
    c[t] = most - half[t];
    for (let f = 0; f < F; f++) out[t * F + f] = Math.exp(p[t * F + f] - most) / Math.sqrt(F);
  }
  return { x: out, c, F };
}

/** cos and sin of w_f·x over √F: their products are cos(w_f·(x − y))/F. */
function waves(x: Float32Array, rows: number, w: Float32Array): Side {
  const { p, half, F } = projected(x, rows, w);
  const out = new Float32Array(rows * 2 * F);
  for (let t = 0; t < rows; t++) {
    for (let f = 0; f < F; f++) {
      out[2 * (t * F + f)] = Math.cos(p[t * F + f]) / Math.sqrt(F);
      out[2 * (t * F + f) + 1] = Math.sin(p[t * F + f]) / Math.sqrt(F);
    }
  }
  return { x: out, c: Float32Array.from(half), F: 2 * F };
}
