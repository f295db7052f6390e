// Several heads in one matrix: which ones, and choosing them.

import { HUES } from "./colour";
import { button, h } from "./dom";
import type { Seen } from "./loader";
import type { State } from "./state";
import { headTitle, labelled, place, type App } from "./view";

export interface Place {
  a: number;
  h: number;
}

/** The heads laid over the one that is looked at: those of the same rows and columns, three at most. */
export function laid(state: State, seen: Seen): Place[] {
  const mine = seen.attention(state.a);
  const found = state.over.split(" ").flatMap((x) => {
    const [a, head] = x.split(".").map(Number);
    const at = seen.recording.attentions[a];
    const fits = at && head >= 0 && head < at.heads && at.queries === mine.queries && at.keys === mine.keys;
    return fits && !(a === state.a && head === state.h) ? [{ a, h: head }] : [];
  });
  return found.slice(0, HUES.light.length - 1);
}

/** Chips of the heads that are laid over this one, and a list to choose more from. */
export function overlay(app: App): HTMLElement | null {
  const { state } = app.store;
  const seen = app.current();
  const mine = seen.attention(state.a);
  if (mine.signed) return null;
  const there = laid(state, seen);
  const set = (heads: Place[]) => app.store.set({ over: heads.map((x) => `${x.a}.${x.h}`).join(" "), show: state.show === "gradient" ? "weight" : state.show });
  const chips = there.map((x, n) => {
    const name = `${place(seen, x.a)}, head ${x.h}`;
    const dot = h("i", { class: "hue", "aria-hidden": "true" });
    dot.style.background = HUES[app.mode()][n + 1];
    const chip = button("", () => set(there.filter((y) => y !== x)), { class: "chip", "aria-label": `Without ${name}`, title: "Take it away" });
    chip.append(dot, ` ${name} ×`);
    return chip;
  });
  if (there.length === HUES.light.length - 1) return h("div", { class: "picker" }, ...chips);
  const box = h("select", {
    "data-k": "overlay",
    "aria-label": "Lay another head over this one",
    change: () => {
      const [a, head] = box.value.split(".").map(Number);
      if (box.value) set([...there, { a, h: head }]);
    },
  });
  box.append(h("option", { value: "" }, "another head…"));
  seen.recording.attentions.forEach((at, a) => {
    if (at.queries !== mine.queries || at.keys !== mine.keys || at.signed) return;
    const group = h("optgroup", { label: place(seen, a) });
    for (let n = 0; n < at.heads; n++) {
      if ((a === state.a && n === state.h) || there.some((x) => x.a === a && x.h === n)) continue;
      const label = labelled(seen.label(a, n));
      group.append(h("option", { value: `${a}.${n}` }, `${headTitle(seen, a, n)}${label ? ` · ${label}` : ""}`));
    }
    box.append(group);
  });
  return h("div", { class: "picker" }, ...chips, h("label", { class: "field" }, h("span", {}, "overlay"), box));
}
