// Three heads to begin with, each with a reason: by what labels say, or by simple measures of this text.

import { fixed, times } from "./dom";
import type { FigureName } from "./format";
import type { Seen } from "./loader";
import { target } from "./words";

export interface Suggestion {
  a: number;
  h: number;
  title: string;
  reason: string;
  from: "other texts" | "this text";
}

const REST = new Set(["first", "separator", "punctuation", "mixed"]); // what tells little of a head
const COUNT = 3;
const RESTS = 0.5; // weight on the first token of a head that is said to rest there
const ALONE = 0.5; // largest weight of a head that is said to look at one token at a time
const ONE = "looks at one token at a time";
const EVEN = 0.9; // evenness of a head that is said to look at everything alike

export function suggestions(seen: Seen): Suggestion[] {
  const found = labelled(seen);
  for (const more of measured(seen)) {
    if (found.length >= COUNT) break;
    if (!found.some((x) => x.a === more.a && x.h === more.h)) found.push(more);
  }
  return found.slice(0, COUNT);
}

/** The clearest head of each of three labels. */
function labelled(seen: Seen): Suggestion[] {
  const all = (seen.recording.labels ?? []).filter((l) => !REST.has(l.label) && l.attention < seen.recording.attentions.length);
  const clearest = new Map<string, (typeof all)[number]>();
  for (const label of [...all].sort((x, y) => y.effect - x.effect)) {
    if (!clearest.has(label.label)) clearest.set(label.label, label);
  }
  return [...clearest.values()].map((label) => {
    const score = label.scores[label.label];
    const share = score ? `${percent(score.score)} of its weight; spread evenly it would be ${percent(score.baseline)}` : "";
    return { a: label.attention, h: label.head, title: `looks at ${target(label.label)}`, reason: share, from: "other texts" };
  });
}

/** Heads that stand out by their figures over this text. */
function measured(seen: Seen): Suggestion[] {
  const all = seen.recording.attentions.flatMap((at, a) => times(at.heads, (h) => ({ a, h })));
  const figure = (e: { a: number; h: number }, key: FigureName) => seen.attention(e.a).figures[key]?.[e.h] ?? null;
  const peak = (e: { a: number; h: number }) => figure(e, "peak") ?? 0;
  const busy = all.filter((e) => (figure(e, "first") ?? 0) < 0.5);
  const best = (from: typeof all, key: FigureName, sign: number) =>
    from.filter((e) => figure(e, key) !== null).sort((x, y) => sign * (figure(y, key)! - figure(x, key)!))[0];
  const made = (e: { a: number; h: number } | undefined, title: (x: typeof all[number]) => string, reason: (x: typeof all[number]) => string) =>
    e ? [{ ...e, title: title(e), reason: reason(e), from: "this text" as const }] : [];
  return [
    ...made(best(busy, "peak", 1), (e) => (peak(e) >= ALONE ? ONE : "has the largest weights"), (e) => largest(peak(e))),
    ...made(best(busy, "distance", 1), () => "looks farthest", (e) => `${fixed(figure(e, "distance")!, 1)} tokens away on average`),
    ...made(best(all.filter((e) => (figure(e, "first") ?? 0) >= RESTS), "first", 1), () => "rests on the first token", (e) => `${percent(figure(e, "first")!)} of its weight is there`),
    ...made(best(all, "entropy", 1), (e) => (figure(e, "entropy")! >= EVEN ? "looks at everything alike" : "spreads its weight most"), (e) => `Evenness ${fixed(figure(e, "entropy")!, 2)}, where 1 is all alike`),
    ...made(best(all, "self", 1), () => "looks at itself most", (e) => `${percent(figure(e, "self")!)} of a token's weight is on itself`),
    ...made(best(busy, "distance", -1), () => "looks nearest", (e) => `${fixed(figure(e, "distance")!, 1)} tokens away on average`),
    ...[...all].sort((x, y) => peak(y) - peak(x)).flatMap((e) =>
      made(e, () => (peak(e) >= ALONE ? ONE : "spreads its weight"), () => largest(peak(e))),
    ),
  ];
}

function largest(peak: number): string {
  return `The largest weight of a token is ${fixed(peak, 2)} on average`;
}

function percent(x: number): string {
  return `${Math.round(100 * x)}%`;
}
