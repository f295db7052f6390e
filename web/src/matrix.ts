// A matrix on a canvas with labels, zoom, a cursor, and a sentence about the cell under it.

import type { Cells } from "./cells";
import { Gestures } from "./gestures";
import { Ramp, reach, rgb, type Mode } from "./colour";
import { button, colour, h, number, replace, s, select } from "./dom";
import { pooled, type Grid, type Window } from "./pooled";
import type { Pool, Scale } from "./state";

export interface Options {
  label: string;
  cells: Cells;
  scale: Scale;
  pool: Pool;
  mode: Mode;
  side?: number; // the longest side in CSS pixels
  zoom?: string;
  palette?: readonly string[]; // cells are numbers of colours
  hatched?: { row(u: number): boolean; column(u: number): boolean };
  line?: { row: number; column: number } | null; // where a prompt ends
  axes?: [string, string];
  describe?(I: number, J: number): string;
  hovered?(cell: [number, number] | null): void;
  picked?(I: number, J: number): void;
  zoomed?(zoom: string): void;
  pooling?(pool: Pool): void;
}

/** What there is before anything is shown; `update` brings the cells. */
const START: Options = { label: "", cells: null as never, scale: "head", pool: "max", mode: "light" };
const WIDEST = 46; // of one cell
const LEFT = 118;
const TOP = 92; // room for words; numbers need less
const LOW = 26;
const WORD = 11; // pixels that a word needs

export class Matrix {
  readonly node: HTMLElement;
  grid: Grid | null = null;
  ramp: Ramp | null = null;
  picture: ImageData | null = null; // a dot each
  readonly canvas = h("canvas", { "aria-hidden": "true" });
  private readonly over = s("svg", { class: "over", "aria-hidden": "true" });
  readonly stage = h("div", { class: "stage" });
  private readonly readout = h("p", { class: "readout", role: "status", "aria-live": "polite" });
  private readonly note = h("p", { class: "note" });
  private readonly legend = h("div", { class: "legend" });
  private readonly gestures: Gestures;
  private readonly tools = h("div", { class: "tools" });
  private stop: () => void = () => undefined;
  at: [number, number] | null = null;
  private width = 0;
  private height = 0;
  private drawn = 0;
  private top = TOP;
  private angle = 0; // of the words above
  private hides = false; // some cells have nothing

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
    const room = Math.max(200, (this.node.clientWidth || 640) - LEFT - 8);
    const side = this.options.side ?? Math.max(360, Math.min(760, innerHeight - 360));
    const size = Math.min(WIDEST, room / columns, side / rows);
    this.width = Math.round(Math.min(room, Math.max(columns * size, 160)));
    this.height = Math.round(Math.min(side, Math.max(rows * size, rows === 1 ? size : 100)));
    this.top = this.gutter(w, this.width / columns);
    this.over.setAttribute("width", String(LEFT + this.width + 8));
    this.over.setAttribute("height", String(this.top + this.height + 4));
    this.canvas.style.left = `${LEFT}px`;
    this.canvas.style.top = `${this.top}px`;
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.dataset.state = "working";
    this.labels();
    this.drawTools();
    this.stop = pooled(cells, w, Math.min(rows, this.height), Math.min(columns, this.width), pool, (grid) => {
      this.grid = grid;
      const last = grid.done === grid.passes;
      const now = performance.now();
      if (!last && grid.done > 0 && now - this.drawn < 120) return;
      this.drawn = now;
      this.paint(grid);
      this.canvas.dataset.state = last ? "done" : "refining";
      this.explain();
    });
  }

  /** Puts the cursor on a cell, or takes it away. */
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
    const inside = I >= w.i0 && I < w.i1 && J >= w.j0 && J < w.j1;
    if (inside) {
      const group = s(
        "g",
        { class: "cursor" },
        s("rect", { class: "band", x: LEFT, y: y0, width: this.width, height: Math.max(1, y1 - y0) }),
        s("rect", { class: "band", x: x0, y: this.top, width: Math.max(1, x1 - x0), height: this.height }),
        s("rect", { class: "cell", x: x0, y: y0, width: Math.max(3, x1 - x0), height: Math.max(3, y1 - y0) }),
      );
      this.over.append(group);
    }
    this.readout.textContent = this.options.describe?.(I, J) ?? "";
  }

  destroy(): void {
    this.stop();
  }

  private x(J: number): number {
    const w = this.window;
    return LEFT + ((J - w.j0) / (w.j1 - w.j0)) * this.width;
  }

  private y(I: number): number {
    const w = this.window;
    return this.top + ((I - w.i0) / (w.i1 - w.i0)) * this.height;
  }

  private paint(grid: Grid): void {
    const { scale, mode, palette } = this.options;
    const { most, clipped } = reach(grid.values, grid.R, grid.C, scale);
    const ramp = new Ramp(scale, this.options.cells.signed, mode, most, clipped);
    this.ramp = ramp;
    this.hides = false;
    const picture = new ImageData(grid.C, grid.R);
    const nothing = rgb(colour("page", this.node));
    for (let r = 0; r < grid.R; r++) {
      let row = 0;
      if (scale === "row")
        for (let c = 0; c < grid.C; c++) row = Math.max(row, Math.abs(grid.values[r * grid.C + c]) || 0);
      for (let c = 0; c < grid.C; c++) {
        const at = r * grid.C + c;
        const x = grid.values[at];
        if (x !== x) {
          picture.data.set([...nothing, 255], 4 * at);
          this.hides = true;
        } else if (palette) picture.data.set([...rgb(palette[x]), 255], 4 * at);
        else ramp.paint(x, picture.data, 4 * at, scale === "row" ? row || 1 : undefined);
      }
    }
    this.picture = picture;
    this.canvas.width = grid.C;
    this.canvas.height = grid.R;
    this.canvas.getContext("2d")!.putImageData(picture, 0, 0);
    this.drawLegend();
  }

  /** Room above for the words of the columns: level where they are short, else slanted or upright. */
  private gutter(w: Window, size: number): number {
    let longest = 0;
    if (size >= WORD)
      for (let J = w.j0; J < w.j1; J++)
        longest = Math.max(longest, Math.min(14, this.options.cells.columns.label(J).length));
    this.angle = longest * 7 < size ? 0 : size >= 17 ? -45 : -90;
    return this.angle === 0 ? LOW : Math.min(TOP, LOW + longest * (this.angle === -45 ? 4.9 : 6.4));
  }

  private labels(): void {
    const { cells, line, axes = ["query", "key"], hatched } = this.options;
    const w = this.window;
    const parts: Node[] = [];
    const [cw, ch] = [this.width / (w.j1 - w.j0), this.height / (w.i1 - w.i0)];
    const ticks = (from: number, to: number, size: number) => {
      const step =
        size >= WORD
          ? 1
          : [1, 2, 5]
              .flatMap((m) => [1, 10, 100, 1000, 10000].map((p) => m * p))
              .sort((a, b) => a - b)
              .find((n) => n * size >= 56)!;
      return { step, at: Array.from({ length: to - from }, (_, n) => from + n).filter((u) => u % step === 0) };
    };
    const across = ticks(w.j0, w.j1, cw);
    for (const J of across.at) {
      const x = this.x(J) + cw / 2;
      const text = across.step === 1 ? cells.columns.label(J) : String(J);
      const { angle } = this;
      parts.push(
        s(
          "text",
          {
            x,
            y: this.top - 7,
            class: "tick",
            "text-anchor": angle ? "start" : "middle",
            transform: angle ? `rotate(${angle} ${x} ${this.top - 7})` : null,
            dy: angle === -90 ? "0.32em" : null,
          },
          cut(text, 14),
        ),
      );
    }
    const down = ticks(w.i0, w.i1, ch);
    for (const I of down.at) {
      const text = down.step === 1 ? cells.rows.label(I) : String(I);
      parts.push(
        s(
          "text",
          { x: LEFT - 8, y: this.y(I) + ch / 2, dy: "0.32em", class: "tick", "text-anchor": "end" },
          cut(text, 16),
        ),
      );
    }
    parts.push(
      s("text", { class: "axis", x: LEFT - 8, y: this.top - 8, "text-anchor": "end" }, `${axes[0]} ↓  ${axes[1]} →`),
    );
    if (line) {
      for (const [u, vertical] of [
        [line.row, false],
        [line.column, true],
      ] as const) {
        const p = vertical ? this.x(u) : this.y(u);
        const end = vertical
          ? { x1: p, x2: p, y1: this.top, y2: this.top + this.height }
          : { x1: LEFT, x2: LEFT + this.width, y1: p, y2: p };
        parts.push(s("line", { class: "prompt", ...end }));
      }
    }
    if (hatched) parts.push(...this.hatch(hatched));
    parts.push(
      s("rect", {
        class: "frame",
        x: LEFT - 0.5,
        y: this.top - 0.5,
        width: this.width + 1,
        height: this.height + 1,
      }),
    );
    this.over.replaceChildren(...parts);
    this.cursor(this.at);
  }

  /** Diagonal lines over rows and columns that have no partner. */
  private hatch(hatched: { row(u: number): boolean; column(u: number): boolean }): Node[] {
    const w = this.window;
    const bars: [number, number, number, number][] = [];
    for (let I = w.i0; I < w.i1; I++)
      if (hatched.row(I)) bars.push([LEFT, this.y(I), this.width, this.y(I + 1) - this.y(I)]);
    for (let J = w.j0; J < w.j1; J++)
      if (hatched.column(J)) bars.push([this.x(J), this.top, this.x(J + 1) - this.x(J), this.height]);
    const id = `hatch-${Matrix.count++}`;
    return [
      s(
        "defs",
        {},
        s(
          "pattern",
          { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
          s("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }),
        ),
      ),
      ...bars.map(([x, y, width, height]) => s("rect", { x, y, width, height, fill: `url(#${id})` })),
    ];
  }

  private static count = 0;

  private drawLegend(): void {
    const { palette, scale, cells } = this.options;
    this.legend.hidden = Boolean(palette);
    if (palette || !this.ramp) return;
    const bar = h("canvas", { width: 256, height: 1, class: "ramp", "aria-hidden": "true" });
    const picture = new ImageData(256, 1);
    const { ramp } = this;
    for (let n = 0; n < 256; n++) {
      const share = n / 255;
      const value = cells.signed ? (2 * share - 1) * ramp.most : share * ramp.most;
      new Ramp("head", cells.signed, ramp.mode, ramp.most).paint(value, picture.data, 4 * n);
    }
    bar.getContext("2d")!.putImageData(picture, 0, 0);
    const ticks =
      scale === "row"
        ? cells.signed
          ? ["−largest of row", "0", "largest of row"]
          : ["0", "largest of the row"]
        : ramp.ticks().map((x, n, all) => (ramp.clipped && n === all.length - 1 ? "≥ " : "") + number(x, 2));
    replace(
      this.legend,
      bar,
      h("span", { class: "ends" }, ...ticks.map((t) => h("span", {}, t))),
      this.hides &&
        h(
          "span",
          { class: "nothing" },
          h("i"),
          this.options.hatched ? "hidden, or without a partner" : "hidden by the mask",
        ),
    );
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
    if (this.options.palette) {
      this.note.textContent = `A dot stands for ${number(down, 2)} × ${number(across, 2)} cells and has the colour of the last kind among them.`;
      return;
    }
    const of = `${number(down, 2)} × ${number(across, 2)} cells`;
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

export function cut(text: string, most: number): string {
  const all = Array.from(text);
  return all.length > most ? all.slice(0, most - 1).join("") + "…" : text;
}
