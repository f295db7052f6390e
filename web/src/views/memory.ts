// What a memory holds: its gates along the tokens, what it answers to each key so far, and when each was erased.

import { extent, type Cells } from "../cells";
import { fixed, h, press, replace, s, select } from "../dom";
import { gates } from "../gates";
import type { Head } from "../head";
import { Matrix } from "../matrix";
import type { Memory } from "../memory";
import { copied, matrixCsv, matrixPicture, stacked } from "../save";
import type { State } from "../state";
import { tokens } from "../units";
import { changed, headPicker, headTitle, scalePicker, type App, type View } from "../view";

const MARKED = 600; // tokens up to which the end of each is marked

export type Held = "answers" | "left";

/** Rows are moments, columns the keys so far. */
export class HeldCells implements Cells {
  readonly rows;
  readonly columns;
  readonly signed = true;

  constructor(
    private readonly memory: Memory,
    head: Head,
    private readonly held: Held,
  ) {
    this.rows = tokens(head.queries);
    this.columns = tokens(head.keys);
  }

  row(I: number, from: number, to: number, out: Float32Array): void {
    this.memory[this.held](I, from, to, out);
  }

  say(x: number): string {
    return fixed(x, 2);
  }
}

const MEANS: Record<Held, string> = {
  answers:
    "Each row is a moment, each column a key. Blue, up to 1: asked with that key, the memory answers its token's value; orange: the opposite.",
  left: "Each row is a moment, each column a token. Blue, up to 1: so much of what it wrote is left where its own key reads.",
};

export function memoryView(app: App): View {
  const title = h("h2", {});
  const reads = h("p", { class: "how" });
  const says = h("p", { class: "note" });
  const controls = h("div", { class: "controls" });
  const strips = h("div", { class: "gate-strips" });
  let held: Held = "answers";
  let head: Head | null = null;
  let memory: Memory | null = null;
  let cells: HeldCells | null = null;
  let turn = 0;
  const matrix = new Matrix({
    axes: ["after", "key"],
    describe: (t, j) => (memory && cells ? sentence(memory, cells, t, j) : ""),
    hovered: (cell) => app.store.set({ hover: cell && { i: cell[0], j: cell[1] } }),
    picked: (i, j) => app.store.set({ i, j, hover: null }),
    zoomed: (zoom) => app.store.set({ zoom }),
    pooling: (pool) => app.store.set({ pool }),
  });
  const card = h("div", { class: "card" }, strips, matrix.node);
  const node = h(
    "section",
    { class: "view memory", "aria-label": "Memory" },
    h("div", { class: "title" }, title, reads),
    controls,
    says,
    card,
  );

  async function open(state: State): Promise<void> {
    const mine = ++turn;
    const seen = app.current();
    title.textContent = `${headTitle(seen, state.a, state.h)}: what its memory holds`;
    head = await seen.head(state.a, state.h);
    await head.vectors();
    if (mine !== turn) return;
    memory = head.memory;
    card.hidden = memory === null;
    replace(
      controls,
      headPicker(app),
      memory && scalePicker(app),
      memory &&
        select(
          "shown",
          [
            ["answers", "what it answers to each key"],
            ["left", "what is left of each write"],
          ],
          held,
          (chosen) => {
            held = chosen;
            void open(app.store.state).catch(app.fail);
          },
        ),
    );
    if (!memory) {
      reads.textContent = `This attention is ${seen.attention(state.a).mechanism}: it keeps keys and values and no memory that fades. Gated and delta attention have one.`;
      says.textContent = "";
      return;
    }
    reads.textContent = MEANS[held];
    says.textContent = told(memory);
    cells = new HeldCells(memory, head, held);
    matrix.update({
      nothing: "not written yet",
      what: held === "answers" ? "of its value answered" : "of its write left",
      label: `Memory of ${headTitle(seen, state.a, state.h)}: ${head.T} moments down, ${head.T} keys across. Arrow keys move.`,
      cells,
      extent: held === "left" ? { most: 1, clipped: false } : extent(cells, state.scale),
      scale: state.scale,
      side: Math.max(340, innerHeight - 480),
      pool: state.pool,
      mode: app.mode(),
      zoom: state.zoom,
    });
    drawStrips();
    mark();
    point(app.store.state);
  }

  /** The gates, over the columns that the matrix shows. */
  function drawStrips(): void {
    const { j0, j1 } = matrix.window;
    const { x, width } = matrix.frame;
    strips.replaceChildren(gates(memory!, j0, j1, x, width, (t) => `“${cells!.columns.label(t)}” (${t})`));
  }

  /** A line in each column where half of what its token wrote is gone. */
  function mark(): void {
    const over = matrix.node.querySelector("svg.over");
    const { x, y, width, height } = matrix.frame;
    const { i0, i1, j0, j1 } = matrix.window;
    if (!over || memory!.T > MARKED) return;
    const [w, t] = [width / (j1 - j0), height / (i1 - i0)];
    const lines: SVGElement[] = [];
    for (let j = j0; j < j1; j++) {
      const { token } = memory!.end(j);
      if (token < Math.max(i0, 0) || token >= i1) continue;
      const at = { x1: x + (j - j0) * w, x2: x + (j - j0 + 1) * w, y1: y + (token - i0) * t, y2: y + (token - i0) * t };
      lines.push(s("line", { class: "end-ground", ...at }), s("line", { class: "end", ...at }));
    }
    over.insertBefore(s("g", { class: "ends" }, ...lines), over.querySelector(".cursor"));
  }

  function point(state: State): void {
    const at = state.hover ?? { i: state.i, j: state.j };
    const T = head?.T ?? 0;
    matrix.cursor(memory && at.i >= 0 && at.j >= 0 && at.i < T && at.j < T ? [at.i, at.j] : null);
  }

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "a", "h", "zoom", "scale", "pool")) void open(state).catch(app.fail);
      else if (changed(state, before, "hover", "i", "j")) point(state);
    },
    redraw: () => void open(app.store.state).catch(app.fail),
    saved: () => ({
      title: title.textContent!,
      lines: [reads.textContent!, says.textContent!].filter(Boolean),
      pictures: memory ? [stacked([copied(strips.querySelector("svg")!), matrixPicture(matrix)])] : [],
      csv: memory ? () => matrixCsv(cells!, matrix.grid!) : null,
    }),
    destroy: () => matrix.destroy(),
  };
}

function told(memory: Memory): string {
  if (memory.T > MARKED) return `${press("Point at")} a cell to read when half of what its token wrote was gone.`;
  let [gone, byDecay] = [0, 0];
  for (let j = 0; j < memory.T; j++) {
    const end = memory.end(j);
    if (end.token < 0) continue;
    gone++;
    if (end.byDecay >= 0.5) byDecay++;
  }
  const why = gone ? ` (${byDecay} mostly by decay, ${gone - byDecay} mostly overwritten)` : "";
  return `A line across a column: from there on, less than half of what that token wrote is left. So it went with ${gone} of ${memory.T} tokens${why}.`;
}

/** A cell in words. */
function sentence(memory: Memory, cells: HeldCells, t: number, j: number): string {
  const name = (n: number) => `“${cells.columns.label(n)}” (${n})`;
  if (j > t) return `After ${name(t)} the memory has not met ${name(j)} yet`;
  const one = new Float32Array(1);
  memory.answers(t, j, j + 1, one);
  const answer = fixed(one[0], 2);
  memory.left(t, j, j + 1, one);
  const end = memory.end(j);
  const gone = end.token < 0 ? "never half gone" : `half gone at ${name(end.token)}, ${Math.round(100 * end.byDecay)}% by decay`;
  return `After ${name(t)}: ${name(j)} answered with ${answer} of its value; ${fixed(one[0], 2)} of its write left, ${gone}`;
}
