// A matrix on a canvas with labels, zoom, a cursor, and a sentence about the cell under it.

import { extent, told, type Cells } from "./cells";
import { Gestures } from "./gestures";
import { legible, Ramp, rgb, type Extent, type Mode } from "./colour";
import { button, h, MIDDLE, number, replace, s, select, tick, times } from "./dom";
import { hatching, legend, legends } from "./legend";
import { pooled, type Grid, type Window } from "./pooled";
import type { Pool, Scale } from "./state";

export interface Options {
  label: string;
  cells: Cells;
  scale: Scale;
  pool: Pool;
  mode: Mode;
  what: string; // what a cell is, for the legend
  nothing?: string; // what a cell without a number is; unless said, hidden by the mask
  extent?: Extent | undefined; // of the scale, where several share one
  side?: number; // the longest side in CSS pixels
  zoom?: string;
  palette?: readonly string[]; // cells are numbers of colours
  layers?: Layer[] | undefined; // several heads in one picture, the first of them `cells`
  hatched?: { row(u: number): boolean; column(u: number): boolean };
  line?: { row: number; column: number } | null; // where a prompt ends
  axes?: [string, string];
  describe?(I: number, J: number): string;
  hovered?(cell: [number, number] | null): void;
  picked?(I: number, J: number): void;
  zoomed?(zoom: string): void;
  pooling?(pool: Pool): void;
}

/** One of several heads in a picture. */
export interface Layer {
  name: string;
  hue: string;
  cells: Cells;
}

/** What there is before anything is shown; `update` brings the cells. */
const START: Options = { label: "", what: "", cells: null as never, scale: "head", pool: "max", mode: "light" };
const WIDEST = 220; // of one cell
const STRETCH = 2.2; // how much wider than high a cell may be
const [NARROW, LEFT] = [86, 118]; // room beside for words
const NUMBERS = 1024; // cells that may have their numbers in them
const [WRITTEN, HIGH] = [37, 19]; // the room that a number needs
const DIGIT = 0.6; // width of a digit or a sign beside its height, about
const [SMALL, LARGE] = [11, 17]; // pixels of a number, where there is just room and where there is plenty
const RULED = 14; // size of a cell from which on kinds have lines between them
const TOP = 92; // room for words; numbers need less
const LOW = 32;
const STRIPE = 4; // pixels that a stripe of a cell needs
const WORD = 11; // pixels that a word needs
const SHORT = 14; // pixels of a row whose name is as high

export class Matrix {
  readonly node: HTMLElement;
  grid: Grid | null = null;
  ramp: Ramp | null = null;
  picture: ImageData | null = null; // a dot each, or a stripe a head
  grids: (Grid | null)[] = []; // of the heads that are laid over each other
  readonly canvas = h("canvas", { "aria-hidden": "true" });
  private readonly over = s("svg", { class: "over", "aria-hidden": "true" });
  readonly stage = h("div", { class: "stage" });
  private readonly readout = h("p", { class: "readout", role: "status", "aria-live": "polite" });
  private readonly note = h("p", { class: "note" });
  private readonly legend = h("div", { class: "legends" });
  private readonly gestures: Gestures;
  private readonly tools = h("div", { class: "tools" });
  private stop: () => void = () => undefined;
  at: [number, number] | null = null;
  private width = 0;
  private height = 0;
  private drawn = 0;
  private top = TOP;
  private left = LEFT;
  private angle = 0; // of the words above
  hides = false; // some cells have nothing

  options: Options;

  constructor(options: Partial<Options>) {
    this.options = { ...START, ...options };
    this.stage.append(this.canvas, this.over);
    Object.entries({
      role: "application",
      tabindex: "0",
      "aria-roledescription": "matrix",
      "aria-label": this.options.label,
    }).forEach(([k, v]) => this.stage.setAttribute(k, v));
    this.node = h(
      "div",
      { class: "matrix" },
      h("div", { class: "above" }, this.tools, this.readout),
      this.stage,
      this.legend,
      this.note,
    );
    this.gestures = new Gestures(this);
  }

  /** Where the cells are in the drawing. */
  get frame(): { x: number; y: number; width: number; height: number } {
    return { x: this.left, y: this.top, width: this.width, height: this.height };
  }

  get window(): Window {
    const { rows, columns } = this.options.cells;
    const found = /^(\d+)-(\d+),(\d+)-(\d+)$/.exec(this.options.zoom ?? "");
    const whole = { i0: 0, i1: rows.n, j0: 0, j1: columns.n };
    if (!found) return whole;
    const [i0, i1, j0, j1] = found.slice(1).map(Number);
    return i0 < i1 && i1 <= rows.n && j0 < j1 && j1 <= columns.n ? { i0, i1, j0, j1 } : whole;
  }

  update(changes: Partial<Options>): void {
    this.options = { ...this.options, ...changes };
    this.stage.setAttribute("aria-label", this.options.label);
    this.draw();
  }

  /** Draws anew; call it when the element is on the page or its room has changed. */
  draw(): void {
    this.stop();
    const { cells, pool } = this.options;
    const w = this.window;
    const [rows, columns] = [w.i1 - w.i0, w.j1 - w.j0];
    this.left = this.beside(w);
    const room = Math.max(200, (this.node.clientWidth || 640) - this.left - 8);
    this.fit(room, rows, columns);
    this.top = this.gutter(w, this.width / columns);
    const over = this.width + this.overhang(w) - room;
    if (over > 0) this.fit(Math.max(200, room - over), rows, columns);
    this.over.setAttribute("width", String(this.left + this.width + 8));
    this.over.setAttribute("height", String(this.top + this.height + 4));
    this.canvas.style.left = `${this.left}px`;
    this.canvas.style.top = `${this.top}px`;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.dataset.state = "working";
    this.labels();
    this.drawTools();
    const [R, C] = [Math.min(rows, this.height), Math.min(columns, this.width)];
    this.grids = [];
    const others = (this.options.layers ?? []).slice(1).map((layer, n) =>
      pooled(layer.cells, w, R, C, pool, (grid) => {
        this.grids[n + 1] = grid;
        if (grid.done === grid.passes && this.grid) this.paint(this.grid);
      }),
    );
    const first = pooled(cells, w, R, C, pool, (grid) => {
      this.grid = this.grids[0] = grid;
      const last = grid.done === grid.passes;
      const now = performance.now();
      if (!last && grid.done > 0 && now - this.drawn < 120) return;
      this.drawn = now;
      this.paint(grid);
      this.canvas.dataset.state = last ? "done" : "refining";
      this.explain();
    });
    this.stop = () => [first, ...others].forEach((stop) => stop());
  }

  /** Puts the cursor on a cell, takes it away, or on a row or a column alone where the other is −1. */
  cursor(cell: [number, number] | null): void {
    this.at = cell;
    this.over.querySelector(".cursor")?.remove();
    if (!cell) {
      this.readout.textContent = "";
      return;
    }
    const w = this.window;
    const [I, J] = cell;
    const [x0, x1] = [this.x(Math.max(J, w.j0)), this.x(Math.min(J + 1, w.j1))];
    const [y0, y1] = [this.y(Math.max(I, w.i0)), this.y(Math.min(I + 1, w.i1))];
    const [row, column] = [I >= w.i0 && I < w.i1, J >= w.j0 && J < w.j1];
    const [high, wide] = [Math.max(1, y1 - y0), Math.max(1, x1 - x0)];
    const group = s(
      "g",
      { class: "cursor" },
      row && s("rect", { class: "band", x: this.left, y: y0, width: this.width, height: high }),
      column && s("rect", { class: "band", x: x0, y: this.top, width: wide, height: this.height }),
      row && column && s("rect", { class: "cell", x: x0, y: y0, width: Math.max(3, wide), height: Math.max(3, high) }),
    );
    this.over.append(group);
    this.readout.textContent = I >= 0 && J >= 0 ? (this.options.describe?.(I, J) ?? "") : "";
  }

  destroy(): void {
    this.stop();
  }

  /** The size of the cells together, in the room there is. */
  private fit(room: number, rows: number, columns: number): void {
    const side = this.options.side ?? Math.max(360, innerHeight - 345);
    const across = Math.min(WIDEST, room / columns);
    const size = Math.min(across, side / rows);
    this.width = Math.round(Math.min(room, Math.max(columns * Math.min(across, STRETCH * size), 160)));
    this.height = Math.round(Math.min(side, Math.max(rows * size, rows === 1 ? size : 100)));
  }

  /** How far the last slanted word reaches over the edge. */
  private overhang(w: Window): number {
    const cell = this.width / (w.j1 - w.j0);
    const { step, at } = ticks(w.j0, w.j1, cell);
    if (this.angle !== -45 || !at.length) return 0;
    const last = at[at.length - 1];
    return Math.min(14, this.name("columns", last, step).length) * 4.9 - (w.j1 - last - 0.5) * cell;
  }

  /** Room for the words of the rows. */
  private beside(w: Window): number {
    const { rows } = this.options.cells;
    const step = Math.max(1, Math.floor((w.i1 - w.i0) / 60));
    let longest = 0;
    for (let I = w.i0; I < w.i1; I += step) longest = Math.max(longest, rows.label(I).length + (step > 1 ? 4 : 0));
    return Math.max(NARROW, Math.min(LEFT, 14 + 6.6 * longest));
  }

  private x(J: number): number {
    const w = this.window;
    return this.left + ((J - w.j0) / (w.j1 - w.j0)) * this.width;
  }

  private y(I: number): number {
    const w = this.window;
    return this.top + ((I - w.i0) / (w.i1 - w.i0)) * this.height;
  }

  private paint(grid: Grid): void {
    const { scale, mode, palette, cells } = this.options;
    const { most, clipped } = this.options.extent ?? (palette ? { most: 1, clipped: false } : extent(cells, scale));
    const ramp = new Ramp(scale, cells.signed, mode, most, clipped);
    const ends = scale === "row" && !palette ? this.rowEnds(grid) : null;
    this.ramp = ramp;
    this.hides = false;
    if (this.options.layers) return this.overlay(grid, most, clipped);
    const picture = new ImageData(grid.C, grid.R);
    for (let r = 0; r < grid.R; r++) {
      for (let c = 0; c < grid.C; c++) {
        const at = r * grid.C + c;
        const x = grid.values[at];
        if (x !== x) this.hides ||= !this.isAlone(grid, r, c); // and stays transparent: the hatching behind shows
        else if (palette) picture.data.set([...rgb(palette[x]), 255], 4 * at);
        else ramp.paint(x, picture.data, 4 * at, ends?.[r]);
      }
    }
    this.put(picture);
    this.write(grid, ramp, ends);
    this.drawLegend();
  }

  private put(picture: ImageData): void {
    this.picture = picture;
    this.canvas.width = picture.width;
    this.canvas.height = picture.height;
    this.canvas.getContext("2d")!.putImageData(picture, 0, 0);
  }

  /** Several heads: each cell has a stripe a head, and where it is too small for that the hue of the largest. */
  private overlay(grid: Grid, most: number, clipped: boolean): void {
    const { layers, scale, mode } = this.options;
    const ramps = layers!.map((x) => new Ramp(scale === "row" ? "head" : scale, false, mode, most, clipped, x.hue));
    const n = this.width / grid.C >= STRIPE * ramps.length ? ramps.length : 1;
    const picture = new ImageData(grid.C * n, grid.R);
    for (let at = 0; at < grid.R * grid.C; at++) {
      const each = this.grids.map((g) => (g ? g.values[at] : NaN));
      const best = each.reduce((top, x, k) => (x > (each[top] || 0) ? k : top), 0);
      for (let k = 0; k < n; k++) {
        const which = n > 1 ? k : best;
        if (each[which] === each[which]) ramps[which].paint(each[which], picture.data, 4 * (at * n + k));
        else this.hides ||= which === 0;
      }
    }
    this.put(picture);
    this.over.querySelector(".numbers")?.remove();
    const hidden = { masked: this.hides ? "hidden by the mask" : "", alone: "" };
    const last = ramps.length - 1;
    const parts = layers!.map((x, k) => legend(x.name, ramps[k], k === last ? hidden : { masked: "", alone: "" }));
    this.legend.replaceChildren(legends(parts, `Colours of ${layers!.length} heads`));
    this.legend.append(
      h("p", { class: "note" }, n > 1 ? "Each cell has a stripe for each head, in this order." : "A dot has the hue of the head with the largest weight; zoom in for a stripe for each."),
    );
  }

  /** Whether a dot has nothing because its row or its column has no partner. */
  private isAlone(grid: Grid, r: number, c: number): boolean {
    const { hatched } = this.options;
    if (!hatched) return false;
    const I = grid.i0 + Math.floor((r * (grid.i1 - grid.i0)) / grid.R);
    return hatched.row(I) || hatched.column(grid.j0 + Math.floor((c * (grid.j1 - grid.j0)) / grid.C));
  }

  /** The largest size in each row of dots, taken from whole rows: zooming into columns changes no colour. */
  private rowEnds(grid: Grid): Float32Array {
    const { cells } = this.options;
    const ends = new Float32Array(grid.R);
    const line = new Float32Array(cells.columns.n);
    const zoomed = grid.j1 - grid.j0 < cells.columns.n;
    for (let r = 0; r < grid.R; r++) {
      let top = 0;
      for (let c = 0; c < grid.C; c++) top = Math.max(top, Math.abs(grid.values[r * grid.C + c]) || 0);
      if (zoomed) {
        cells.row(grid.i0 + Math.floor((r * (grid.i1 - grid.i0)) / grid.R), 0, cells.columns.n, line);
        for (const x of line) if (Math.abs(x) > top) top = Math.abs(x);
      }
      ends[r] = top || 1;
    }
    return ends;
  }

  /** Numbers into the cells, where there is room for them. */
  private write(grid: Grid, ramp: Ramp, ends: Float32Array | null): void {
    this.over.querySelector(".numbers")?.remove();
    const { palette } = this.options;
    const [w, t] = [this.width / grid.C, this.height / grid.R];
    const single = grid.i1 - grid.i0 === grid.R && grid.j1 - grid.j0 === grid.C;
    if (palette || !single || w < WRITTEN || t < HIGH || grid.R * grid.C > NUMBERS) return;
    const group = s("g", { class: "numbers" });
    const all = Array.from(grid.values, (x) => (x === x ? this.short(x, ramp.most) : ""));
    const longest = all.reduce((most, said) => Math.max(most, said.length), 1);
    // As large as there is room for the longest. Where the smallest have none, no cell has a number: some alone would
    // look like all there are.
    const size = Math.max(SMALL, Math.min(LARGE, w / 5, t / 3, w / (DIGIT * (longest + 1))));
    if (longest * DIGIT * size >= w) return;
    group.style.setProperty("--figure", `${size.toFixed(1)}px`);
    grid.values.forEach((x, n) => {
      if (x !== x) return;
      const [r, c] = [Math.floor(n / grid.C), n % grid.C];
      const place = { x: this.left + (c + 0.5) * w, y: this.top + (r + 0.5) * t, dy: "0.35em", "text-anchor": "middle" };
      const fill = legible(ramp.colour(x, ends?.[r]));
      group.append(s("text", { ...place, fill }, all[n]));
    });
    this.over.insertBefore(group, this.over.querySelector(".cursor"));
  }

  /** A number as a cell has room for it: two digits of the largest, two decimals at least, and none that does not hold. */
  private short(x: number, most: number): string {
    const said = told(this.options.cells, x);
    const decimals = most > 0.1 ? 2 : 2 - Math.ceil(Math.log10(most));
    if (/^−?\d+(\.\d+)?$/.test(said) && (said.split(".")[1] ?? "").length <= decimals) return said;
    // One that is too small is said to be less than half a unit of what holds: there is room for zeros only.
    const holds = /^[<>]/.test(said) ? Math.min(decimals, said.length - said.indexOf(".") - 2) : decimals;
    const rounded = x.toFixed(holds);
    return (Number(rounded) ? rounded : (0).toFixed(holds)).replace("-", "−");
  }

  /** Room above for the words of the columns: level where they are short, else slanted or upright. */
  private gutter(w: Window, size: number): number {
    const { step, at } = ticks(w.j0, w.j1, size);
    const longest = at.reduce((most, J) => Math.max(most, Math.min(14, this.name("columns", J, step).length)), 0);
    this.angle = longest * 7 < size * step ? 0 : size * step >= 17 ? -45 : -90;
    return this.angle === 0 ? LOW : Math.min(TOP, LOW + longest * (this.angle === -45 ? 4.9 : 6.4));
  }

  private labels(): void {
    const { line, axes = ["looks", "is looked at"], hatched } = this.options;
    const w = this.window;
    const parts: Node[] = [];
    const [cw, ch] = [this.width / (w.j1 - w.j0), this.height / (w.i1 - w.i0)];
    const across = ticks(w.j0, w.j1, cw);
    for (const J of across.at) {
      const x = this.x(J) + cw / 2;
      const text = this.name("columns", J, across.step);
      const { angle } = this;
      parts.push(
        tick(x, this.top - 7, cut(text, 14), {
          "text-anchor": angle ? "start" : "middle",
          transform: angle ? `rotate(${angle} ${x} ${this.top - 7})` : null,
          dy: angle === -90 ? "0.32em" : null,
        }),
      );
    }
    const down = ticks(w.i0, w.i1, ch);
    for (const I of down.at) {
      const text = this.name("rows", I, down.step);
      parts.push(
        tick(this.left - 8, this.y(I) + ch / 2, cut(text, 16), MIDDLE),
      );
    }
    // A name above a narrow first column hangs over the edge.
    const hangs = this.angle || !across.at.length ? 0 : this.name("columns", across.at[0], across.step).length * 3.2 - cw / 2;
    const corner = this.left - Math.max(8, hangs + 4);
    const lift = ch < SHORT ? 6 : 0; // the name of a short first row reaches up
    parts.push(
      tick(corner, this.top - 21 - lift, `${axes[1]} →`, { class: "axis" }),
      tick(corner, this.top - 7 - lift, `${axes[0]} ↓`, { class: "axis" }),
    );
    if (line) {
      for (const [u, vertical] of [
        [line.row, false],
        [line.column, true],
      ] as const) {
        const p = vertical ? this.x(u) : this.y(u);
        const end = vertical
          ? { x1: p, x2: p, y1: this.top, y2: this.top + this.height }
          : { x1: this.left, x2: this.left + this.width, y1: p, y2: p };
        parts.push(s("line", { class: "prompt", ...end }));
      }
    }
    if (hatched) parts.push(...this.hatch(hatched));
    if (this.options.palette && Math.min(cw, ch) >= RULED) parts.push(this.rules(w));
    parts.push(
      s("rect", {
        class: "frame",
        x: this.left - 0.5,
        y: this.top - 0.5,
        width: this.width + 1,
        height: this.height + 1,
      }),
    );
    this.over.replaceChildren(...parts);
    this.cursor(this.at);
  }

  /** Lines between cells of one colour, so that they can be told apart. */
  private rules(w: Window): Node {
    const down = times(w.i1 - w.i0 - 1, (n) => `M${this.left} ${this.y(w.i0 + n + 1)}h${this.width}`);
    const across = times(w.j1 - w.j0 - 1, (n) => `M${this.x(w.j0 + n + 1)} ${this.top}v${this.height}`);
    return s("path", { class: "rules", d: [...down, ...across].join("") });
  }

  /** Diagonal lines over rows and columns that have no partner. */
  private hatch(hatched: { row(u: number): boolean; column(u: number): boolean }): Node[] {
    const w = this.window;
    const bars: [number, number, number, number][] = [];
    for (let I = w.i0; I < w.i1; I++)
      if (hatched.row(I)) bars.push([this.left, this.y(I), this.width, this.y(I + 1) - this.y(I)]);
    for (let J = w.j0; J < w.j1; J++)
      if (hatched.column(J)) bars.push([this.x(J), this.top, this.x(J + 1) - this.x(J), this.height]);
    return [
      s("defs", {}, hatching("crossed", true)),
      ...bars.map(([x, y, width, height]) => s("rect", { x, y, width, height, fill: "url(#crossed)" })),
    ];
  }

  private drawLegend(): void {
    const { palette, scale, cells, hatched, what } = this.options;
    this.legend.hidden = Boolean(palette);
    if (palette || !this.ramp) return;
    const ends = cells.signed ? ["−largest of row", "0", "largest of row"] : ["0", "largest of the row"];
    const hidden = { masked: this.hides ? (this.options.nothing ?? "hidden by the mask") : "", alone: "" };
    if (hatched) hidden.alone = [...Array(cells.rows.n).keys()].some(hatched.row) ? "without a partner" : "";
    this.legend.replaceChildren(legend(what, this.ramp, hidden, scale === "row" ? ends : null));
  }

  /** What stands at a tick: the token, and where it is if not every one is named. */
  private name(side: "rows" | "columns", u: number, step: number): string {
    const text = this.options.cells[side].label(u);
    return step === 1 || text === String(u) ? text : `${cut(text, 9)} ${u}`;
  }

  private explain(): void {
    const grid = this.grid!;
    const { pool, cells } = this.options;
    const down = (grid.i1 - grid.i0) / grid.R;
    const across = (grid.j1 - grid.j0) / grid.C;
    if (down <= 1 && across <= 1) {
      this.note.replaceChildren();
      return;
    }
    // Dots of which some stand for one cell and some for two are no "1 × 1".
    const few = [down, across].some((x) => x > 1 && x < 1.95);
    const of = few ? `up to ${Math.ceil(down)} × ${Math.ceil(across)} cells` : `${number(down, 2)} × ${number(across, 2)} cells`;
    if (this.options.palette) {
      this.note.textContent = `A dot stands for ${of} and has the colour of the last kind among them.`;
      return;
    }
    const so =
      grid.done < grid.passes
        ? ` So far from ${Math.max(1, grid.done)} of ${grid.passes} rows each; the rest is being read.`
        : "";
    const which = pool === "max" ? (cells.signed ? "the largest in size" : "the largest") : "the mean";
    this.note.textContent = `A dot shows ${which} of ${of}.${so} Zoom in for single cells; the sentence above always has the exact value.`;
  }

  private drawTools(): void {
    const { pool, cells } = this.options;
    const w = this.window;
    const zoomed = w.i1 - w.i0 < cells.rows.n || w.j1 - w.j0 < cells.columns.n;
    const parts: Node[] = [];
    if (this.options.zoomed) {
      parts.push(
        button("+", () => this.gestures.zoom(0.5), { "aria-label": "Zoom in", title: "Zoom in (+)" }),
        button("−", () => this.gestures.zoom(2), {
          "aria-label": "Zoom out",
          title: "Zoom out (−)",
          disabled: !zoomed,
        }),
        button("Whole", () => this.options.zoomed!(""), {
          title: "Show the whole matrix (0)",
          disabled: !zoomed,
        }),
      );
    }
    if (this.options.pooling && (w.i1 - w.i0 > this.height || w.j1 - w.j0 > this.width)) {
      parts.push(
        select(
          "a dot shows",
          [
            ["max", "the largest"],
            ["mean", "the mean"],
          ],
          pool,
          (p: Pool) => this.options.pooling!(p),
        ),
      );
    }
    replace(this.tools, ...parts);
  }
}

/** Places along an axis that get a name: each where there is room, else every second, fifth, tenth … */
function ticks(from: number, to: number, size: number): { step: number; at: number[] } {
  const steps = [1, 10, 100, 1000, 10000].flatMap((p) => [p, 2 * p, 5 * p]);
  const step = size >= WORD ? 1 : steps.find((n) => n * size >= 22)!;
  return { step, at: times(to - from, (n) => from + n).filter((u) => u % step === 0) };
}

export function cut(text: string, most: number): string {
  const all = Array.from(text);
  return all.length > most ? all.slice(0, most - 1).join("") + "…" : text;
}
