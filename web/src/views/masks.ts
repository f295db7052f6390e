// Who may see whom, and why not.

import type { Cells } from "../cells";
import { REASON_COLOURS } from "../colour";
import { fixed, h, replace } from "../dom";
import { kinds } from "../legend";
import type { Head } from "../head";
import { REASONS } from "../rules";
import { Matrix } from "../matrix";
import { copied, matrixCsv, matrixPicture, stacked } from "../save";
import type { State } from "../state";
import { tokens } from "../units";
import { changed, headPicker, headTitle, type App, type View } from "../view";
import { WHY } from "./head";

class MaskCells implements Cells {
  readonly rows;
  readonly columns;
  readonly signed = false;

  constructor(private readonly head: Head) {
    this.rows = tokens(head.queries);
    this.columns = tokens(head.keys);
  }

  row(I: number, from: number, to: number, out: Float32Array): void {
    for (let j = from; j < to; j++) out[j - from] = this.head.reason(I, j);
  }
}

export function masksView(app: App): View {
  const title = h("h2", {});
  const rules = h("p", { class: "quiet" });
  const controls = h("div", { class: "controls" });
  const key = h("div", { class: "key" });
  let head: Head | null = null;
  let cells: MaskCells | null = null;
  const matrix = new Matrix({
    describe: (I, J) => {
      const why = REASONS[head!.reason(I, J)];
      return `“${cells!.rows.label(I)}” (${I}) ${why === "visible" ? "sees" : "does not see"} “${cells!.columns.label(J)}” (${J})${why === "visible" ? "" : `: ${WHY[why]}`}`;
    },
    hovered: (cell) => app.store.set({ hover: cell && { i: cell[0], j: cell[1] } }),
    picked: (i, j) => app.store.set({ i, j, hover: null }),
    zoomed: (zoom) => app.store.set({ zoom }),
  });
  const node = h(
    "section",
    { class: "view", "aria-label": "Masks" },
    h("div", { class: "title" }, title, rules),
    controls,
    h("div", { class: "card" }, key, matrix.node),
  );

  async function open(state: State): Promise<void> {
    const seen = app.current();
    title.textContent = `Who may look at whom in ${headTitle(seen, state.a, state.h)
      .replace(/, head.*/, "")
      .toLowerCase()}`;
    replace(controls, headPicker(app));
    head = await seen.head(state.a, state.h);
    cells = new MaskCells(head);
    const palette = REASON_COLOURS[app.mode()];
    matrix.update({
      label: `Mask: ${head.T} queries down, ${head.S} keys across. Arrow keys move.`,
      cells,
      mode: app.mode(),
      palette,
      zoom: state.zoom,
    });
    const counts = counted(head);
    rules.textContent = described(head);
    const named = REASONS.flatMap((reason, n): [string, string][] => {
      const share = `${fixed(100 * counts[n], 1)}%`;
      return counts[n] ? [[palette[n], n ? `hidden: ${WHY[reason]}, ${share}` : `seen, ${share}`]] : [];
    });
    key.replaceChildren(kinds(named));
    point(state);
  }

  function point(state: State): void {
    const at = state.hover ?? (state.i >= 0 && state.j >= 0 ? { i: state.i, j: state.j } : null);
    matrix.cursor(at && head && at.i < head.T && at.j < head.S ? [at.i, at.j] : null);
  }

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "a", "h", "zoom")) void open(state).catch(app.fail);
      else point(state);
    },
    redraw: () => void open(app.store.state).catch(app.fail),
    saved: () => ({
      title: title.textContent!,
      lines: [
        described(head!),
        "0 seen; " +
          REASONS.slice(1)
            .map((r, n) => `${n + 1} ${WHY[r]}`)
            .join("; "),
      ],
      pictures: [stacked([matrixPicture(matrix), copied(key.querySelector("svg")!)])],
      csv: () => matrixCsv(cells!, matrix.grid!),
    }),
    destroy: () => matrix.destroy(),
  };
}

/** The share of each reason; of long texts from rows spread over it. */
function counted(head: Head): number[] {
  const step = Math.max(1, Math.floor((head.T * head.S) / 4e6));
  const counts = new Array<number>(REASONS.length).fill(0);
  let all = 0;
  for (let i = 0; i < head.T; i += step) for (let j = 0; j < head.S; j++, all++) counts[head.reason(i, j)]++;
  return counts.map((n) => n / all);
}

function described(head: Head): string {
  const { mask, kind } = head.attention;
  const hidden = head.keys.visible.filter((v) => !v).length;
  const rules = [
    mask.causal
      ? "causal: a query sees keys up to its own position"
      : kind === "cross"
        ? "a query sees all that was read"
        : "a query sees both sides",
    mask.window !== null ? `within a window of ${mask.window} positions` : "",
    mask.chunk !== null ? `within chunks of ${mask.chunk} positions` : "",
    hidden ? `${hidden} keys are padding` : "",
    mask.hidden ? "and the model has a rule of its own" : "",
  ];
  const said = rules.filter(Boolean).join("; ");
  return `${said[0].toUpperCase()}${said.slice(1)}.`;
}
