// The dialog that saves what is shown.

import { button, colour, h } from "./dom";
import { download, finding, png, sheet, svgText } from "./save";
import type { App, View } from "./view";

export function saver(app: App, view: () => View): { node: HTMLDialogElement; open(): void } {
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
  return { node, open: () => node.showModal() };
}
