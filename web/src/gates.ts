// The gates along the tokens: what each leaves of the memory, and how strongly it is written.

import { rounded } from "./colour";
import { number, s, times } from "./dom";
import type { Memory } from "./memory";

const [HIGH, GAP, TOP] = [40, 16, 12]; // of a strip, between two, above the first

/** Two strips of bars over tokens from … to, as wide as the matrix below them and in its place. */
export function gates(memory: Memory, from: number, to: number, left: number, width: number, names: (t: number) => string): SVGSVGElement {
  const tokens = times(to - from, (n) => from + n);
  const strips: [string, number[], number][] = [
    ["kept, eᵃ", tokens.map((t) => memory.kept(t)), 1],
    ["written, b", tokens.map((t) => memory.strength(t)), 1],
  ];
  // Of writes that may be larger than 1, or all much smaller (Δ of Mamba-2), the largest fills the strip.
  const largest = Math.max(...strips[1][1]);
  if (largest > 1 || largest < 0.1) strips[1][2] = largest > 0 ? rounded(largest) : 1;
  const high = TOP + strips.length * (HIGH + GAP) - GAP + 8;
  const parts: SVGElement[] = [];
  const w = width / tokens.length;
  strips.forEach(([name, values, most], n) => {
    const top = TOP + n * (HIGH + GAP);
    const base = top + HIGH;
    const mark = { x: left - 8, "text-anchor": "end", dy: "0.32em" };
    parts.push(
      s("text", { class: "axis", ...mark, y: top + HIGH / 2 }, name),
      s("text", { class: "tick", ...mark, y: top }, number(most, 2)),
      s("text", { class: "tick", ...mark, y: base }, "0"),
      s("line", { class: "grid", x1: left, x2: left + width, y1: top, y2: top }),
    );
    values.forEach((x, t) => {
      const size = (HIGH * Math.max(0, x)) / most;
      const bar = s("rect", { class: "bar-0", x: left + t * w + Math.min(1, w / 8), y: base - size, width: Math.max(0.5, w - Math.min(2, w / 4)), height: Math.max(0.5, size) });
      bar.append(s("title", {}, `${names(tokens[t])}: ${name} ${number(x, 3)}`));
      parts.push(bar);
    });
    parts.push(s("line", { class: "grid", x1: left, x2: left + width, y1: base, y2: base }));
  });
  const said = "Gates along the tokens: what each leaves of the memory, and how strongly it is written";
  return s("svg", { class: "gates", width: left + width + 8, height: high, viewBox: `0 0 ${left + width + 8} ${high}`, role: "img", "aria-label": said }, ...parts);
}
