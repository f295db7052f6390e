// Mouse and keys over a matrix: pointing, choosing, moving and zooming.

import type { Matrix } from "./matrix";
import type { Window } from "./pooled";

type Cell = [number, number];

export class Gestures {
  private drag: { x: number; y: number; window: Window; moved: boolean } | null = null;

  constructor(private readonly matrix: Matrix) {
    const { stage } = matrix;
    stage.addEventListener("pointermove", (event) => {
      if (this.drag) this.pan(event);
      else matrix.options.hovered?.(this.hit(event));
    });
    stage.addEventListener("pointerleave", () => {
      this.drag = null;
      matrix.options.hovered?.(null);
    });
    stage.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.hit(event)) return;
      this.drag = { x: event.clientX, y: event.clientY, window: matrix.window, moved: false };
    });
    stage.addEventListener("pointerup", (event) => {
      const cell = this.hit(event);
      const moved = this.drag?.moved;
      this.drag = null;
      if (cell && !moved) matrix.options.picked?.(...cell);
    });
    stage.addEventListener("dblclick", (event) => this.zoom(0.5, this.hit(event)));
    stage.addEventListener("keydown", (event) => this.key(event));
    const wheel = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 0.7 : 1 / 0.7, this.hit(event));
    };
    stage.addEventListener("wheel", wheel, { passive: false });
  }

  /** Zooms around a cell, by default the cursor's or the middle. */
  zoom(factor: number, around: Cell | null = this.matrix.at): void {
    const { rows, columns } = this.matrix.options.cells;
    const w = this.matrix.window;
    const along = (from: number, to: number, n: number, at: number): Cell => {
      const size = Math.max(Math.min(2, n), Math.min(n, Math.round((to - from) * factor)));
      const share = (at + 0.5 - from) / (to - from);
      const start = Math.max(0, Math.min(n - size, Math.round(at + 0.5 - share * size)));
      return [start, start + size];
    };
    const inside = around && around[0] >= w.i0 && around[0] < w.i1 && around[1] >= w.j0 && around[1] < w.j1;
    const [I, J] = inside ? around : [(w.i0 + w.i1) >> 1, (w.j0 + w.j1) >> 1];
    const [i0, i1] = along(w.i0, w.i1, rows.n, I);
    const [j0, j1] = along(w.j0, w.j1, columns.n, J);
    const whole = i1 - i0 === rows.n && j1 - j0 === columns.n;
    this.matrix.options.zoomed?.(whole ? "" : `${i0}-${i1},${j0}-${j1}`);
  }

  /** The cell at a point. */
  private hit(event: MouseEvent): Cell | null {
    const box = this.matrix.canvas.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const y = (event.clientY - box.top) / box.height;
    if (x < 0 || y < 0 || x >= 1 || y >= 1) return null;
    const w = this.matrix.window;
    return [w.i0 + Math.floor(y * (w.i1 - w.i0)), w.j0 + Math.floor(x * (w.j1 - w.j0))];
  }

  private pan(event: PointerEvent): void {
    const { x, y, window: w } = this.drag!;
    const { rows, columns } = this.matrix.options.cells;
    const box = this.matrix.canvas.getBoundingClientRect();
    if (!this.drag!.moved && Math.hypot(event.clientX - x, event.clientY - y) < 5) return;
    this.drag!.moved = true;
    const shift = (pixels: number, room: number, from: number, to: number, n: number) => {
      const by = Math.round((-pixels / room) * (to - from));
      return Math.max(-from, Math.min(n - to, by));
    };
    const di = shift(event.clientY - y, box.height, w.i0, w.i1, rows.n);
    const dj = shift(event.clientX - x, box.width, w.j0, w.j1, columns.n);
    const zoom = `${w.i0 + di}-${w.i1 + di},${w.j0 + dj}-${w.j1 + dj}`;
    if (w.i1 - w.i0 < rows.n || w.j1 - w.j0 < columns.n) this.matrix.options.zoomed?.(zoom);
  }

  private key(event: KeyboardEvent): void {
    const { cells, picked, zoomed } = this.matrix.options;
    const [lastI, lastJ] = [cells.rows.n - 1, cells.columns.n - 1];
    const [I, J] = this.matrix.at ?? [0, 0];
    const moves: Record<string, Cell> = {
      ArrowUp: [I - 1, J],
      ArrowDown: [I + 1, J],
      ArrowLeft: [I, J - 1],
      ArrowRight: [I, J + 1],
      Home: [I, 0],
      End: [I, lastJ],
    };
    const to = moves[event.key];
    if (to && picked) picked(Math.max(0, Math.min(lastI, to[0])), Math.max(0, Math.min(lastJ, to[1])));
    else if (event.key === "+" || event.key === "=") this.zoom(0.5);
    else if (event.key === "-") this.zoom(2);
    else if (event.key === "0" && zoomed) zoomed("");
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
