// One head: tokens with arcs, and the matrix with exact values.

import { arcs } from "../arcs";
import { extent, HeadCells, told } from "../cells";
import { HUES, Ramp } from "../colour";
import { button, counted, h, number, replace, select, toggle } from "../dom";
import type { Head } from "../head";
import { Matrix, type Layer } from "../matrix";
import { laid, overlay } from "../overlay";
import { exactness } from "../memory";
import { copied, matrixCsv, matrixPicture } from "../save";
import { parts } from "../segments";
import type { State, Way } from "../state";
import { table } from "../table";
import { term } from "../tips";
import { away, changed, headPicker, headTitle, howToRead, labelled, scalePicker, type App, type Export, type View } from "../view";
import { labelTip } from "../words";

export const WHY: Record<string, string> = {
  padding: "the key is padding",
  later: "the key comes later than the query",
  window: "the key is outside the window",
  chunk: "the key is in another chunk",
  model: "a rule of the model hides it",
};

export function headView(app: App): View {
  const title = h("h2", {});
  const about = h("p", { class: "quiet" });
  const controls = h("div", { class: "controls" });
  const says = h("p", { class: "note" });
  const slider = h("input", {
    type: "range",
    min: 0,
    max: 1,
    step: 0.01,
    "aria-label": "Least weight of an arc",
    "data-k": "threshold",
  });
  const sliderValue = h("output", {});
  const threshold = h("label", { class: "field" }, h("span", {}, "arcs from"), slider, sliderValue);
  const arcsView = arcs({ over: (side, u) => hover(side, u), pick: (side, u) => pick(side, u) });
  const reads = h("p", { class: "how" });
  const numbers = h("details", { class: "card" }, h("summary", {}, "The same as a table"));
  let cells: HeadCells | null = null;
  let layers: Layer[] = [];
  let drawn = 0;

  const matrix = new Matrix({
    describe: (I, J) => (cells ? sentence(cells, I, J, layers) : ""),
    hovered: (cell) =>
      app.store.set({
        hover: cell && cells ? { i: cells.rows.from[cell[0]], j: cells.columns.from[cell[1]] } : null,
      }),
    picked: (I, J) => app.store.set({ i: cells!.rows.from[I], j: cells!.columns.from[J], fixed: true, hover: null }),
    zoomed: (zoom) => app.store.set({ zoom }),
    pooling: (pool) => app.store.set({ pool }),
  });
  const node = h(
    "section",
    { class: "view one-head", "aria-label": "One head" },
    h("div", { class: "title" }, title, about, reads),
    controls,
    says,
    h(
      "div",
      { class: "pair" },
      h("div", { class: "card grow" }, matrix.node),
      h("div", { class: "card" }, arcsView.node),
    ),
    numbers,
  );

  slider.addEventListener("input", () => app.store.set({ threshold: Number(slider.value) }));
  numbers.addEventListener("toggle", () => fillTable());

  function hover(side: Way, u: number | null): void {
    if (!cells || app.store.state.fixed) return;
    const units = side === "to" ? cells.rows : cells.columns;
    if (u !== null && (u < 0 || u >= units.n)) return;
    const { i, j, way } = app.store.state;
    if (u === null) app.store.set({ hover: null });
    else if (side === "to") app.store.set({ way: "to", hover: { i: units.from[u], j: way === "to" ? j : -1 } });
    else app.store.set({ way: "from", hover: { i: way === "from" ? i : -1, j: units.from[u] } });
  }

  function pick(side: Way, u: number): void {
    const { i, j, fixed, way } = app.store.state;
    const token = (side === "to" ? cells!.rows : cells!.columns).from[u];
    const again = fixed && way === side && token === (side === "to" ? i : j);
    const chosen = side === "to" ? { i: token } : { j: token };
    app.store.set(again ? { fixed: false, i: -1, j: -1, hover: null } : { ...chosen, way: side, fixed: true, hover: null });
  }

  function drawControls(state: State): void {
    const seen = app.current();
    const at = seen.attention(state.a);
    const merged = [...seen.queries(state.a).words, ...seen.keys(state.a).words].some(
      (w, n, all) => n > 0 && w >= 0 && w === all[n - 1],
    );
    title.textContent = headTitle(seen, state.a, state.h);
    const label = seen.label(state.a, state.h);
    const named = label && term(labelled(label), labelTip(label.label));
    replace(about, named, `${named ? " · " : ""}${at.mechanism} · ${at.name}`);
    replace(
      controls,
      headPicker(app),
      scalePicker(app),
      (at.arrays.g || at.arrays.vo) &&
        select(
          "show",
          [
            ["weight", "weights"],
            ...(at.arrays.vo ? ([["length", "what is handed on, ‖w·v·Wₒ‖"]] as const) : []),
            ...(at.arrays.g ? ([["gradient", "gradients of the loss"]] as const) : []),
          ],
          state.show,
          (show) => app.store.set({ show }),
        ),
      merged &&
        toggle(
          "words",
          state.words,
          (words) => app.store.set({ words, zoom: "" }),
          "Sub-words as one: sum over keys, mean over queries (w)",
        ),
      toggle(
        "hide sinks",
        state.sinks,
        (sinks) => app.store.set({ sinks }),
        "Without special tokens and the first one (s)",
      ),
      threshold,
      pairs(state),
      overlay(app),
      app.model &&
        at.kind === "self" &&
        button(app.model.removed(state.a, state.h) ? "Put this head back" : "Remove this head", () => {
          app.model!.remove(state.a, state.h);
          drawControls(app.store.state);
        }, { title: "Compare what the model says with and without this head, above" }),
    );
  }

  /** From which text of a pair to which. */
  function pairs(state: State): HTMLElement | null {
    const found = parts(app.current().queries(state.a), app.current().keys(state.a));
    if (!found.length) return null;
    const each = found.map(({ name, zoom }) =>
      button(name, () => app.store.set({ words: false, zoom: state.zoom === zoom ? "" : zoom }), {
        "aria-pressed": String(state.zoom === zoom),
        title: "Show only what tokens of the one text give to those of the other",
      }),
    );
    return h("div", { class: "picker", role: "group", "aria-label": "Texts of the pair" }, ...each);
  }

  async function open(state: State): Promise<void> {
    const turn = ++drawn;
    const seen = app.current();
    const head = await seen.head(state.a, state.h);
    if (head.hasGradient) await head.vectors();
    const others = await Promise.all(laid(state, seen).map(({ a, h }) => seen.head(a, h)));
    if (turn !== drawn) return;
    cells = new HeadCells(head, state);
    layers = layered(state, others);
    if (state.sinks && cells.hidden.length) {
      const names = cells.hidden
        .slice(0, 6)
        .map((j) => `“${head.keys.tokens[j]}” (${j})`)
        .join(", ");
      says.textContent =
        state.show === "gradient" && head.hasGradient
          ? ""
          : `${counted(cells.hidden.length, "key")} hidden: ${names}${cells.hidden.length > 6 ? " …" : ""}. What is left of each row is divided by its sum, so these are not the model's weights.`;
    } else says.textContent = cells.isGradient ? "" : exactness(head.attention.missed, head.head);
    reads.textContent = layers.length
      ? "Each row is a token that looks; each head has a hue, and the stronger it is the more weight on that column's token."
      : howToRead(app, cells.isGradient, cells.word === "length handed on");
    const prompt = head.queries.prompt;
    const line =
      prompt === null
        ? null
        : {
            row: cells.rows.of[prompt] ?? cells.rows.n,
            column: head.attention.kind === "self" ? (cells.columns.of[prompt] ?? cells.columns.n) : 0,
          };
    matrix.update({
      what: cells.what,
      layers: layers.length ? layers : undefined,
      extent: layers.length ? widest(layers, state) : undefined,
      label: `Weights of ${headTitle(seen, state.a, state.h)}: ${cells.rows.n} queries down, ${cells.columns.n} keys across. Arrow keys move.`,
      cells,
      scale: state.scale,
      pool: state.pool,
      mode: app.mode(),
      zoom: state.zoom,
      line,
    });
    point(app.store.state);
    fillTable();
  }

  /** This head and those laid over it, each with its hue; none where it is alone. */
  function layered(state: State, others: Head[]): Layer[] {
    if (!others.length || cells!.signed) return [];
    const heads = [{ a: state.a, h: state.h }, ...laid(state, app.current())];
    return heads.map(({ a, h }, n) => ({
      name: `${headTitle(app.current(), a, h)}: ${cells!.what}`,
      hue: HUES[app.mode()][n],
      cells: n ? new HeadCells(others[n - 1], state) : cells!,
    }));
  }

  function point(state: State): void {
    if (!cells) return;
    const at = state.hover ?? { i: state.i, j: state.j };
    const I = at.i >= 0 && at.i < cells.head.T ? cells.rows.of[at.i] : -1;
    const J = at.j >= 0 && at.j < cells.head.S ? cells.columns.of[at.j] : -1;
    matrix.cursor(I >= 0 || J >= 0 ? [I, J] : null);
    const ramp = matrix.ramp ?? new Ramp(state.scale, cells.signed, app.mode(), 1);
    const { way, fixed } = state;
    const row = fixed && way === "to" && state.i >= 0 && state.i < cells.head.T ? cells.rows.of[state.i] : I;
    const column = fixed && way === "from" && state.j >= 0 && state.j < cells.head.S ? cells.columns.of[state.j] : J;
    arcsView.draw(cells, ramp, { I: row, J: column, fixed, way }, state.threshold * ramp.most, matrix.window);
    slider.value = String(state.threshold);
    sliderValue.textContent = number(state.threshold * ramp.most, 2);
  }

  function fillTable(): void {
    if (numbers.open && cells) replace(numbers, numbers.firstElementChild!, table(cells, matrix.window));
  }

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "a", "h", "scale", "words", "sinks", "show", "zoom", "over")) drawControls(state);
      if (changed(state, before, "r", "a", "h", "scale", "pool", "words", "sinks", "show", "zoom", "over"))
        void open(state).catch(app.fail);
      else if (changed(state, before, "hover", "i", "j", "fixed", "way", "threshold")) point(state);
    },
    redraw: () => void open(app.store.state).catch(app.fail),
    saved: () => saved(app, cells!, matrix, node, layers),
    destroy: () => matrix.destroy(),
  };
}

/** A cell in words. */
export function sentence(cells: HeadCells, I: number, J: number, layers: Layer[] = []): string {
  const { head, rows, columns } = cells;
  const [i, j] = [rows.from[I], columns.from[J]];
  const single = rows.from[I + 1] - i === 1 && columns.from[J + 1] - j === 1;
  const [near, self] = [head.keys.positions[j] - head.queries.positions[i], head.attention.kind === "self"];
  const distance = self && single ? `, ${away(near)}` : "";
  const pair = `“${rows.label(I)}” (${I}) → “${columns.label(J)}” (${J})${distance}`;
  const why = single ? head.explain(i, j).reason : "visible";
  if (why !== "visible") return `${pair}: hidden, ${WHY[why]}`;
  const value = cells.cell(I, J);
  if (Number.isNaN(value)) return `${pair}: hidden`;
  const score = single && !cells.hidden.length ? head.score(i, j) : null;
  const name = cells.word;
  if (layers.length)
    return `${pair}: ${layers.map((x) => `${x.name.split(":")[0]} ${told(x.cells, (x.cells as HeadCells).cell(I, J))}`).join("; ")}`;
  return `${pair}: ${name} ${cells.say(value)}${score === null ? "" : `, score ${number(score, 3)}`}`;
}

/** The widest scale of several heads, which all of them share. */
function widest(layers: Layer[], state: State): { most: number; clipped: boolean } {
  const all = layers.map((x) => extent(x.cells, state.scale === "row" ? "head" : state.scale));
  const most = Math.max(...all.map((x) => x.most));
  return { most, clipped: all.some((x) => x.clipped && x.most === most) };
}

function saved(app: App, cells: HeadCells, matrix: Matrix, node: HTMLElement, layers: Layer[]): Export {
  const { state } = app.store;
  const seen = app.current();
  const head: Head = cells.head;
  const lines = [
    `Model: ${seen.model} (${seen.card.class}), ${head.attention.name}, ${head.attention.mechanism}`,
    `Text: ${seen.text}`,
    labelled(seen.label(state.a, state.h)) && `Label: ${labelled(seen.label(state.a, state.h))}`,
    state.i >= 0 && state.j >= 0 ? sentence(cells, cells.rows.of[state.i], cells.columns.of[state.j]) : "",
    cells.hidden.length ? "Sinks are hidden and rows divided by what is left." : "",
  ].filter(Boolean) as string[];
  const arcsSvg = node.querySelector<SVGSVGElement>("svg.arcs")!;
  return {
    title: `${headTitle(seen, state.a, state.h)} of ${seen.model}`,
    lines,
    pictures: [copied(arcsSvg), matrixPicture(matrix)],
    csv: () =>
      layers.length
        ? layers.map((x, n) => `"${x.name}"\r\n${matrixCsv(x.cells, matrix.grids[n]!)}`).join("\r\n")
        : matrixCsv(cells, matrix.grid!),
  };
}
