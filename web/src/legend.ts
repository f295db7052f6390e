// What colours mean, as a drawing of its own: the same on the page and in what is saved.

import type { Ramp } from "./colour";
import { number, s, tick } from "./dom";

const [WIDTH, LEFT, STEPS] = [300, 2, 60];
const LETTER = 6.5; // pixels

export interface Hidden {
  masked: string; // what a hatched cell means; "" where there is none
  alone: string; // what a cross-hatched one means
}

/** The pattern of cells where nothing can be; `crossed`: of those without a partner. */
export function hatching(id: string, crossed = false): SVGPatternElement {
  return s(
    "pattern",
    { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    s("rect", { class: "ground", width: 6, height: 6 }),
    s("line", { class: "hatch", x1: 0, y1: 0, x2: 0, y2: 6 }),
    crossed ? s("line", { class: "hatch", x1: 0, y1: 0, x2: 6, y2: 0 }) : null,
  );
}

/** Colours that stand for kinds, with their names. */
export function kinds(named: [string, string][]): SVGSVGElement {
  const parts = named.flatMap(([fill, name], n) => [
    s("rect", { class: "outline", x: LEFT, y: 2 + 20 * n, width: 22, height: 13, fill }),
    s("text", { class: "tick", x: LEFT + 30, y: 12.5 + 20 * n }, name),
  ]);
  const [width, height] = [360, 20 * named.length];
  return s("svg", { class: "legend", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Colours" }, ...parts);
}

/** Legends of several ramps as one drawing. */
export function legends(parts: SVGSVGElement[], label: string): SVGSVGElement {
  let y = 0;
  for (const part of parts) {
    part.setAttribute("y", String(y));
    y += Number(part.getAttribute("height")) + 6;
  }
  const width = Math.max(...parts.map((p) => Number(p.getAttribute("width"))));
  return s("svg", { class: "legend", width, height: y - 6, viewBox: `0 0 ${width} ${y - 6}`, role: "img", "aria-label": label }, ...parts);
}

/** A ramp with its numbers, and what hatching means. */
export function legend(what: string, ramp: Ramp, hidden: Hidden, ends: string[] | null = null): SVGSVGElement {
  const words = ends ?? ramp.ticks().map((x) => number(x, 2));
  if (!ends && ramp.clipped) {
    words[words.length - 1] = `≥ ${words[words.length - 1]}`;
    if (ramp.signed) words[0] = `≤ ${words[0]}`;
  }
  if (!ends && ramp.scale === "log" && !ramp.signed) words[0] = `≤ ${words[0]}`;
  // Where the first of five words would reach the second, both halves go without theirs.
  if (words.length === 5 && LETTER * (words[0].length + words[1].length / 2) > WIDTH / 4 - LETTER) words[1] = words[3] = "";
  const w = WIDTH / STEPS;
  const parts: SVGElement[] = [s("text", { class: "axis", x: LEFT, y: 10 }, what)];
  for (let n = 0; n < STEPS; n++)
    parts.push(
      s("rect", { x: LEFT + n * w, y: 16, width: w + (n < STEPS - 1 ? 0.5 : 0), height: 12, fill: ramp.at(n / (STEPS - 1)) }),
    );
  parts.push(s("rect", { class: "outline", x: LEFT, y: 16, width: WIDTH, height: 12, fill: "none" }));
  words.forEach((word, n) => {
    const last = words.length - 1;
    const x = LEFT + (WIDTH * n) / (last || 1);
    parts.push(s("line", { class: "outline", x1: x, x2: x, y1: 28, y2: 31 }));
    const anchor = n === 0 ? "start" : n === last ? "end" : "middle";
    parts.push(tick(x, 42, word, { "text-anchor": anchor }));
  });
  let y = 50;
  const kinds: [string, boolean][] = [
    [hidden.masked, false],
    [hidden.alone, true],
  ];
  for (const [said, crossed] of kinds) {
    if (!said) continue;
    const id = crossed ? "crossed" : "hatched"; // alike wherever they are drawn
    parts.push(
      s("defs", {}, hatching(id, crossed)),
      s("rect", { class: "outline", x: LEFT, y, width: 22, height: 13, fill: `url(#${id})` }),
      s("text", { class: "tick", x: LEFT + 30, y: y + 10.5 }, said),
    );
    y += 20;
  }
  const height = y - (y > 50 ? 3 : 2);
  const width = WIDTH + 2 * LEFT;
  return s("svg", { class: "legend", width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `Colours: ${what}` }, ...parts);
}
