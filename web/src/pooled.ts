// A matrix at the size of the screen. Where several cells fall on one dot, the dot shows their largest or their mean.
// Rows are read in turns: first one of each dot, so that there is a picture at once, then the rest until it is exact.

import type { Cells } from "./cells";
import type { Pool } from "./state";

export interface Window {
  i0: number;
  i1: number;
  j0: number;
  j1: number;
}

export interface Grid extends Window {
  R: number;
  C: number;
  values: Float32Array; // NaN where there is nothing
  passes: number; // rows that the highest dot stands for
  done: number; // how many of them were read
}

const FIRST = 60; // milliseconds of work before the first picture
const SLICE = 12; // and between later ones

export function pooled(
  cells: Cells,
  window: Window,
  R: number,
  C: number,
  pool: Pool,
  changed: (grid: Grid) => void,
): () => void {
  const { i0, i1, j0, j1 } = window;
  const rows = i1 - i0;
  const columns = j1 - j0;
  const top = (r: number) => i0 + Math.floor((r * rows) / R);
  const passes = Math.ceil(rows / R);
  const grid: Grid = { ...window, R, C, values: new Float32Array(R * C).fill(NaN), passes, done: 0 };
  const counts = pool === "mean" && (passes > 1 || columns > C) ? new Float32Array(R * C) : null;
  const line = new Float32Array(columns);
  const place = Int32Array.from({ length: columns }, (_, j) => Math.floor((j * C) / columns));
  let pass = 0;
  let r = 0;
  let stopped = false;

  const put = (at: number, value: number) => {
    const old = grid.values[at];
    if (old !== old) grid.values[at] = value;
    else if (counts) grid.values[at] += (value - old) / (counts[at] + 1);
    else if (Math.abs(value) > Math.abs(old)) grid.values[at] = value;
    if (counts) counts[at]++;
  };
  const work = (budget: number) => {
    const end = performance.now() + budget;
    while (pass < passes) {
      const i = top(r) + pass;
      if (i < top(r + 1)) {
        cells.row(i, j0, j1, line);
        for (let j = 0; j < columns; j++) if (line[j] === line[j]) put(r * C + place[j], line[j]);
      }
      if (++r === R) {
        r = 0;
        pass++;
      }
      if (performance.now() > end) break;
    }
    grid.done = pass;
    changed(grid);
    if (pass < passes && !stopped) setTimeout(() => !stopped && work(SLICE), 0);
  };
  work(FIRST);
  return () => {
    stopped = true;
  };
}
