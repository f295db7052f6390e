// How attention changes over the layers: every head a dot, the mean a line.

import { dots } from "../bars";
import { h, number, press, replace, times } from "../dom";
import type { FigureName } from "../format";
import { copied, csv } from "../save";
import { FIGURES } from "../words";
import { changed, headTitle, type App, type View } from "../view";

const WORDS: Record<FigureName, string> = {
  entropy: "1: a query looks at all it sees alike; 0: at one key.",
  distance: "Positions between query and key, weighted.",
  first: "Weight on the first token, where heads rest that have nothing to say.",
  self: "Weight of tokens on themselves.",
  peak: "The largest weight of a row.",
};

export function layersView(app: App): View {
  const charts = h("div", { class: "charts" });
  const node = h(
    "section",
    { class: "view", "aria-label": "Layers" },
    h(
      "div",
      { class: "title" },
      h("h2", {}, "Over the layers"),
      h("p", { class: "quiet" }, `Means over the queries of this text. ${press()} a dot to open its head.`),
    ),
    charts,
  );

  function draw(): void {
    const seen = app.current();
    const { state } = app.store;
    const kinds = [...new Set(seen.recording.attentions.map((x) => `${x.side} ${x.kind}`))];
    const parts = (Object.keys(WORDS) as FigureName[]).map((key) => {
      const groups = kinds
        .map((kind) => ({
          name: kind,
          points: seen.recording.attentions.flatMap((at, a) => {
            const all = at.figures[key];
            if (`${at.side} ${at.kind}` !== kind || !all) return [];
            return all.flatMap((y, n) =>
              y === null
                ? []
                : [
                    {
                      x: at.layer,
                      y,
                      label: `${headTitle(seen, a, n)}: ${number(y, 3)}`,
                      on: a === state.a && n === state.h,
                      open: () => app.store.set({ view: "head", a, h: n, zoom: "" }),
                    },
                  ],
            );
          }),
        }))
        .filter((g) => g.points.length);
      if (!groups.length) return null;
      const names =
        groups.length > 1
          ? h("p", { class: "names" }, ...groups.map((g, n) => h("span", { class: `name series-${n}` }, g.name)))
          : null;
      return h(
        "figure",
        { class: "card" },
        h("h3", {}, FIGURES[key].name),
        dots({ title: FIGURES[key].name, groups }),
        names,
        h("figcaption", {}, WORDS[key]),
      );
    });
    replace(charts, ...parts);
  }

  return {
    node,
    update: (state, before) => changed(state, before, "r", "a", "h") && draw(),
    redraw: draw,
    saved() {
      const seen = app.current();
      const keys = Object.keys(WORDS) as FigureName[];
      const rows = seen.recording.attentions.flatMap((at) =>
        times(at.heads, (n) => [
          at.name,
          at.layer,
          n,
          ...keys.map((k) => at.figures[k]?.[n] ?? NaN),
        ]),
      );
      return {
        title: `Over the layers of ${seen.model}`,
        lines: keys.map((k) => `${FIGURES[k].name}: ${WORDS[k]}`),
        pictures: [...charts.querySelectorAll("svg")].map(copied),
        csv: () => csv([["attention", "layer", "head", ...keys], ...rows]),
      };
    },
  };
}
