// Arrays of a trace as numbers: inflated by the browser, put back in order.

import type { ArrayRef } from "./format";
import type { Source } from "./source";

const MIDDLE = 128; // what is added to the upper parts of whole numbers, so that small ones of either sign share a byte
const FINE = 64; // a step is a power of 2 to the 1/FINE

export async function numbers(source: Source, ref: ArrayRef): Promise<Float32Array> {
  const raw = await inflated(await source.bytes(ref));
  const size = ref.shape.reduce((a, b) => a * b, 1);
  const columns = ref.shape.length ? ref.shape[ref.shape.length - 1] : 1;
  const out = new Float32Array(size);
  const fill = (at: number, bytes: number, read: (view: DataView) => number) => expand(raw, at, bytes, size, out, read);
  switch (ref.type) {
    case "f32":
      fill(0, 4, (view) => view.getFloat32(0, true));
      break;
    case "i32":
      fill(0, 4, (view) => view.getInt32(0, true));
      break;
    case "f16":
      for (let n = 0; n < size; n++) out[n] = half(raw[n] | (raw[n + size] << 8));
      break;
    case "i16":
      for (let n = 0; n < size; n++) out[n] = ((raw[n] | (raw[n + size] << 8)) << 16) >> 16;
      break;
    case "u8":
      out.set(raw.subarray(0, size));
      break;
    case "step":
      steps(raw, columns, size, out);
      break;
    case "bit": {
      const stride = Math.ceil(columns / 8);
      for (let n = 0; n < size; n++) {
        const row = Math.floor(n / columns);
        const column = n - row * columns;
        out[n] = (raw[row * stride + (column >> 3)] >> (column & 7)) & 1;
      }
      break;
    }
    default:
      throw new Error(`an array of type ${String(ref.type)}, which this page cannot read: make it with a newer regard`);
  }
  return out;
}

/** Whole numbers of steps, a step for each column: upper parts of 16 bits, then the low bits, one behind the other. */
function steps(raw: Uint8Array, columns: number, size: number, out: Float32Array): void {
  const low = raw[0];
  const at = 1 + 2 * columns;
  const step = Float32Array.from(
    { length: columns },
    (_, d) => 2 ** ((((raw[1 + d] | (raw[1 + columns + d] << 8)) << 16) >> 16) / FINE),
  );
  let place = at + 2 * size;
  let [bits, have] = [0, 0];
  for (let n = 0, d = 0; n < size; n++, d = d + 1 === columns ? 0 : d + 1) {
    for (; have < low; have += 8) bits |= raw[place++] << have;
    const upper = (((raw[at + n] | (raw[at + size + n] << 8)) << 16) >> 16) - MIDDLE;
    out[n] = (upper * 2 ** low + (bits & ((1 << low) - 1))) * step[d];
    bits >>>= low;
    have -= low;
  }
}

async function inflated(bytes: Uint8Array<ArrayBuffer>): Promise<Uint8Array<ArrayBuffer>> {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Numbers of several bytes, byte b of number i standing at b·n + i. */
function expand(
  raw: Uint8Array,
  at: number,
  bytes: number,
  size: number,
  out: Float32Array,
  read: (view: DataView) => number,
): void {
  const one = new Uint8Array(bytes);
  const view = new DataView(one.buffer);
  for (let n = 0; n < size; n++) {
    for (let b = 0; b < bytes; b++) one[b] = raw[at + b * size + n];
    out[n] = read(view);
  }
}

function half(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}
