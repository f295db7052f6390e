// A line in a list of the largest: a name, its number, and a bar as long as its share of the largest.

import { h } from "./dom";

type Part = Node | string | null;

/** `share` is of the largest of the list, below zero where the value is; `control` is what the line does when pressed. */
export function drawRanked(control: Part, name: Part[], said: string, share: number, kind = ""): HTMLElement {
  const bar = h("i", { class: share < 0 ? "below" : "" });
  bar.style.width = `${100 * Math.abs(share)}%`;
  return h(
    "li",
    { class: kind },
    control,
    h("span", { class: "name" }, ...name),
    h("span", { class: "n" }, said),
    h("span", { class: "track", "aria-hidden": "true" }, bar),
  );
}
