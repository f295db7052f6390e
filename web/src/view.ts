// What a view is, and what all of them share.

import type { Mode } from "./colour";
import { button, fixed, h, select, times } from "./dom";
import type { Label } from "./format";
import type { Seen } from "./loader";
import type { State, Store } from "./state";

export interface App {
  readonly store: Store;
  readonly seen: Seen[];
  mode(): Mode;
  /** The recording that is looked at. */
  current(): Seen;
  /** What can be asked of the model behind the page, where there is one. */
  readonly model: Asks | null;
  /** Says something that went wrong. */
  fail(error: unknown): void;
  /** Takes the lens away again, with all that listens to the page. */
  unmount(): void;
}

/** A model that answers. */
export interface Asks {
  ask(path: string, asked: object): Promise<Response>;
  /** Removes a head from the next comparison, or puts it back. */
  remove(a: number, head: number): void;
  removed(a: number, head: number): boolean;
}

/** What can be saved of a view. */
export interface Export {
  title: string;
  lines: string[]; // what it shows, in words and numbers
  pictures: SVGSVGElement[];
  csv: (() => string) | null;
}

export interface View {
  readonly node: HTMLElement;
  /** What stands beside it, under the text. */
  readonly aside?: HTMLElement;
  update(state: State, before: State | null): void;
  /** The room has changed, or the colours. */
  redraw(): void;
  saved(): Export;
  destroy?(): void;
}

/** Whether any of these is not what it was. */
export function changed(state: State, before: State | null, ...keys: (keyof State)[]): boolean {
  return before === null || keys.some((key) => state[key] !== before[key]);
}

export function place(seen: Seen, a: number): string {
  const at = seen.attention(a);
  const sides = new Set(seen.recording.attentions.map((x) => x.side));
  const kinds = new Set(seen.recording.attentions.map((x) => x.kind));
  const words = [
    sides.size > 1 ? at.side : "",
    kinds.size > 1 && at.kind === "cross" ? "cross" : "",
    `layer ${at.layer}`,
  ];
  return words.filter(Boolean).join(" ");
}

export function headTitle(seen: Seen, a: number, head: number): string {
  const words = place(seen, a);
  return `${words[0].toUpperCase()}${words.slice(1)}, head ${head}`;
}

/** The one sentence that a matrix needs. */
export function howToRead(app: App, gradient = false, length = false): string {
  const more = app.mode() === "dark" ? "brighter" : "darker";
  if (gradient) return "Each row is a token that looks; blue: more weight on that column's token would raise the loss, orange: lower it.";
  if (length) return `Each row is a token that looks; ${more} means that column's token hands on a longer vector, ‖weight · v · Wₒ‖.`;
  if (app.current().attention(app.store.state.a).signed)
    return "Each row is a token that looks; the stronger the colour, the more weight on that column's token, orange where it is negative.";
  return `Each row is a token that looks; ${more} means more weight on that column's token.`;
}

/** A distance in words: before is −, after is +, as positions are counted. */
export function away(d: number): string {
  return d === 0 ? "itself" : d < 0 ? `${-d} before` : `${d} after`;
}

/** What a head does, in a few words. */
export function labelled(label: Label | null): string {
  if (!label) return "";
  return label.label === "mixed" ? "mixed" : `${label.label}, effect ${fixed(label.effect, 2)}`;
}

/** The next head in the order in which attentions ran; −1 for the one before. */
export function neighbour(seen: Seen, a: number, head: number, step: number): { a: number; h: number } {
  const all = seen.recording.attentions;
  if (head + step >= 0 && head + step < all[a].heads) return { a, h: head + step };
  const next = (a + step + all.length) % all.length;
  return { a: next, h: step > 0 ? 0 : all[next].heads - 1 };
}

/** Choosing a head. */
export function headPicker(app: App): HTMLElement {
  const { state } = app.store;
  const seen = app.current();
  const layers = seen.recording.attentions.map((_, a) => [String(a), place(seen, a)] as const);
  const heads = times(seen.attention(state.a).heads, (n) => [String(n), `head ${n}`] as const);
  const go = (changes: Partial<State>) => app.store.set({ ...changes, zoom: "" });
  return h(
    "div",
    { class: "picker", role: "group", "aria-label": "Head" },
    button("‹", () => go(neighbour(seen, state.a, state.h, -1)), {
      "aria-label": "Previous head",
      title: "Previous head ([)",
    }),
    select("attention", layers, String(state.a), (a) =>
      go({ a: Number(a), h: Math.min(state.h, seen.attention(Number(a)).heads - 1) }),
    ),
    select("head", heads, String(state.h), (n) => go({ h: Number(n) })),
    button("›", () => go(neighbour(seen, state.a, state.h, 1)), {
      "aria-label": "Next head",
      title: "Next head (])",
    }),
  );
}

export const SCALES = [
  ["head", "a scale for the head"],
  ["row", "a scale for each row"],
  ["log", "logarithmic"],
] as const;

export function scalePicker(app: App): HTMLElement {
  return select("colours", SCALES, app.store.state.scale, (scale) => app.store.set({ scale }));
}

/** Facts as names and values. */
export function facts(pairs: [string | Node, string | Node][]): HTMLElement {
  return h(
    "dl",
    { class: "facts" },
    ...pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}
