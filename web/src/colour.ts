// Colours of weights: one hue that grows darker (on a dark page brighter), blue and orange around zero where weights have
// signs. Both keep their order for colour-blind readers and in grey.

import type { Scale } from "./state";

type RGB = [number, number, number];

const ONE = {
  light: ["#ffffff", "#d3e3f5", "#86b3e0", "#2f74ba", "#0c3f7c", "#04204a"],
  dark: ["#1b2027", "#1d3a5c", "#2767a8", "#58a5ec", "#a9d5ff", "#f3faff"],
};
const TWO = {
  light: ["#04305f", "#2f74ba", "#a9cbeb", "#ffffff", "#f6c5a3", "#cf6420", "#6e2800"],
  dark: ["#cfe8ff", "#58a5ec", "#215182", "#1b2027", "#7c3c14", "#f08a43", "#ffe3cf"],
};
/** Reasons why a cell is hidden, and what is not: visible, padding, later, window, chunk, model. */
export const REASON_COLOURS = {
  light: ["#2f74ba", "#b9bfc8", "#e6e9ee", "#f0c9a8", "#bfe0d3", "#dcb8d7"],
  dark: ["#58a5ec", "#545d69", "#2a313a", "#7a4a22", "#1f5f4b", "#6d3f66"],
};

export type Mode = "light" | "dark";

export function rgb(hex: string): RGB {
  const n = parseInt(hex.slice(1), 16);
  return [n >> 16, (n >> 8) & 255, n & 255];
}

/** 256 colours between stops. */
function table(stops: string[]): Uint8ClampedArray {
  const out = new Uint8ClampedArray(256 * 3);
  for (let n = 0; n < 256; n++) {
    const at = (n / 255) * (stops.length - 1);
    const low = Math.min(Math.floor(at), stops.length - 2);
    const [a, b] = [rgb(stops[low]), rgb(stops[low + 1])];
    for (let c = 0; c < 3; c++) out[3 * n + c] = a[c] + (b[c] - a[c]) * (at - low);
  }
  return out;
}

const tables = {
  one: { light: table(ONE.light), dark: table(ONE.dark) },
  two: { light: table(TWO.light), dark: table(TWO.dark) },
};

export const FLOOR = 1e-4; // the least weight that the logarithmic scale tells from nothing

/** The end of a scale. Of one scale for a head: three quarters of the rows have no larger weight, so that the first rows of a
 * causal mask, which see few keys, do not bleach all others. */
export function reach(values: Float32Array, R: number, C: number, scale: Scale): { most: number; clipped: boolean } {
  const rows: number[] = [];
  for (let r = 0; r < R; r++) {
    let top = -1;
    for (let c = 0; c < C; c++) if (Math.abs(values[r * C + c]) > top) top = Math.abs(values[r * C + c]);
    if (top >= 0) rows.push(top);
  }
  rows.sort((x, y) => x - y);
  const largest = rows.length ? rows[rows.length - 1] : 0;
  const most = scale === "head" && rows.length ? rows[Math.ceil(0.75 * (rows.length - 1))] : largest;
  return most > 0 ? { most, clipped: largest > most * 1.001 } : { most: largest || 1, clipped: false };
}

/** How numbers become colours: `most` is the largest size on the scale, `clipped` whether some are larger. */
export class Ramp {
  private readonly colours: Uint8ClampedArray;

  constructor(
    readonly scale: Scale,
    readonly signed: boolean,
    readonly mode: Mode,
    readonly most: number,
    readonly clipped = false,
  ) {
    this.colours = tables[signed ? "two" : "one"][mode];
  }

  /** The place of a value on the ramp, 0 … 255; `most` may be that of a row. */
  place(value: number, most = this.most): number {
    let size = Math.abs(value) / (most || 1);
    if (this.scale === "log") size = size <= FLOOR ? 0 : 1 - Math.log10(size) / Math.log10(FLOOR);
    size = Math.min(1, size);
    return Math.round(this.signed ? 127.5 + 127.5 * Math.sign(value) * size : 255 * size);
  }

  paint(value: number, out: Uint8ClampedArray, at: number, most = this.most): void {
    const n = 3 * this.place(value, most);
    out[at] = this.colours[n];
    out[at + 1] = this.colours[n + 1];
    out[at + 2] = this.colours[n + 2];
    out[at + 3] = 255;
  }

  css(value: number, most = this.most): string {
    const n = 3 * this.place(value, most);
    return `rgb(${this.colours[n]},${this.colours[n + 1]},${this.colours[n + 2]})`;
  }

  /** Values at even places of the ramp, for its legend. */
  ticks(): number[] {
    if (this.scale === "log") {
      const steps = [FLOOR, 1e-3, 1e-2, 1e-1, 1].map((x) => x * this.most);
      return this.signed ? [-this.most, 0, this.most] : steps;
    }
    return this.signed ? [-this.most, 0, this.most] : [0, this.most / 2, this.most];
  }
}
