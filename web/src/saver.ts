// The dialog that saves what is shown.

import { button, colour, h } from "./dom";
import { download, finding, png, sheet, svgText } from "./save";
import type { App, View } from "./view";

export interface Saver {
  readonly node: HTMLDialogElement;
  /** What is printed: empty until something prints. */
  readonly paper: HTMLElement;
  open(): void;
}

/** The drawing of a view, with its words. */
function sheetFor(view: View, at: Element): SVGSVGElement {
  const saved = view.saved();
  return sheet(saved, colour("ink", at), colour("card", at));
}

export function saver(app: App, view: () => View, signal: AbortSignal): Saver {
  const note = h("textarea", { rows: 4, placeholder: "What did you see? (for a finding)", "aria-label": "Note" });
  const node = h("dialog", { "aria-label": "Save" });

  const made = (bare = false) => {
    const saved = view().saved();
    const svg = sheet(saved, colour("ink", node), colour("card", node), bare);
    const name =
      saved.title
        .toLowerCase()
        .replace(/[^\p{L}\p{N}]+/gu, "-")
        .replace(/^-|-$/g, "")
        .slice(0, 60) || "lens";
    return { saved, svg, name };
  };
  const tried = (work: () => Promise<void> | void) => () =>
    void Promise.resolve()
      .then(work)
      .then(
        () => node.close(),
        (error) => {
          node.close();
          app.fail(error);
        },
      );
  const actions: [string, string, () => Promise<void> | void][] = [
    [
      "SVG",
      "the picture, with real text",
      () => {
        const { svg, name } = made();
        download(`${name}.svg`, svgText(svg), "image/svg+xml");
      },
    ],
    [
      "PNG",
      "the picture as dots",
      async () => {
        const { svg, name } = made();
        download(`${name}.png`, await png(svg));
      },
    ],
    [
      "CSV",
      "the numbers",
      () => {
        const { saved, name } = made();
        if (saved.csv) download(`${name}.csv`, "\ufeff" + saved.csv(), "text/csv");
      },
    ],
    [
      "PDF",
      "prints the picture on one sheet; choose “Save as PDF”",
      async () => {
        node.close();
        const { theme } = app.store.state;
        const dark = app.mode() === "dark";
        // Paper is white: what is shown is drawn in light colours for as long as it prints.
        if (dark) app.store.set({ theme: "light" });
        if (dark) await new Promise((drawn) => setTimeout(drawn, 400));
        print();
        if (dark) app.store.set({ theme });
      },
    ],
    [
      "Finding",
      "a page with picture, numbers and your note",
      () => {
        const { saved, svg, name } = made(true);
        download(`${name}.html`, finding(saved, svg, note.value.trim()), "text/html");
      },
    ],
  ];
  node.append(
    h("h2", {}, "Save what is shown"),
    note,
    h(
      "div",
      { class: "actions" },
      ...actions.flatMap(([label, what, act]) => [
        button(label, tried(act), { "aria-label": `${label}: ${what}` }),
        h("span", { class: "quiet" }, what),
      ]),
    ),
    button("Close", () => node.close()),
  );
  const paper = h("div", { class: "paper", "aria-hidden": "true" });
  addEventListener("beforeprint", () => paper.replaceChildren(sheetFor(view(), node)), { signal });
  addEventListener("afterprint", () => paper.replaceChildren(), { signal });
  return { node, paper, open: () => node.showModal() };
}
