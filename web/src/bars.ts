// Bar and line charts as SVG with real text.

import { CENTRED, MIDDLE, number, s, tick, times } from "./dom";

export interface Bars {
  label: string;
  values: ArrayLike<number>;
  other?: ArrayLike<number>; // drawn as marks over the bars
  width?: number;
  height?: number;
  order?: number[];
  name?: (n: number) => string;
  least?: number; // the axis goes up to this at least
  unit?: string; // written above the axis
  below?: (n: number) => string; // what stands under bars, as far as there is room; under those with "" nothing does
}

const MARK = 11; // letters that a name under bars may have
const UNDER = 18; // room for names under bars

/** One bar an entry, up and down from zero. */
export function bars({ label, values, other, width = 640, height = 64, order, name, least = 0, unit, below }: Bars): SVGSVGElement {
  const n = values.length;
  const all = Array.from(values).concat(other ? Array.from(other) : []);
  const top = Math.max(least, ...all.filter(Number.isFinite));
  const bottom = Math.min(0, ...all.filter(Number.isFinite));
  const span = top - bottom || 1;
  const [left, room] = [52, width - 52];
  const [head, foot] = [unit ? 18 : 4, below ? UNDER : 4];
  const y = (x: number) => head + ((top - x) / span) * (height - head - foot);
  const w = room / n;
  const svg = s("svg", {
    class: "bars",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "img",
    "aria-label": label,
  });
  for (let at = 0; at < n; at++) {
    const d = order ? order[at] : at;
    const x = values[d];
    const [from, to] = [y(Math.max(x, 0)), y(Math.min(x, 0))];
    const bar = s("rect", {
      class: x < 0 ? "minus" : "plus",
      x: left + at * w,
      y: from,
      width: Math.max(0.5, w - (w > 3 ? 1 : 0)),
      height: Math.max(0.4, to - from),
    });
    bar.append(s("title", {}, `${name ? name(d) : d}: ${number(x)}${other ? ` and ${number(other[d])}` : ""}`));
    svg.append(bar);
    if (other)
      svg.append(
        s("rect", {
          class: "mark",
          x: left + at * w,
          y: y(other[d]) - 1,
          width: Math.max(1, w - 1),
          height: 2,
        }),
      );
  }
  svg.append(s("line", { class: "zero", x1: left, x2: width, y1: y(0), y2: y(0) }));
  for (const x of new Set([top, bottom].filter((e) => e !== 0))) {
    svg.append(tick(left - 6, y(x), number(x, 2), { dy: x === bottom && bottom < 0 ? "0" : "0.7em" }));
  }
  if (unit) svg.append(tick(left - 6, 11, unit, { class: "axis", "text-anchor": "start" }));
  if (below) svg.append(...under(n, below, left, w, height));
  return svg;
}

/** Names under bars: all of them, or as many as there is room for. */
function under(n: number, below: (n: number) => string, left: number, w: number, height: number): SVGElement[] {
  const names = times(n, (d) => below(d));
  const longest = Math.min(MARK, Math.max(...names.map((x) => x.length)));
  const chosen = names.includes(""); // by who names them
  const step = chosen ? 1 : Math.max(1, Math.ceil((longest * 7 + 6) / w));
  return names.flatMap((text, d) =>
    d % step || !text ? [] : [tick(left + (d + 0.5) * w, height - 4, text, CENTRED)],
  );
}

export interface Dots {
  title: string;
  groups: { name: string; points: { x: number; y: number; label: string; open: () => void; on: boolean }[] }[];
  width?: number;
  height?: number;
}

/** 1, 2 or 5 times a power of ten, no less than x. */
export function nice(x: number): number {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 2, 5, 10].map((m) => m * power).find((m) => m >= x * 0.999)!;
}

/** Points over layers, a line through the means of each group. */
export function dots({ title, groups, width = 420, height = 210 }: Dots): SVGSVGElement {
  const points = groups.flatMap((g) => g.points);
  const [left, right, top, bottom] = [46, 10, 12, 40];
  const most = Math.max(...points.map((p) => p.x), 1);
  const step = nice(Math.max(...points.map((p) => p.y), 1e-9) / 5);
  const low = Math.floor(Math.min(0, ...points.map((p) => p.y)) / step) * step;
  const high = Math.ceil(Math.max(...points.map((p) => p.y), 1e-9) / step - 1e-9) * step;
  const x = (v: number) => left + ((v + 0.5) / (most + 1)) * (width - left - right);
  const y = (v: number) => top + ((high - v) / (high - low || 1)) * (height - top - bottom);
  const svg = s("svg", {
    class: "dots",
    width,
    height,
    viewBox: `0 0 ${width} ${height}`,
    role: "group",
    "aria-label": title,
  });
  for (let v = low; v <= high + step / 2; v += step) {
    svg.append(
      s("line", { class: "rule", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
      tick(left - 6, y(v), number(v, 2), MIDDLE),
    );
  }
  const every = Math.ceil((most + 1) / 16);
  for (let l = 0; l <= most; l += every)
    svg.append(tick(x(l), height - 24, String(l), CENTRED));
  svg.append(tick(width - right, height - 6, "layer", { class: "axis" }));
  groups.forEach((group, g) => {
    const means = new Map<number, number[]>();
    for (const p of group.points) means.set(p.x, [...(means.get(p.x) ?? []), p.y]);
    const d = [...means]
      .map(
        ([l, all], n) =>
          `${n ? "L" : "M"}${x(l).toFixed(1)} ${y(all.reduce((a, b) => a + b, 0) / all.length).toFixed(1)}`,
      )
      .join("");
    svg.append(s("path", { class: `series series-${g}`, d }));
    for (const p of group.points) {
      const dot = s("circle", {
        class: `dot series-${g}${p.on ? " on" : ""}`,
        cx: x(p.x),
        cy: y(p.y),
        r: p.on ? 5 : 3.2,
        click: p.open,
      });
      dot.append(s("title", {}, p.label));
      svg.append(dot);
    }
  });
  return svg;
}
