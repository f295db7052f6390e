// The keys.

import { button, h } from "./dom";

const KEYS: [string, string][] = [
  ["1 … 9", "the views"],
  ["arrows", "walk over heads, or over the cells of a matrix"],
  ["Enter", "open a head, fix a token"],
  ["[ and ]", "the head before, the next head"],
  ["+, −, 0", "in a matrix: nearer, farther, the whole"],
  ["x", "what the chosen token looks at, or who looks at it"],
  ["/", "find a token"],
  ["c", "colours by head, by row, logarithmic"],
  ["w", "words or sub-words"],
  ["s", "hide sinks"],
  ["t", "light, dark"],
  ["e", "save what is shown"],
  ["Esc", "let go of a token; back to all heads"],
  ["?", "this"],
];

export function help(): HTMLDialogElement {
  const dialog = h(
    "dialog",
    { "aria-label": "Keys" },
    h("h2", {}, "Keys"),
    h(
      "dl",
      { class: "keys" },
      ...KEYS.map(([key, what]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, what))),
    ),
    h(
      "p",
      { class: "quiet" },
      "In a matrix: drag to move, Ctrl and the wheel or a double click to zoom. The address of the page holds what you see: copy it to come back. Every view is a link, and the browser's Back leads to the one before.",
    ),
    button("Close", () => dialog.close(), { class: "primary" }),
  );
  return dialog;
}
