// Colours of weights: one hue that grows darker (on a dark page brighter); where weights have signs, blue above zero and
// orange below. Both keep their order for colour-blind readers and in grey.

import { times } from "./dom";
import type { Scale } from "./state";

type RGB = [number, number, number];

const ONE = {
  light: ["#ffffff", "#d3e3f5", "#86b3e0", "#2f74ba", "#0c3f7c", "#04204a"],
  dark: ["#1b2027", "#1d3a5c", "#2767a8", "#58a5ec", "#a9d5ff", "#f3faff"],
};
/** From the most negative to the most positive: blue is above zero in matrices as it is in bars and arcs. */
const TWO = {
  light: ["#6e2800", "#cf6420", "#f6c5a3", "#ffffff", "#a9cbeb", "#2f74ba", "#04305f"],
  dark: ["#ffe3cf", "#f08a43", "#7c3c14", "#1b2027", "#215182", "#58a5ec", "#cfe8ff"],
};
/** Reasons why a cell is hidden, and what is not: visible, padding, later, window, chunk, model. */
export const REASON_COLOURS = {
  light: ["#1d5fa6", "#3f464f", "#ffffff", "#d9903f", "#3f9a82", "#b56fae"],
  dark: ["#6cb2f5", "#c3cad3", "#1b2027", "#c07a34", "#2f8f74", "#b168a8"],
};

/** Of heads that are laid over each other: each has a hue of its own. */
export const HUES = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b4609a"],
  dark: ["#56b4e9", "#ff9f60", "#3fcda0", "#e59bd0"],
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

/** Where a scale ends, and whether some values may lie beyond its end. */
export interface Extent {
  most: number;
  clipped: boolean;
}

/** The least of 1, 1.2, 1.5 … times a power of ten that is no less than x, so that legends need two digits. */
export function rounded(x: number): number {
  const power = 10 ** Math.floor(Math.log10(x) + 1e-9);
  const found = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9, 10].find((m) => m * power >= x * 0.9999)!;
  return Number((found * power).toPrecision(2));
}

/** The end of a scale, from the largest sizes of rows: three quarters of them are no larger, so that the first rows of a
 * causal mask, which see few keys, do not bleach all others. `all`: no row was left out. */
export function reach(tops: number[], scale: Scale, signed: boolean, all = true): Extent {
  const rows = tops.filter((top) => top > 0).sort((x, y) => x - y);
  if (!rows.length) return { most: 1, clipped: false };
  const largest = rows[rows.length - 1];
  // Weights that are not signed are shares of 1: the logarithmic scale is then the same for all heads.
  if (scale === "log") return { most: signed || largest > 1 ? 10 ** Math.ceil(Math.log10(largest) - 1e-9) : 1, clipped: false };
  const most = rounded(rows[Math.ceil(0.75 * (rows.length - 1))]);
  const bounded = !signed && largest <= 1.001 && most >= 1;
  return { most, clipped: !bounded && (!all || largest > most * 1.001) };
}

/** The largest size in each row of a small picture. */
export function tops(values: Float32Array, R: number, C: number): number[] {
  return times(R, (r) => {
    let top = -1;
    for (let c = 0; c < C; c++) if (Math.abs(values[r * C + c]) > top) top = Math.abs(values[r * C + c]);
    return top;
  });
}

/** Luminance as contrast counts it, 0 … 1. */
function luminance(c: ArrayLike<number>): number {
  const part = (x: number) => (x <= 10.31475 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
}

/** Black or white, whichever reads better on a colour: one of them always has a contrast of 4.5. */
export function legible(ground: ArrayLike<number>): string {
  return luminance(ground) > 0.179 ? "#000000" : "#ffffff";
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
    hue = "", // one hue from nothing to all, in place of the usual ramp
  ) {
    this.colours = hue ? table([ONE[mode][0], hue]) : tables[signed ? "two" : "one"][mode];
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

  /** The colour of a value, as three numbers. */
  colour(value: number, most = this.most): RGB {
    const n = 3 * this.place(value, most);
    return [this.colours[n], this.colours[n + 1], this.colours[n + 2]];
  }

  css(value: number, most = this.most): string {
    return `rgb(${this.colour(value, most).join(",")})`;
  }

  /** The colour at a share of the ramp, 0 … 1. */
  at(share: number): string {
    const n = 3 * Math.round(255 * share);
    return `rgb(${this.colours[n]},${this.colours[n + 1]},${this.colours[n + 2]})`;
  }

  /** Values at even places of the ramp, for its legend. */
  ticks(): number[] {
    const { most } = this;
    if (this.scale === "log") {
      const middle = most * Math.sqrt(FLOOR);
      return this.signed ? [-most, -middle, 0, middle, most] : [FLOOR, 1e-3, 1e-2, 1e-1, 1].map((x) => x * most);
    }
    return this.signed ? [-most, -most / 2, 0, most / 2, most] : [0, most / 2, most];
  }
}
