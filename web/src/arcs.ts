// Tokens in two columns, who looks left and who is looked at right, with a curve for each weight that counts.

import type { HeadCells } from "./cells";
import { CENTRED, h, s, tick, times } from "./dom";
import type { Ramp } from "./colour";
import type { Window } from "./pooled";
import type { Way } from "./state";

export interface Focus {
  I: number;
  J: number;
  fixed: boolean;
  way: Way;
}

export interface Arcs {
  readonly node: HTMLElement;
  draw(cells: HeadCells, ramp: Ramp, at: Focus, threshold: number, window: Window): void;
}

/** What is heard of a token: which side it is on, and its unit. */
export interface Heard {
  over(side: Way, unit: number | null): void;
  pick(side: Way, unit: number): void;
}

interface Curve {
  a: number; // place on the left
  b: number; // on the right
  weight: number;
  strong: boolean; // of the token that is looked at
}

const [LOW, ROW, HIGH] = [17, 21, 34]; // a token's height: where all fit by a little less, usually, where there is room
const ROOM = 640; // pixels of the box for all of them, above a note
const TOP = 30;
const WIDTH = 350;
const [LEFT, RIGHT] = [128, 222];
const MOST = 96; // tokens of a column; longer texts show those around the cursor and the strongest elsewhere
const EACH = 4; // curves a token, where none is chosen: more would be a thicket
const THICK = 16; // tokens whose curves have their full width; of more they are thinner
const LONG = 4096; // keys of a text whose curves are drawn for the chosen token only

export function arcs(heard: Heard): Arcs {
  const svg = s("svg", { class: "arcs", width: WIDTH });
  const note = h("p", { class: "note" });
  const node = h(
    "div",
    { class: "arcs-box", role: "group", "aria-label": "Tokens: those that look left, those looked at right" },
    svg,
    note,
  );
  let [left, right]: [number[], number[]] = [[], []];
  let held = ""; // the token that was scrolled to
  let pitch = ROW;
  /** The token at a point, by its place: elements are drawn anew under the mouse. */
  const at = (event: MouseEvent): [Way, number] | null => {
    const box = svg.getBoundingClientRect();
    const scale = WIDTH / (box.width || WIDTH);
    const n = Math.floor(((event.clientY - box.top) * scale - TOP) / pitch);
    const x = (event.clientX - box.left) * scale;
    const side: Way | null = x < LEFT ? "to" : x > RIGHT ? "from" : null;
    const list = side === "to" ? left : right;
    return side && n >= 0 && n < list.length ? [side, list[n]] : null;
  };
  let over = "";
  svg.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (String(found) === over) return;
    over = String(found);
    if (found) heard.over(...found);
    else heard.over("to", null);
  });
  svg.addEventListener("pointerleave", () => {
    over = "";
    heard.over("to", null);
  });
  svg.addEventListener("click", (event) => {
    const found = at(event);
    if (found) heard.pick(...found);
  });

  function draw(cells: HeadCells, ramp: Ramp, chosen: Focus, threshold: number, w: Window): void {
    const to = chosen.way === "to";
    const centre = to ? chosen.I : chosen.J;
    const focus = centre >= 0;
    const line = new Float32Array(to ? cells.columns.n : cells.rows.n);
    if (focus && to) cells.row(chosen.I, 0, cells.columns.n, line);
    if (focus && !to) cells.column(chosen.J, 0, cells.rows.n, line);
    const same = cells.head.attention.kind === "self";
    const asks = around(w.i0, w.i1, to || same ? centre : Math.max(0, chosen.I));
    const asked = around(w.j0, w.j1, !to || same ? centre : Math.max(0, chosen.J));
    left = focus && !to ? strongest(line, asks, w.i0, w.i1, threshold) : asks;
    right = focus && to ? strongest(line, asked, w.j0, w.j1, threshold) : asked;
    const fits = ROOM / Math.max(left.length, right.length);
    pitch = fits < LOW ? ROW : Math.min(HIGH, fits);
    const middle = (n: number) => TOP + pitch * (n + 0.5);
    const height = pitch * Math.max(left.length, right.length) + 34;
    svg.setAttribute("height", String(height));
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    const long = Math.max(cells.columns.n, cells.rows.n) > LONG;
    const found = curves(cells, [left, right], chosen, { line, focus, threshold, alone: chosen.fixed || long });
    const most = ramp.most || 1;
    const kept = found.slice(0, focus && chosen.fixed ? found.length : EACH * Math.max(left.length, right.length));
    const thin = Math.min(1, THICK / Math.max(left.length, right.length));
    const drawn = kept.reverse().map((c) => curve(c, [middle(c.a), middle(c.b)], c.strong && focus ? 1 : thin, most, focus && !chosen.fixed));
    const words = [
      tick(LEFT - 8, 16, "looks", { class: "axis" }),
      s("text", { class: "axis", x: RIGHT + 8, y: 16 }, "is looked at"),
      tick((LEFT + RIGHT) / 2, 16, "wider: more", { ...CENTRED, class: "axis" }),
    ];
    const share = (u: number) => (focus ? Math.min(1, (Math.abs(line[u]) || 0) / most) : 0);
    left.forEach((I, n) => {
      const on = I === chosen.I;
      const mark = { side: "to" as Way, unit: I, first: I === (to ? centre : -1), pressed: chosen.fixed && to && on };
      words.push(token(gap(left, n, I) + cells.rows.label(I), [middle(n), pitch], on, mark, to ? 0 : share(I)) as never);
    });
    right.forEach((J, n) => {
      const on = J === chosen.J;
      const mark = { side: "from" as Way, unit: J, first: J === (to ? -1 : centre), pressed: chosen.fixed && !to && on };
      words.push(token(cells.columns.label(J) + gap(right, n, J), [middle(n), pitch], on, mark, to ? share(J) : 0) as never);
    });
    const had = svg.contains(document.activeElement);
    svg.replaceChildren(...drawn, ...words);
    if (!svg.querySelector('[tabindex="0"]')) svg.querySelector("g.token")?.setAttribute("tabindex", "0");
    if (had) svg.querySelector<SVGElement>('[tabindex="0"]')?.focus();
    const now = chosen.fixed || !focus ? `${chosen.way} ${centre}` : held;
    if (now !== held && focus) reveal(middle((to ? left : right).indexOf(centre)) * ((svg.clientWidth || WIDTH) / WIDTH));
    held = now;
    const part = w.i1 - w.i0 > left.length || w.j1 - w.j0 > right.length;
    note.textContent = [
      part ? `${left.length} of ${w.i1 - w.i0} tokens${focus ? " around the chosen one, the strongest elsewhere included" : ""}.` : "",
      kept.length < found.length ? `The ${kept.length} strongest of ${found.length} curves; choose a token to see all of its own.` : "",
    ].join(" ");
  }

  /** Scrolls a token that was chosen into sight; the page stays where it is. */
  function reveal(y: number): void {
    const { scrollTop, clientHeight } = node;
    if (y < scrollTop || y > scrollTop + clientHeight) node.scrollTop = y - clientHeight / 2;
  }

  svg.addEventListener("keydown", (event) => {
    const token = (event.target as Element).closest("[data-u]");
    if (!token) return;
    const unit = Number(token.getAttribute("data-u"));
    const side = token.getAttribute("data-side") as Way;
    if (event.key === "Enter" || event.key === " ") heard.pick(side, unit);
    else if (event.key === "ArrowDown") heard.over(side, unit + 1);
    else if (event.key === "ArrowUp") heard.over(side, unit - 1);
    else return;
    event.preventDefault();
  });
  return { node, draw };
}

interface Wanted {
  line: Float32Array; // weights of the chosen token
  focus: boolean;
  threshold: number;
  alone: boolean; // only those of the chosen token
}

/** The curves between two lists of tokens, largest weight first. */
function curves(cells: HeadCells, [left, right]: [number[], number[]], chosen: Focus, wanted: Wanted): Curve[] {
  const { line, focus, threshold, alone } = wanted;
  const found: Curve[] = [];
  const put = (a: number, b: number, weight: number, strong: boolean) => {
    if (Math.abs(weight) >= threshold && weight !== 0) found.push({ a, b, weight, strong });
  };
  const to = chosen.way === "to";
  if (focus && to) right.forEach((J, b) => put(left.indexOf(chosen.I), b, line[J], true));
  if (focus && !to) left.forEach((I, a) => put(a, right.indexOf(chosen.J), line[I], true));
  if (!alone) {
    const row = new Float32Array(cells.columns.n);
    left.forEach((I, a) => {
      if (focus && to && I === chosen.I) return;
      cells.row(I, right[0], right[right.length - 1] + 1, row);
      right.forEach((J, b) => (!focus || to || J !== chosen.J) && put(a, b, row[J - right[0]], !focus));
    });
  }
  return found.sort((x, y) => Number(y.strong) - Number(x.strong) || Math.abs(y.weight) - Math.abs(x.weight));
}

/** One curve: the wider, the more weight. Its colour stays clear of the ground's, so that thin ones can be seen. */
function curve({ weight, strong }: Curve, [p, q]: [number, number], thin: number, most: number, dim: boolean): SVGPathElement {
  const size = Math.min(1, Math.abs(weight) / most);
  return s("path", {
    class: `arc ${weight < 0 ? "below" : "above"}${dim && !strong ? " dim" : ""}`,
    d: `M${LEFT} ${p}C${LEFT + 45} ${p} ${RIGHT - 45} ${q} ${RIGHT} ${q}`,
    "stroke-width": (0.5 + 4 * thin * size ** 1.5).toFixed(2),
  });
}

interface Mark {
  side: Way;
  unit: number;
  first: boolean; // the one that the keyboard reaches
  pressed: boolean;
}

function token(label: string, [middle, pitch]: [number, number], on: boolean, { side, unit, first, pressed }: Mark, strength: number): SVGGElement {
  const end = side === "to";
  const y = middle - pitch / 2;
  const wide = end ? LEFT : WIDTH - RIGHT;
  const words = { x: end ? LEFT - 8 : RIGHT + 8, y: middle, dy: "0.32em", "text-anchor": end ? "end" : "start" };
  return s(
    "g",
    {
      class: on ? "token on" : "token",
      tabindex: first ? 0 : -1,
      role: "button",
      "aria-pressed": String(pressed),
      "aria-label": `${end ? "What looks" : "What is looked at"} ${unit}: ${label}`,
      "data-u": unit,
      "data-side": side,
      "data-k": `${side} ${unit}`,
    },
    s("rect", { class: "token-box", x: end ? 0 : RIGHT, y, width: wide, height: pitch, "fill-opacity": (0.4 * strength).toFixed(3) }),
    s("text", words, label),
  );
}

/** A text's place where some are left out before it. */
function gap(list: number[], n: number, u: number): string {
  return n > 0 && list[n - 1] !== u - 1 ? `  ⋯ ${u}` : "";
}

function around(from: number, to: number, centre: number): number[] {
  const size = Math.min(to - from, MOST);
  const start = Math.max(from, Math.min(to - size, centre - Math.floor(size / 2)));
  return times(size, (k) => start + k);
}

/** Those near, and the twelve strongest elsewhere in the window, in order. */
function strongest(line: Float32Array, near: number[], from: number, to: number, threshold: number): number[] {
  if (near.length === to - from) return near;
  const inside = new Set(near);
  const far: number[] = [];
  for (let u = from; u < to; u++)
    if (!inside.has(u) && Math.abs(line[u]) >= Math.max(threshold, 1e-6)) far.push(u);
  far.sort((x, y) => Math.abs(line[y]) - Math.abs(line[x]));
  return [...near, ...far.slice(0, 12)].sort((x, y) => x - y);
}
