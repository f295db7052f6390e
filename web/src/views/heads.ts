// All heads at a glance: one small picture each, from the overviews alone.

import { Ramp, reach } from "../colour";
import { button, h, number, replace, s, select, toggle } from "../dom";
import type { FigureName, Label } from "../format";
import type { State } from "../state";
import {
  changed,
  facts,
  figureNames,
  headTitle,
  labelled,
  place,
  scalePicker,
  type App,
  type Export,
  type View,
} from "../view";
import { csv } from "../save";

interface Entry {
  a: number;
  h: number;
  label: Label | null;
}

const SIDES: Record<string, string> = {
  "encoder self": "encoder",
  "decoder self": "decoder",
  "decoder cross": "cross",
  "encoder cross": "cross",
};

export function headsView(app: App): View {
  const controls = h("div", { class: "controls" });
  const grid = h("div", { class: "heads" });
  const info = h("aside", { class: "info card", "aria-live": "polite" });
  const node = h(
    "section",
    { class: "view", "aria-label": "All heads" },
    controls,
    h("div", { class: "split" }, grid, info),
  );
  let entries: Entry[] = [];
  let drawn = 0;

  function score(e: Entry, key: string): number | null {
    const at = app.current().attention(e.a);
    if (key in figureNames) return at.figures[key as FigureName]?.[e.h] ?? null;
    if (key === "effect") return e.label && e.label.label !== "mixed" ? e.label.effect : null;
    const found = e.label?.scores[key];
    return found ? found.score - found.baseline : null;
  }

  function collect(state: State): Entry[] {
    const seen = app.current();
    const key = state.sort.replace(/^-/, "");
    const all: Entry[] = [];
    seen.recording.attentions.forEach((at, a) => {
      if (state.side && SIDES[`${at.side} ${at.kind}`] !== state.side) return;
      for (let n = 0; n < at.heads; n++) all.push({ a, h: n, label: seen.label(a, n) });
    });
    const kept = all.filter(
      (e) =>
        (!state.filter || e.label?.label === state.filter) &&
        (key === "place" || state.least < 0 || (score(e, key) ?? -Infinity) >= state.least),
    );
    if (key !== "place") {
      const sign = state.sort.startsWith("-") ? 1 : -1;
      const rank = (e: Entry) => score(e, key) ?? sign * Infinity;
      kept.sort((x, y) => sign * (rank(x) - rank(y)) || 0);
    }
    return kept;
  }

  function drawControls(state: State): void {
    const seen = app.current();
    const labels = seen.recording.labels;
    const scores = labels?.length ? Object.keys(labels[0].scores) : [];
    const key = state.sort.replace(/^-/, "");
    const sorts = [
      ["place", "layer and head"] as const,
      ...(labels ? [["effect", "strength of label"] as const] : []),
      ...Object.entries(figureNames).map(([k, v]) => [k, v] as const),
      ...scores.map((k) => [k, `score: ${k}`] as const),
    ];
    const counts = new Map<string, number>();
    labels?.forEach((l) => counts.set(l.label, (counts.get(l.label) ?? 0) + 1));
    const sides = new Set(seen.recording.attentions.map((x) => SIDES[`${x.side} ${x.kind}`]));
    const least = h("input", {
      type: "number",
      step: "0.05",
      value: state.least < 0 ? "" : state.least,
      "data-k": "least",
      placeholder: "any",
      change: (e: Event) => {
        const text = (e.target as HTMLInputElement).value;
        app.store.set({ least: text === "" ? -1 : Number(text) });
      },
    });
    replace(
      controls,
      select("sort by", sorts, key, (sort) => app.store.set({ sort })),
      key !== "place" &&
        toggle("lowest first", state.sort.startsWith("-"), (on) => app.store.set({ sort: on ? `-${key}` : key })),
      key !== "place" && h("label", { class: "field" }, h("span", {}, "at least"), least),
      labels &&
        select(
          "label",
          [["", `all (${labels.length})`], ...[...counts].sort().map(([l, n]) => [l, `${l} (${n})`] as const)],
          state.filter,
          (filter) => app.store.set({ filter }),
        ),
      sides.size > 1 &&
        select("attention", [["", "all"], ...[...sides].map((x) => [x, x] as const)], state.side, (side) =>
          app.store.set({ side }),
        ),
      scalePicker(app),
    );
  }

  async function draw(state: State): Promise<void> {
    const turn = ++drawn;
    const seen = app.current();
    entries = collect(state);
    const flat = state.sort !== "place";
    const lines = new Map<number, HTMLElement>();
    const cells: [Entry, HTMLCanvasElement][] = [];
    const parts: HTMLElement[] = [];
    const line = (a: number) => {
      if (flat) {
        if (!lines.size) lines.set(0, h("div", { class: "line flat" }));
        return lines.get(0)!;
      }
      if (!lines.has(a)) {
        lines.set(a, h("div", { class: "line" }));
        parts.push(h("div", { class: "layer" }, h("h3", {}, place(seen, a)), lines.get(a)!));
      }
      return lines.get(a)!;
    };
    const key = state.sort.replace(/^-/, "");
    const across = Math.max(...seen.recording.attentions.map((x) => x.heads));
    const room = (grid.clientWidth || 900) - 125;
    grid.style.setProperty("--thumb", `${Math.max(48, Math.min(132, Math.floor(room / across) - 16))}px`);
    entries.forEach((e, n) => {
      const at = seen.attention(e.a);
      const canvas = h("canvas", {
        width: at.overview.shape[2],
        height: at.overview.shape[1],
        "aria-hidden": "true",
      });
      const value = key === "place" ? null : score(e, key);
      const chip = value !== null ? number(value, 2) : e.label && e.label.label !== "mixed" ? e.label.label : "";
      const said = [headTitle(seen, e.a, e.h), labelled(e.label), value !== null ? `${key} ${number(value, 3)}` : ""]
        .filter(Boolean)
        .join(", ");
      const name = flat ? `${at.layer}.${e.h}` : String(e.h);
      line(e.a).append(
        h(
          "button",
          {
            type: "button",
            class: "thumb",
            "data-n": n,
            "data-k": `${e.a}.${e.h}`,
            "aria-label": said,
            tabindex: e.a === state.a && e.h === state.h ? 0 : -1,
            click: () => app.store.set({ view: "head", a: e.a, h: e.h, zoom: "" }),
            focus: () => show(e),
            pointerenter: () => show(e),
          },
          canvas,
          h("span", {}, h("b", {}, name), chip ? h("em", {}, chip) : null),
        ),
      );
      cells.push([e, canvas]);
    });
    replace(
      grid,
      ...(flat ? [...lines.values()] : parts),
      entries.length ? null : h("p", { class: "note" }, "No head is like that. Loosen the filter."),
    );
    if (!grid.querySelector('[tabindex="0"]')) grid.querySelector(".thumb")?.setAttribute("tabindex", "0");
    show(entries.find((e) => e.a === state.a && e.h === state.h) ?? entries[0]);
    await paint(cells, state, turn);
  }

  async function paint(cells: [Entry, HTMLCanvasElement][], state: State, turn: number): Promise<void> {
    const seen = app.current();
    for (const [e, canvas] of cells) {
      const at = seen.attention(e.a);
      const all = await seen.overview(e.a);
      if (turn !== drawn) return;
      const [, r, c] = at.overview.shape;
      const values = all.subarray(e.h * r * c, (e.h + 1) * r * c);
      const { most } = reach(values, r, c, state.scale);
      const ramp = new Ramp(state.scale, at.signed, app.mode(), most);
      const picture = new ImageData(c, r);
      for (let i = 0; i < r; i++) {
        const row =
          state.scale === "row"
            ? values.subarray(i * c, (i + 1) * c).reduce((m, x) => Math.max(m, Math.abs(x)), 0) || 1
            : undefined;
        for (let j = 0; j < c; j++) ramp.paint(values[i * c + j], picture.data, 4 * (i * c + j), row);
      }
      canvas.getContext("2d")!.putImageData(picture, 0, 0);
    }
    grid.dataset.state = "done";
  }

  function show(e: Entry | undefined): void {
    if (!e) {
      info.replaceChildren();
      return;
    }
    const seen = app.current();
    const at = seen.attention(e.a);
    const figures = (Object.keys(figureNames) as FigureName[]).filter((k) => at.figures[k]?.[e.h] != null);
    const scores = e.label
      ? Object.entries(e.label.scores).sort((x, y) => y[1].score - y[1].baseline - (x[1].score - x[1].baseline))
      : [];
    info.replaceChildren(
      h("h2", {}, headTitle(seen, e.a, e.h)),
      h(
        "p",
        { class: "quiet" },
        `${at.mechanism}${at.groups < at.heads ? `, key head ${Math.floor(e.h / (at.heads / at.groups))} of ${at.groups}` : ""}`,
      ),
      e.label
        ? h(
            "p",
            {},
            h("b", {}, labelled(e.label)),
            e.label.label === "mixed" ? "" : ` 95% from ${number(e.label.low, 2)} to ${number(e.label.high, 2)}`,
          )
        : "",
      scores.length ? bars(scores.slice(0, 8).map(([k, x]) => [k, x.score, x.baseline])) : "",
      facts(figures.map((k) => [figureNames[k], number(at.figures[k]![e.h], 3)])),
      h("p", { class: "quiet" }, `Largest error of a weight as shown: ${number(at.error[e.h], 2)}.`),
      button("Open", () => app.store.set({ view: "head", a: e.a, h: e.h, zoom: "" }), { class: "primary" }),
    );
  }

  function bars(rows: [string, number, number][]): Element {
    const most = Math.max(...rows.map(([, x, b]) => Math.max(x, b)), 1e-9);
    const list = h("table", { class: "scores" }, h("caption", {}, "Scores; the mark is what even weights would have"));
    for (const [name, x, base] of rows) {
      const bar = s(
        "svg",
        { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        s("rect", { class: "bar", width: Math.max(0, (100 * x) / most), height: 10 }),
        s("rect", { class: "mark", x: (100 * base) / most - 0.7, width: 1.4, height: 10 }),
      );
      list.append(
        h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "n" }, number(x, 2)), h("td", {}, bar)),
      );
    }
    return list;
  }

  grid.addEventListener("keydown", (event) => {
    const at = (event.target as HTMLElement).closest<HTMLElement>(".thumb");
    const all = [...grid.querySelectorAll<HTMLElement>(".thumb")];
    if (!at) return;
    const n = all.indexOf(at);
    const box = at.getBoundingClientRect();
    const vertical = (down: boolean) => {
      const far = all.filter((t) =>
        down ? t.getBoundingClientRect().top > box.top + 4 : t.getBoundingClientRect().top < box.top - 4,
      );
      const distance = (t: HTMLElement) =>
        Math.abs(t.getBoundingClientRect().top - box.top) * 1000 + Math.abs(t.getBoundingClientRect().left - box.left);
      return far.sort((x, y) => distance(x) - distance(y))[0];
    };
    const to =
      { ArrowLeft: all[n - 1], ArrowRight: all[n + 1], Home: all[0], End: all[all.length - 1] }[event.key] ??
      (event.key === "ArrowUp" ? vertical(false) : event.key === "ArrowDown" ? vertical(true) : undefined);
    if (!to) return;
    event.preventDefault();
    at.tabIndex = -1;
    to.tabIndex = 0;
    to.focus();
    const e = entries[Number(to.dataset.n)];
    app.store.set({ a: e.a, h: e.h });
  });

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "sort", "filter", "least", "side", "scale")) {
        drawControls(state);
        void draw(state).catch(app.fail);
      }
    },
    redraw: () => void draw(app.store.state).catch(app.fail),
    saved: () => saved(),
  };

  function saved(): Export {
    const seen = app.current();
    const keys = Object.keys(figureNames) as FigureName[];
    const scores = Object.keys(seen.recording.labels?.[0]?.scores ?? {});
    const table = () =>
      csv([
        ["attention", "head", "label", "effect", ...keys, ...scores.map((k) => `${k} above baseline`)],
        ...entries.map((e) => [
          seen.attention(e.a).name,
          e.h,
          e.label?.label ?? "",
          e.label?.effect ?? NaN,
          ...keys.map((k) => seen.attention(e.a).figures[k]?.[e.h] ?? NaN),
          ...scores.map((k) => score(e, k) ?? NaN),
        ]),
      ]);
    const box = grid.getBoundingClientRect();
    const picture = s("svg", {
      width: Math.ceil(box.width),
      height: Math.ceil(grid.scrollHeight),
      "font-family": "system-ui, sans-serif",
    });
    const ink = getComputedStyle(grid).color;
    for (const canvas of grid.querySelectorAll("canvas")) {
      const b = canvas.getBoundingClientRect();
      const name = canvas.parentElement!.querySelector("b")!.textContent;
      const chip = canvas.parentElement!.querySelector("em")?.textContent ?? "";
      const [x, y] = [b.left - box.left, b.top - box.top];
      picture.append(
        s("image", {
          x,
          y,
          width: b.width,
          height: b.height,
          href: canvas.toDataURL(),
          preserveAspectRatio: "none",
          "image-rendering": "pixelated",
        }),
        s("text", { x, y: y + b.height + 12, "font-size": 10, fill: ink }, `${name} ${chip}`),
      );
    }
    for (const title of grid.querySelectorAll("h3")) {
      const b = title.getBoundingClientRect();
      picture.append(
        s("text", { x: b.left - box.left, y: b.top - box.top + 14, "font-size": 12, fill: ink }, title.textContent!),
      );
    }
    return { title: `All heads of ${seen.model}`, lines: [`Text: ${seen.text}`], pictures: [picture], csv: table };
  }
}
