// Tokens in two columns, queries left and keys right, with a curve for each weight that counts.

import type { HeadCells } from "./cells";
import { h, s } from "./dom";
import type { Ramp } from "./colour";

export interface Arcs {
  readonly node: HTMLElement;
  draw(cells: HeadCells, ramp: Ramp, at: { I: number; J: number; fixed: boolean }, threshold: number): void;
}

const ROW = 21;
const TOP = 30;
const WIDTH = 430;
const [LEFT, RIGHT] = [150, 280];
const MOST = 96; // tokens of a column; longer texts show those around the cursor and the strongest elsewhere
const CURVES = 4000;
const LONG = 4096; // keys of a text whose curves are drawn for the chosen query only

export function arcs(heard: { over(I: number | null): void; pick(I: number): void }): Arcs {
  const svg = s("svg", { class: "arcs", width: WIDTH });
  const note = h("p", { class: "note" });
  const node = h(
    "div",
    { class: "arcs-box", role: "group", "aria-label": "Tokens: queries left, keys right" },
    svg,
    note,
  );
  let left: number[] = [];
  /** The query at a point, by its place: elements are drawn anew under the mouse. */
  const at = (event: MouseEvent): number | null => {
    const box = svg.getBoundingClientRect();
    const scale = WIDTH / (box.width || WIDTH);
    const n = Math.floor(((event.clientY - box.top) * scale - TOP) / ROW);
    return (event.clientX - box.left) * scale < LEFT && n >= 0 && n < left.length ? left[n] : null;
  };
  let over: number | null = null;
  svg.addEventListener("pointermove", (event) => {
    const I = at(event);
    if (I === over) return;
    over = I;
    heard.over(I);
  });
  svg.addEventListener("pointerleave", () => {
    over = null;
    heard.over(null);
  });
  svg.addEventListener("click", (event) => {
    const I = at(event);
    if (I !== null) heard.pick(I);
  });

  function draw(
    cells: HeadCells,
    ramp: Ramp,
    chosen: { I: number; J: number; fixed: boolean },
    threshold: number,
  ): void {
    const line = new Float32Array(cells.columns.n);
    const focus = chosen.I >= 0;
    const centre = focus ? chosen.I : 0;
    left = around(cells.rows.n, centre);
    const same = cells.head.attention.kind === "self";
    const near = around(cells.columns.n, same ? centre : Math.max(0, chosen.J));
    if (focus) cells.row(chosen.I, 0, cells.columns.n, line);
    const right = focus ? strongest(line, near, threshold) : near;
    const height = ROW * Math.max(left.length, right.length) + 34;
    svg.setAttribute("height", String(height));
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    const mid = (n: number) => TOP + ROW * (n + 0.5);

    const curves: { d: string; w: number; fill: string; strong: boolean }[] = [];
    const long = cells.columns.n > LONG;
    const one = new Float32Array(near.length);
    left.forEach((I, n) => {
      if ((chosen.fixed || long) && I !== chosen.I) return;
      if (I !== chosen.I) cells.row(I, near[0], near[near.length - 1] + 1, one);
      right.forEach((J, m) => {
        const w = I === chosen.I ? line[J] : one[J - near[0]];
        if (!(Math.abs(w) >= threshold)) return;
        const [a, b] = [mid(n), mid(m)];
        curves.push({
          d: `M${LEFT} ${a}C${LEFT + 55} ${a} ${RIGHT - 55} ${b} ${RIGHT} ${b}`,
          w: Math.abs(w),
          fill: w < 0 ? "below" : "above",
          strong: I === chosen.I,
        });
      });
    });
    curves.sort((x, y) => y.w - x.w);
    const most = ramp.most || 1;
    const dim = focus && !chosen.fixed;
    const drawn = curves
      .slice(0, CURVES)
      .reverse()
      .map((c) =>
        s("path", {
          class: `arc ${c.fill}`,
          d: c.d,
          "stroke-opacity": ((c.strong || !dim ? 1 : 0.25) * Math.min(1, 0.08 + 0.92 * (c.w / most))).toFixed(3),
          "stroke-width": (0.6 + 2.6 * Math.min(1, c.w / most)).toFixed(2),
        }),
      );
    const words = [
      s("text", { class: "axis", x: LEFT - 8, y: 16, "text-anchor": "end" }, "query"),
      s("text", { class: "axis", x: RIGHT + 8, y: 16 }, "key"),
    ];
    const token = (
      label: string,
      x: number,
      n: number,
      end: boolean,
      extra: Record<string, string | number | (() => void)>,
      strength: number,
    ) => {
      const box = s("rect", {
        class: "token-box",
        x: end ? 0 : x,
        y: mid(n) - ROW / 2,
        width: LEFT,
        height: ROW,
        "fill-opacity": strength.toFixed(3),
      });
      return s(
        "g",
        { class: "token", ...extra },
        box,
        s("text", { x: end ? x - 8 : x + 8, y: mid(n), dy: "0.32em", "text-anchor": end ? "end" : "start" }, label),
      );
    };
    left.forEach((I, n) => {
      const pick = {
        tabindex: I === centre ? 0 : -1,
        role: "button",
        "aria-pressed": String(chosen.fixed && I === chosen.I),
        "aria-label": `Query ${I}: ${cells.rows.label(I)}`,
        "data-I": I,
        "data-k": `query ${I}`,
      };
      words.push(
        token(
          gap(left, n, I) + cells.rows.label(I),
          LEFT,
          n,
          true,
          { ...pick, class: I === chosen.I ? "token on" : "token" },
          0,
        ) as never,
      );
    });
    right.forEach((J, n) => {
      const w = focus ? Math.abs(line[J]) || 0 : 0;
      words.push(
        token(
          cells.columns.label(J) + gap(right, n, J),
          RIGHT,
          n,
          false,
          { class: J === chosen.J ? "token on" : "token" },
          0.5 * Math.min(1, w / most),
        ) as never,
      );
    });
    const had = svg.contains(document.activeElement);
    svg.replaceChildren(...drawn, ...words);
    if (had) svg.querySelector<SVGElement>('[tabindex="0"]')?.focus();
    note.textContent = [
      cells.rows.n > left.length || cells.columns.n > right.length
        ? `${left.length} of ${cells.rows.n} queries around the chosen one${focus ? ", its strongest keys elsewhere included" : ""}.`
        : "",
      curves.length > CURVES ? `The ${CURVES} strongest of ${curves.length} curves.` : "",
    ].join(" ");
  }

  svg.addEventListener("keydown", (event) => {
    const token = (event.target as Element).closest("[data-I]");
    if (!token) return;
    const I = Number(token.getAttribute("data-I"));
    if (event.key === "Enter" || event.key === " ") heard.pick(I);
    else if (event.key === "ArrowDown") heard.over(I + 1);
    else if (event.key === "ArrowUp") heard.over(I - 1);
    else return;
    event.preventDefault();
  });
  return { node, draw };
}

/** A text's place where some are left out before it. */
function gap(list: number[], n: number, u: number): string {
  return n > 0 && list[n - 1] !== u - 1 ? `  ⋯ ${u}` : "";
}

function around(n: number, centre: number): number[] {
  const size = Math.min(n, MOST);
  const start = Math.max(0, Math.min(n - size, centre - Math.floor(size / 2)));
  return Array.from({ length: size }, (_, k) => start + k);
}

/** Those near, and the twelve strongest elsewhere, in order. */
function strongest(line: Float32Array, near: number[], threshold: number): number[] {
  if (near.length === line.length) return near;
  const inside = new Set(near);
  const far: number[] = [];
  line.forEach((w, J) => {
    if (!inside.has(J) && Math.abs(w) >= Math.max(threshold, 1e-6)) far.push(J);
  });
  far.sort((x, y) => Math.abs(line[y]) - Math.abs(line[x]));
  return [...near, ...far.slice(0, 12)].sort((x, y) => x - y);
}
