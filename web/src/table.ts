// A matrix as a table, for those who read with their ears, and for copying.

import { told, type Cells } from "./cells";
import { h, times } from "./dom";
import type { Window } from "./pooled";

const MOST = 64;

export function table(cells: Cells, window: Window): HTMLElement {
  const { i0, j0 } = window;
  const i1 = Math.min(window.i1, i0 + MOST);
  const j1 = Math.min(window.j1, j0 + MOST);
  const line = new Float32Array(j1 - j0);
  const columns = times(j1 - j0, (n) => h("th", { scope: "col" }, cells.columns.label(j0 + n)));
  const body = times(i1 - i0, (n) => {
    cells.row(i0 + n, j0, j1, line);
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, cells.rows.label(i0 + n)),
      ...Array.from(line, (x) => h("td", {}, told(cells, x))),
    );
  });
  const part =
    i1 < window.i1 || j1 < window.j1
      ? ` The first ${i1 - i0} × ${j1 - j0} of those shown; zoom to choose, or save as CSV for all.`
      : "";
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "group", "aria-label": "Table of weights" },
    h(
      "table",
      {},
      h("caption", {}, `Rows are queries, columns keys.${part}`),
      h("thead", {}, h("tr", {}, h("td"), ...columns)),
      h("tbody", {}, ...body),
    ),
  );
}
