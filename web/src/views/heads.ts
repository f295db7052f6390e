// All heads at a glance: one small picture each, from the overviews alone.

import { Ramp, reach, tops } from "../colour";
import { button, fixed, h, number, press, replace, s, select, shown, toggle } from "../dom";
import { effect, type Attention, type FigureName, type Label } from "../format";
import { legend } from "../legend";
import { Rules } from "../rules";
import type { State } from "../state";
import { suggestions } from "../suggest";
import { term } from "../tips";
import type { Seen } from "../loader";
import { ERROR_TIP, EXACT_TIP, FIGURES, HEAD_TIP, INTERVAL_TIP, labelTip, REST_TIP, SCORE_TIP, shortened, target, TOKEN_TIP } from "../words";
import {
  changed,
  facts,
  headTitle,
  howToRead,
  labelled,
  place,
  scalePicker,
  type App,
  type Export,
  type View,
} from "../view";
import { copied, csv, stacked } from "../save";

/** How far the weights of a head are from the model's. */
function exact(error: number): (string | Node)[] {
  if (!error) return ["Weights are ", term("stored without loss", EXACT_TIP), "."];
  return [term("Largest error", ERROR_TIP), ` of a weight as shown: ${number(error, 1)}.`];
}

/** What a model has read. */
function read(seen: Seen): string {
  return seen.recording.sequences[0].grid ? "image" : "text";
}

/** What the tokens of a recording are, where that can be said in a few words. */
function pieces(seen: Seen): string {
  const [{ tokens, special, grid }] = seen.recording.sequences;
  if (grid) return ", its patches";
  const words = tokens.filter((_, t) => !special[t]);
  const single = words.filter((token) => Array.from(token).length === 1).length;
  return words.length && single >= LETTERS * words.length ? ", here single letters" : "";
}

interface Entry {
  a: number;
  h: number;
  label: Label | null;
}

const [USUAL, LARGEST] = [132, 340]; // pixels of a small picture, where there is room, and where layers are few
const [LEAST, PHONE] = [46, 640]; // pixels of a small picture at least; of a window where names of layers stand above
const LETTERS = 0.9; // of all tokens that are single letters where the page says that tokens are letters
const ROOMY = 92; // pixels of a small picture under which every label has room
const APART = 2; // times the even weight that an example has at least
const SHORT = 512; // tokens of a text that is searched for an example
const SIDES: Record<string, string> = {
  "encoder self": "encoder",
  "decoder self": "decoder",
  "decoder cross": "cross",
  "encoder cross": "cross",
};

export function headsView(app: App): View {
  const controls = h("div", { class: "controls" });
  const grid = h("div", { class: "heads" });
  const info = h("div", { class: "info card", "aria-live": "polite" });
  const intro = h("div", { class: "card intro" });
  const key = h("div", { class: "legends" });
  const node = h("section", { class: "view", "aria-label": "All heads" }, intro, h("div", { class: "set" }, controls, key), grid);
  let entries: Entry[] = [];
  let drawn = 0;
  const hiddenOf = new WeakMap<Attention, Uint8Array>();

  function score(e: Entry, key: string): number | null {
    const at = app.current().attention(e.a);
    if (key in FIGURES) return at.figures[key as FigureName]?.[e.h] ?? null;
    if (key === "effect") return e.label && e.label.label !== "mixed" ? e.label.effect : null;
    const found = e.label?.scores[key];
    return found ? effect(found) : null;
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

  /** What the page shows, and three heads to begin with. */
  function drawIntro(): void {
    const seen = app.current();
    const found = suggestions(seen);
    const go = (a: number, n: number) => app.store.set({ view: "head", a, h: n, zoom: "" });
    const small = found.map((x) => {
      const canvas = thumb(seen.attention(x.a));
      void seen
        .overview(x.a)
        .then((all) => picture(canvas, seen.attention(x.a), x.h, all, app.store.state))
        .catch(app.fail);
      return h(
        "button",
        {
          type: "button",
          class: "suggestion",
          "data-k": `suggestion ${x.a}.${x.h}`,
          click: () => go(x.a, x.h),
          pointerenter: () => show({ a: x.a, h: x.h, label: seen.label(x.a, x.h) }),
        },
        canvas,
        h(
          "span",
          {},
          h("b", {}, headTitle(seen, x.a, x.h)),
          h("span", {}, x.title),
          h("small", {}, `${x.reason} (${x.from.replace("this text", `this ${read(seen)}`)})`),
        ),
      );
    });
    const heads = seen.recording.attentions.reduce((sum, at) => sum + at.heads, 0);
    const crosses = seen.recording.attentions.some((at) => at.kind === "cross");
    const opening = press() === "Tap" ? "tap one" : "point at one to read about it, click";
    const worked = h("p", { class: "worked" });
    if (found.length) void example(found[0].a, found[0].h).then((words) => replace(worked, ...words)).catch(app.fail);
    replace(
      intro,
      h(
        "div",
        { class: "teach" },
        h("h2", {}, "What each head looks at"),
        h("p", { class: "how" }, howToRead(app)),
        h(
          "p",
          { class: "quiet" },
          "Rows and columns are the ",
          term("tokens", TOKEN_TIP),
          ` of this ${read(seen)} in order${pieces(seen)}. Below are pictures of all ${heads} `,
          term("heads", HEAD_TIP),
          ` on this ${read(seen)}${coarse(seen)}: ${opening} to open it.`,
          seen.recording.labels ? ` What heads do (labels, “other texts”) was measured on other texts, all else on this ${read(seen)}; no label: no pattern stands out` : "",
          seen.recording.labels ? (crosses ? ", or the head looks from one text at the other, which no label is about." : ".") : "",
        ),
        worked,
      ),
      h("h3", {}, "Three heads to begin with"),
      h("div", { class: "three" }, ...small),
    );
  }

  /** Says of small pictures whose cells are several tokens that they are. */
  function coarse({ recording }: Seen): string {
    const pooled = recording.attentions.some((at) => at.overview.shape[2] < recording.sequences[at.keys].tokens.length);
    return pooled ? " (a cell is several tokens)" : "";
  }

  /** The clearest weight between two tokens of a head in words, the largest of its row; none of a long text. */
  async function example(a: number, head: number): Promise<(string | Node)[]> {
    const seen = app.current();
    const [queries, keys] = [seen.queries(a), seen.keys(a)];
    const c = keys.tokens.length;
    if (queries.tokens.length > SHORT || c > SHORT || seen.attention(a).signed) return [];
    const opened = await seen.head(a, head);
    const values = new Float32Array(queries.tokens.length * c);
    const most = queries.tokens.map((_, i) => {
      const row = values.subarray(i * c, (i + 1) * c);
      opened.row(i, 0, c, row);
      return row.reduce((top, x) => (x > top ? x : top), 0);
    });
    const word = (tokens: string[], n: number) => /[\p{L}\p{N}]/u.test(tokens[n]);
    const plain = (n: number) => {
      const [i, j] = [Math.floor(n / c), n % c];
      return values[n] === most[i] && i > 0 && j > 0 && i !== j && !queries.special[i] && !keys.special[j] && word(queries.tokens, i) && word(keys.tokens, j);
    };
    // Of weights that are nearly alike a late row's: under a causal mask it sees most of the text.
    const clear = (n: number) => values[n] + (0.1 * n) / values.length;
    const best = [...values.keys()].filter(plain).reduce((top, n) => (top < 0 || clear(n) > clear(top) ? n : top), -1);
    // Of a row that is even nothing is dark beside the rest.
    const sees = best < 0 ? 0 : values.subarray(best - (best % c), best - (best % c) + c).filter((x) => x === x).length;
    if (best < 0 || values[best] * sees < APART) return [];
    const [i, j] = [Math.floor(best / c), best % c];
    const { state } = app.store;
    // The text beside shows the same row, until a token is chosen.
    if (state.a === a && state.h === head && state.i < 0 && state.j < 0 && !state.hover) app.store.set({ hover: { i, j: -1 } });
    const name = (tokens: string[], n: number) => h("b", {}, `“${shown(tokens[n], 16)}”`);
    return [
      `Read it so: in ${place(seen, a)}, head ${head}, the row of `,
      name(queries.tokens, i),
      ` is ${app.mode() === "dark" ? "bright" : "dark"} in the column of `,
      name(keys.tokens, j),
      `: it looks there with ${fixed(values[best], 2)} of its weight.`,
    ];
  }

  function drawControls(state: State): void {
    const seen = app.current();
    const labels = seen.recording.labels;
    const scores = labels?.length ? Object.keys(labels[0].scores) : [];
    const key = state.sort.replace(/^-/, "");
    const sorts = [
      ["place", "layer and head"] as const,
      ...(labels ? [["effect", "strength of label"] as const] : []),
      ...Object.entries(FIGURES).map(([k, v]) => [k, v.name] as const),
      ...scores.map((k) => [k, `score: ${k}`] as const),
    ];
    const all = seen.recording.attentions.reduce((sum, at) => sum + at.heads, 0);
    const counts = new Map<string, number>();
    labels?.forEach((l) => counts.set(l.label, (counts.get(l.label) ?? 0) + 1));
    const sides = new Set(seen.recording.attentions.map((x) => SIDES[`${x.side} ${x.kind}`]));
    const least = h("input", {
      type: "number",
      step: "0.05",
      value: state.least < 0 ? "" : state.least,
      "data-k": "least",
      "aria-label": "at least",
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
          [["", `all (${all})`], ...[...counts].sort().map(([l, n]) => [l, `${l} (${n})`] as const)],
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
    const narrow = innerWidth <= PHONE;
    const room = (grid.clientWidth || 900) - (narrow ? 0 : 72);
    // Few layers have room for larger pictures, all of them in one window.
    const high = Math.floor((innerHeight - 480) / seen.recording.attentions.length) - 30;
    const most = Math.min(LARGEST, Math.max(USUAL, high));
    // Where a layer needs several lines, all of them are as long.
    const parted = narrow ? Math.ceil((across * (LEAST + 15)) / room) : 1;
    const small = Math.max(LEAST, Math.min(most, Math.floor(room / Math.ceil(across / parted)) - 15));
    grid.style.setProperty("--thumb", `${small}px`);
    entries.forEach((e, n) => {
      const at = seen.attention(e.a);
      const canvas = thumb(at);
      const value = key === "place" ? null : score(e, key);
      const named = (label: string) => (small < ROOMY ? shortened(label) : label);
      const chip = value !== null ? (Math.abs(value) < 10 ? fixed(value, 2) : number(value, 2)) : e.label && e.label.label !== "mixed" ? named(e.label.label) : "";
      const said = [headTitle(seen, e.a, e.h), labelled(e.label), value !== null ? `${key} ${number(value, 3)}` : ""]
        .filter(Boolean)
        .join(", ");
      const name = flat ? `${at.layer}.${e.h}` : String(e.h);
      line(e.a).append(
        h(
          "button",
          {
            type: "button",
            class: e.a === state.a && e.h === state.h ? "thumb on" : "thumb",
            "data-n": n,
            "data-k": `${e.a}.${e.h}`,
            "aria-label": said,
            tabindex: e.a === state.a && e.h === state.h ? 0 : -1,
            "data-tip": e.label ? `${headTitle(seen, e.a, e.h)}: ${e.label.label === "mixed" ? "no label" : `looks at ${target(e.label.label)}`}` : null,
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
      picture(canvas, at, e.h, all, state);
    }
    grid.dataset.state = "done";
  }

  function thumb(at: Attention): HTMLCanvasElement {
    return h("canvas", { width: at.overview.shape[2], height: at.overview.shape[1], "aria-hidden": "true" });
  }

  /** Which cells of the small pictures of an attention are hidden. */
  function masked(at: Attention): Uint8Array {
    const [, r, c] = at.overview.shape;
    const { sequences } = app.current().recording;
    const [queries, keys] = [sequences[at.queries], sequences[at.keys]];
    const rules = new Rules(at.mask, queries, keys);
    const [T, S] = [queries.tokens.length, keys.tokens.length];
    return Uint8Array.from({ length: r * c }, (_, n) => {
      const [i, j] = [Math.floor(n / c), n % c];
      const from = (u: number, all: number, of: number) => Math.ceil((u * all) / of);
      return Number(rules.hides(from(i, T, r), from(i + 1, T, r), from(j, S, c), from(j + 1, S, c)));
    });
  }

  /** Draws the small picture of a head; cells that are hidden stay transparent. */
  function picture(canvas: HTMLCanvasElement, at: Attention, head: number, all: Float32Array, state: State): void {
    const [, r, c] = at.overview.shape;
    const values = all.subarray(head * r * c, (head + 1) * r * c);
    const rows = tops(values, r, c);
    const { most } = reach(rows, state.scale, at.signed);
    const ramp = new Ramp(state.scale, at.signed, app.mode(), most);
    const hidden = hiddenOf.get(at) ?? masked(at);
    hiddenOf.set(at, hidden);
    const drawn = new ImageData(c, r);
    values.forEach((x, n) => {
      if (x !== 0 || !hidden[n]) ramp.paint(x, drawn.data, 4 * n, state.scale === "row" ? rows[Math.floor(n / c)] || 1 : undefined);
    });
    canvas.getContext("2d")!.putImageData(drawn, 0, 0);
  }

  /** What colours mean in all the small pictures. */
  function drawKey(state: State): void {
    const at = app.current().attention(Math.min(state.a, app.current().recording.attentions.length - 1));
    const hiding = app.current().recording.attentions.filter((x) => masked(x).includes(1));
    const reaches = (limit: number | null, a: Attention) => limit === null || limit >= app.current().recording.sequences[a.keys].tokens.length;
    const later = hiding.every((a) => a.mask.causal && reaches(a.mask.window, a) && reaches(a.mask.chunk, a) && !a.mask.hidden);
    const hidden = later ? "hidden: a token cannot look at later ones" : "hidden by the mask";
    const ramp = new Ramp(state.scale, at.signed, app.mode(), 1);
    const end = state.scale === "row" ? "largest of the row" : "most of that head";
    const ends = state.scale === "log" ? null : at.signed ? [`−${end}`, "0", end] : ["0", end];
    const what = state.scale === "log" ? "weight, the same scale in all pictures" : "weight; each picture has a scale of its own";
    key.replaceChildren(legend(what, ramp, { masked: hiding.length ? hidden : "", alone: "" }, ends));
  }

  function show(e: Entry | undefined): void {
    if (!e) {
      info.replaceChildren();
      return;
    }
    const seen = app.current();
    const at = seen.attention(e.a);
    const figures = (Object.keys(FIGURES) as FigureName[]).filter((k) => at.figures[k]?.[e.h] != null);
    const scores = e.label
      ? Object.entries(e.label.scores).sort((x, y) => effect(y[1]) - effect(x[1]))
      : [];
    const label = e.label;
    const group = at.groups < at.heads ? `, key head ${Math.floor(e.h / (at.heads / at.groups))} of ${at.groups}` : "";
    info.replaceChildren(
      h(
        "div",
        { class: "top" },
        h("h3", {}, headTitle(seen, e.a, e.h)),
        button("Open", () => app.store.set({ view: "head", a: e.a, h: e.h, zoom: "" }), { class: "primary" }),
      ),
      h("p", { class: "does" }, does(label)),
      h("p", { class: "quiet" }, `${at.mechanism}${group}`),
      h("h4", {}, `In this ${read(seen)}`),
      facts(figures.map((k) => [term(FIGURES[k].name, FIGURES[k].tip), fixed(at.figures[k]![e.h]!, 2)])),
      label ? h("h4", {}, "In other texts") : "",
      label
        ? h(
            "p",
            {},
            term(labelled(label), labelTip(label.label), { class: "term strong" }),
            label.low === null ? "" : " ",
            label.low === null ? "" : term(`(95% interval ${fixed(label.low, 2)} … ${fixed(label.high!, 2)})`, INTERVAL_TIP),
          )
        : "",
      label?.rests && label.rests.on !== label.label
        ? h("p", {}, term("rests", REST_TIP), ` on ${target(label.rests.on).split(",")[0]}: ${fixed(label.rests.score, 2)} of its weight`)
        : "",
      scores.length ? bars(scores.slice(0, 6).map(([k, x]) => [k, x.score, x.baseline])) : "",
      h("p", { class: "quiet" }, ...exact(at.error[e.h])),
    );
  }

  /** What a head does, in a sentence. */
  function does(label: Label | null): string {
    if (!label) return "";
    if (label.label === "mixed") return "Does nothing in particular: no score stands out from even weights.";
    const score = label.scores[label.label];
    const share = score ? `: ${Math.round(100 * score.score)}% of its weight in other texts; spread evenly it would be ${Math.round(100 * score.baseline)}%` : "";
    return `Looks at ${target(label.label)}${share}.`;
  }

  function bars(rows: [string, number, number][]): Element {
    const most = Math.max(...rows.map(([, x, b]) => Math.max(x, b)), 1e-9);
    const list = h("table", { class: "scores" }, h("caption", {}, term("Scores", SCORE_TIP), "; the mark is what even weights would have"));
    for (const [name, x, base] of rows) {
      const bar = s(
        "svg",
        { viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
        s("rect", { class: "bar", width: Math.max(0, (100 * x) / most), height: 10 }),
        s("rect", { class: "mark", x: (100 * base) / most - 0.7, width: 1.4, height: 10 }),
      );
      list.append(
        h("tr", {}, h("th", { scope: "row" }, term(name, `Weight on ${target(name)}. ${SCORE_TIP}`)), h("td", { class: "n" }, fixed(x, 2)), h("td", {}, bar)),
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
    aside: info,
    update(state, before) {
      if (changed(state, before, "r", "sort", "filter", "least", "side", "scale")) {
        if (changed(state, before, "r", "scale")) drawIntro();
        drawControls(state);
        drawKey(state);
        void draw(state).catch(app.fail);
      }
      if (changed(state, before, "a", "h")) {
        const key = `${state.a}.${state.h}`;
        grid.querySelectorAll<HTMLElement>(".thumb").forEach((t) => t.classList.toggle("on", t.dataset.k === key));
      }
      if (changed(state, before, "a", "h")) show(entries.find((e) => e.a === state.a && e.h === state.h));
    },
    redraw() {
      drawIntro();
      drawKey(app.store.state);
      void draw(app.store.state).catch(app.fail);
    },
    saved: () => saved(),
  };

  function saved(): Export {
    const seen = app.current();
    const keys = Object.keys(FIGURES) as FigureName[];
    const scores = Object.keys(seen.recording.labels?.[0]?.scores ?? {});
    const table = () =>
      csv([
        ["attention", "head", "label", "effect", ...keys, ...scores.map((k) => `effect of ${k}`)],
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
    const drawing = s("svg", {
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
      drawing.append(
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
      drawing.append(
        s("text", { x: b.left - box.left, y: b.top - box.top + 14, "font-size": 12, fill: ink }, title.textContent!),
      );
    }
    const pictures = [stacked([drawing, copied(key.querySelector("svg")!)])];
    return { title: `All heads of ${seen.model}`, lines: [`Text: ${seen.text}`], pictures, csv: table };
  }
}
