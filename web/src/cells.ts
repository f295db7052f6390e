// The cells of a matrix as they are shown: weights or gradients, of tokens or words, with sinks or without.

import { reach, type Extent } from "./colour";
import { fixed, number, significant, times } from "./dom";
import type { Head } from "./head";
import type { Scale, State } from "./state";
import { sinks, tokens, words, type Units } from "./units";

/** Anything that a matrix can be drawn from, a row at a time. */
export interface Cells {
  readonly rows: Units;
  readonly columns: Units;
  readonly signed: boolean;
  /** Row I, columns from … to; NaN where nothing can be. */
  row(I: number, from: number, to: number, out: Float32Array): void;
  /** A value with the digits that are known to hold. */
  say?(x: number): string;
  /** Where its scale ends, where that is known. */
  extent?(scale: Scale): Extent;
}

const READ = 256; // rows that a scale is taken from, spread over all
const WORK = 2e6; // cells of them at most

/** Where the scale of a matrix ends: taken from all of it, so that zooming changes no colour. */
export function extent(cells: Cells, scale: Scale): Extent {
  if (cells.extent) return cells.extent(scale);
  const { rows, columns } = cells;
  const read = Math.max(1, Math.min(rows.n, READ, Math.ceil(WORK / columns.n)));
  const line = new Float32Array(columns.n);
  const tops = times(read, (n) => {
    cells.row(Math.floor(((n + 0.5) * rows.n) / read), 0, columns.n, line);
    return line.reduce((top, x) => (Math.abs(x) > top ? Math.abs(x) : top), -1);
  });
  return reach(tops, scale, cells.signed, read === rows.n);
}

/** A value of a matrix in digits that hold. */
export function told(cells: Cells, x: number): string {
  return Number.isNaN(x) ? "hidden" : cells.say ? cells.say(x) : number(x, 3);
}

export class HeadCells implements Cells {
  readonly rows: Units;
  readonly columns: Units;
  readonly signed: boolean;
  readonly hidden: number[];
  private readonly line: Float32Array;

  constructor(
    readonly head: Head,
    state: Pick<State, "words" | "sinks" | "show">,
  ) {
    const made = state.words ? words : tokens;
    this.rows = made(head.queries);
    this.columns = made(head.keys);
    this.gradient = state.show === "gradient" && head.hasGradient;
    this.lengths = state.show === "length" && head.hasLengths;
    this.signed = (head.attention.signed && !this.lengths) || this.gradient;
    this.hidden = state.sinks && !this.gradient ? sinks(head.keys) : [];
    this.line = new Float32Array(head.S);
  }

  private readonly gradient: boolean;
  private readonly lengths: boolean;

  /** Gradients have two digits; weights as many decimals as the largest error of the head leaves whole. */
  say(x: number): string {
    if (this.lengths) return significant(x, 3);
    return this.gradient ? significant(x, 2) : fixed(x, this.head.decimals);
  }

  /** The scale of a head is found once, for all who draw it. */
  extent(scale: Scale): Extent {
    const key = [scale, this.rows.n < this.head.T, this.columns.n < this.head.S, this.hidden.length, this.what].join();
    let found = this.head.extents.get(key);
    if (!found) {
      const { rows, columns, signed } = this;
      const row = (I: number, from: number, to: number, out: Float32Array) => this.row(I, from, to, out);
      found = extent({ rows, columns, signed, row }, scale);
      this.head.extents.set(key, found);
    }
    return found;
  }

  /** Column J, rows from … to. */
  column(J: number, from: number, to: number, out: Float32Array): void {
    for (let I = from; I < to; I++) out[I - from] = this.cell(I, J);
  }

  /** What a cell is, in a word or two. */
  get what(): string {
    if (this.gradient) return "gradient of the loss";
    if (this.lengths) return "length handed on, ‖weight · v · Wₒ‖";
    return this.hidden.length ? "share of what is left" : "weight";
  }

  /** The same beside a number. */
  get word(): string {
    if (this.gradient) return "gradient";
    if (this.lengths) return "length handed on";
    return this.hidden.length ? "share of the rest" : "weight";
  }

  get isGradient(): boolean {
    return this.gradient;
  }

  row(I: number, from: number, to: number, out: Float32Array): void {
    const { head, rows, columns } = this;
    const plain = rows.n === head.T && columns.n === head.S;
    if (plain && !this.hidden.length) {
      this.tokens(I, from, to, out);
      return;
    }
    out.fill(NaN, 0, to - from);
    const first = this.hidden.length ? 0 : columns.from[from];
    const last = this.hidden.length ? head.S : columns.from[to];
    const share = 1 / (rows.from[I + 1] - rows.from[I]);
    for (let i = rows.from[I]; i < rows.from[I + 1]; i++) {
      this.tokens(i, first, last, this.line);
      const left = this.hidden.length ? this.remaining() : 1;
      const over = this.lengths ? share : share / left;
      for (let J = from; J < to; J++) {
        for (let j = columns.from[J]; j < columns.from[J + 1]; j++) {
          const w = this.line[j - first];
          if (w === w) out[J - from] = (out[J - from] === out[J - from] ? out[J - from] : 0) + w * over;
        }
      }
    }
  }

  private readonly one = new Float32Array(1);

  cell(I: number, J: number): number {
    this.row(I, J, J + 1, this.one);
    return this.one[0];
  }

  /** Takes the sinks out of the line and gives what is left in it. */
  private remaining(): number {
    for (const j of this.hidden) this.line[j] = NaN;
    let left = 0;
    for (let j = 0; j < this.head.S; j++) if (this.line[j] === this.line[j]) left += this.line[j];
    return Math.abs(left) > 1e-12 ? left : Infinity;
  }

  private tokens(i: number, from: number, to: number, out: Float32Array): void {
    if (this.lengths) this.head.handed(i, from, to, out);
    else if (this.gradient) this.head.gradients(i, from, to, out);
    else this.head.row(i, from, to, out);
  }
}

/** A matrix of numbers that are there already. */
export class Numbers implements Cells {
  constructor(
    readonly rows: Units,
    readonly columns: Units,
    readonly signed: boolean,
    private readonly values: Float32Array,
    readonly say: (x: number) => string,
  ) {}

  row(I: number, from: number, to: number, out: Float32Array): void {
    out.set(this.values.subarray(I * this.columns.n + from, I * this.columns.n + to));
  }
}

/** Units that are only counted and named. */
export function named(n: number, label: (u: number) => string): Units {
  const all = Int32Array.from({ length: n + 1 }, (_, u) => u);
  return { n, from: all, of: all.subarray(0, n), label };
}
