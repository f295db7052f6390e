// Two heads beside each other: two texts, two models, two heads; their difference where tokens stand for the same.

import { bars } from "../bars";
import { extent, HeadCells } from "../cells";
import type { Extent } from "../colour";
import { Difference, meanApart, type Apart } from "../difference";
import { button, counted, fixed, h, replace, select, times } from "../dom";
import { drawRanked } from "../ranks";
import { names } from "../loader";
import { cut, Matrix } from "../matrix";
import { copied, matrixCsv, matrixPicture } from "../save";
import type { State } from "../state";
import { term } from "../tips";
import { changed, headTitle, howToRead, place, scalePicker, type App, type View } from "../view";
import { sentence } from "./head";
import { WIDEST } from "./positions";

const ROWS = 256; // rows whose divergence is computed
const [RANKED, READ] = [12, 24]; // heads that are listed, and rows of each that are read for it
const LEAST = 0.01; // bits: a scale that ended lower would make rows that are all but alike look far apart
/** How much a head differs between the two sides. */
interface Ranked extends Apart {
  a: number;
  n: number;
  decimals: number; // that hold
}

const BITS =
  "Jensen–Shannon divergence of the two rows over the tokens that both sides have, each divided by its weight there. 0 bits: alike; 1 bit: nothing in common.";

/** The other side: the next recording, or the next head where there is one only. */
export function otherOf(app: App, state: State): { r: number; a: number; h: number } {
  const many = app.seen.length > 1;
  const r = state.r2 >= 0 && state.r2 < app.seen.length ? state.r2 : many ? (state.r + 1) % app.seen.length : state.r;
  const all = app.seen[r].recording.attentions;
  const a = state.a2 >= 0 && state.a2 < all.length ? state.a2 : Math.min(state.a, all.length - 1);
  const heads = all[a].heads;
  const same = r === state.r && a === state.a;
  return {
    r,
    a,
    h: state.h2 >= 0 && state.h2 < heads ? state.h2 : same ? (state.h + 1) % heads : Math.min(state.h, heads - 1),
  };
}

export function compareView(app: App): View {
  const controls = h("div", { class: "controls two" });
  const says = h("p", { class: "note" });
  const titled = [h("h3", {}), h("h3", {})];
  const apart = h("div", {});
  const reads = h("p", { class: "how" });
  const ranking = h("div", { class: "card ranking", hidden: true });
  let cells: [HeadCells, HeadCells] | null = null;
  let difference: Difference | null = null;
  let turn = 0;

  const side = (n: 0 | 1) =>
    new Matrix({
      describe: (I, J) => (cells ? sentence(cells[n], I, J) : ""),
      hovered: (cell) => link(n, cell),
      picked: (I, J) => keep(n, I, J),
    });
  const matrices = [side(0), side(1)];
  const third = new Matrix({
    describe: (I, J) => told(I, J),
    hovered: (cell) => point(cell),
    picked: (I, J) => {
      const [q, k] = [difference!.queries[I].a, difference!.keys[J].a];
      if (q && k) app.store.set({ i: q[0], j: k[0] });
      else point([I, J]);
    },
    zoomed: (zoom) => app.store.set({ zoom }),
    pooling: (pool) => app.store.set({ pool }),
  });
  const node = h(
    "section",
    { class: "view compare", "aria-label": "Compare" },
    h("div", { class: "title" }, h("h2", {}, "What differs"), reads),
    controls,
    h(
      "div",
      { class: "three-up" },
      ...matrices.map((m, n) => h("div", { class: "card" }, titled[n], m.node)),
      h("div", { class: "card" }, h("h3", {}, "Difference: right less left"), third.node, says),
    ),
    h("div", { class: "card" }, apart),
    ranking,
  );

  /** The unit of the difference that a token of a side belongs to. */
  const unit = (n: 0 | 1, which: "queries" | "keys", token: number) =>
    difference![which].findIndex((p) => {
      const span = n ? p.b : p.a;
      return span !== null && token >= span[0] && token < span[1];
    });

  function link(n: 0 | 1, cell: [number, number] | null): void {
    if (!difference) return;
    if (!cell) point(pinned(app.store.state));
    else point([unit(n, "queries", cell[0]), unit(n, "keys", cell[1])]);
  }

  function keep(n: 0 | 1, I: number, J: number): void {
    const [q, k] = [difference!.queries[unit(n, "queries", I)].a, difference!.keys[unit(n, "keys", J)].a];
    if (q && k) app.store.set({ i: q[0], j: k[0] });
  }

  function pinned(state: State): [number, number] | null {
    if (!difference || state.i < 0 || state.j < 0) return null;
    const cell: [number, number] = [unit(0, "queries", state.i), unit(0, "keys", state.j)];
    return cell[0] >= 0 && cell[1] >= 0 ? cell : null;
  }

  /** The same cell in all three. */
  function point(cell: [number, number] | null): void {
    third.cursor(cell);
    matrices.forEach((m, n) => {
      const q = cell && difference!.queries[cell[0]][n ? "b" : "a"];
      const k = cell && difference!.keys[cell[1]][n ? "b" : "a"];
      m.cursor(q && k ? [q[0], k[0]] : null);
    });
  }

  function told(I: number, J: number): string {
    const d = difference!;
    const [q, k] = [d.queries[I], d.keys[J]];
    const pair = `“${d.rows.label(I)}” → “${d.columns.label(J)}”`;
    if (!q.a || !q.b || !k.a || !k.b)
      return `${pair}: only on the ${(q.a ?? q.b) === q.a && (k.a ?? k.b) === k.a ? "left" : "right"}, so there is nothing to compare`;
    const [x, y] = d.both(I);
    const bits = d.apart(I)!.bits;
    return `${pair}: ${d.say(x[J] || 0)} left, ${d.say(y[J] || 0)} right, difference ${d.say((y[J] || 0) - (x[J] || 0))}; rows ${fixed(bits, d.decimals)} bits apart`;
  }

  function drawControls(state: State): void {
    const other = otherOf(app, state);
    const one = (n: 0 | 1) => {
      const at = n ? other : { r: state.r, a: state.a, h: state.h };
      const set = (r: number, a: number, head: number) =>
        app.store.set(n ? { r2: r, a2: a, h2: head, zoom: "" } : { r, a, h: head, zoom: "" });
      const seen = app.seen[at.r];
      const recordings = names(app.seen).map((name, r) => [String(r), name] as const);
      const slider =
        n === 1 && app.seen.length > 2
          ? h("input", {
              type: "range",
              min: 0,
              max: app.seen.length - 1,
              step: 1,
              value: other.r,
              "aria-label": "Recording on the right",
              "data-k": "recording slider",
              input: (e: Event) => set(Number((e.target as HTMLInputElement).value), other.a, other.h),
            })
          : null;
      return h(
        "div",
        { class: "controls", role: "group", "aria-label": n ? "Right" : "Left" },
        app.seen.length > 1
          ? select(n ? "right" : "left", recordings, String(at.r), (r) =>
              set(Number(r), Math.min(at.a, app.seen[Number(r)].recording.attentions.length - 1), 0),
            )
          : null,
        slider,
        select(
          n ? "right attention" : "left attention",
          seen.recording.attentions.map((_, a) => [String(a), place(seen, a)] as const),
          String(at.a),
          (a) => set(at.r, Number(a), Math.min(at.h, seen.attention(Number(a)).heads - 1)),
        ),
        select(
          n ? "right head" : "left head",
          times(seen.attention(at.a).heads, (k) => [String(k), `head ${k}`] as const),
          String(at.h),
          (k) => set(at.r, at.a, Number(k)),
        ),
      );
    };
    replace(controls, one(0), one(1), scalePicker(app));
  }

  async function open(state: State): Promise<void> {
    const mine = ++turn;
    const other = otherOf(app, state);
    const [left, right] = await Promise.all([
      app.current().head(state.a, state.h),
      app.seen[other.r].head(other.a, other.h),
    ]);
    if (mine !== turn) return;
    const plain = { words: false, sinks: false, show: "weight" as const };
    cells = [new HeadCells(left, plain), new HeadCells(right, plain)];
    const shared = widest(cells.map((c) => extent(c, state.scale)));
    reads.textContent = `${howToRead(app)} The same colours in all three; in the difference blue is more on the right, orange less.`;
    difference = new Difference(left, right);
    const called = names(app.seen);
    const titles = [{ r: state.r, a: state.a, h: state.h }, other].map(
      (at) => `${headTitle(app.seen[at.r], at.a, at.h)}${app.seen.length > 1 ? ` · ${called[at.r]}` : ""}`,
    );
    matrices.forEach((m, n) => {
      titled[n].textContent = `${n ? "Right" : "Left"}: ${titles[n]}`;
      titled[n].title = titles[n];
      m.update({
        label: `${n ? "Right" : "Left"}: ${titles[n]}`,
        what: "weight",
        cells: cells![n],
        extent: shared,
        side: Math.max(300, innerHeight - 460),
        scale: state.scale,
        mode: app.mode(),
      });
    });
    const d = difference;
    const alone = (pairs: typeof d.queries) => (u: number) => !pairs[u].a || !pairs[u].b;
    third.update({
      label: "Difference of weights, right less left",
      what: "weight on the right less weight on the left",
      cells: d,
      extent: shared,
      side: Math.max(300, innerHeight - 460),
      scale: state.scale,
      pool: state.pool,
      zoom: state.zoom,
      mode: app.mode(),
      hatched: { row: alone(d.queries), column: alone(d.keys) },
    });
    const matched = d.queries.length - d.unaligned;
    says.textContent = matched
      ? `${counted(matched, "word or token", "words or tokens")} ${matched === 1 ? "stands" : "stand"} for the same characters on both sides${d.unaligned ? `; ${d.unaligned} ${d.unaligned === 1 ? "has no partner and is" : "have no partner and are"} hatched` : ""}.`
      : "No token of one side stands for the same characters as one of the other: there is nothing to subtract.";
    drawApart(d);
    point(pinned(state));
    void rank(state, other.r).catch(app.fail);
  }

  let ranked = "";
  /** All heads in the order of how much they differ between the two recordings. */
  async function rank(state: State, r2: number): Promise<void> {
    const key = `${state.r} ${r2}`;
    const [here, there] = [app.seen[state.r], app.seen[r2]];
    const heads = (seen: typeof here) => seen.recording.attentions.map((at) => at.heads).join();
    ranking.hidden = state.r === r2 || heads(here) !== heads(there);
    if (ranking.hidden || key === ranked) return;
    ranked = key;
    const found: Ranked[] = [];
    const all = here.recording.attentions.flatMap((at, a) => times(at.heads, (n) => [a, n]));
    for (const [a, n] of all) {
      const [left, right] = await Promise.all([here.head(a, n), there.head(a, n)]);
      if (ranked !== key || !node.isConnected) return;
      const difference = new Difference(left, right);
      found.push({ a, n, decimals: difference.decimals, ...meanApart(difference, READ) });
      if (found.length % 8 === 0) {
        drawRanking(found, all.length, here.model === there.model, state.r, r2);
        await new Promise((go) => setTimeout(go, 0));
      }
    }
    drawRanking(found, all.length, here.model === there.model, state.r, r2);
    ranking.dataset.state = "done";
  }

  function drawRanking(found: Ranked[], all: number, same: boolean, r: number, r2: number): void {
    const top = found.filter((x) => !Number.isNaN(x.bits)).sort((x, y) => y.bits - x.bits).slice(0, RANKED);
    const most = top[0]?.bits || 1;
    replace(
      ranking,
      h("h3", {}, same ? "Heads that differ most between the two texts" : "Heads that changed most"),
      h(
        "p",
        { class: "note" },
        "Mean over rows of the ",
        term("bits", BITS),
        ` between left and right, same layer and head on both sides${found.length < all ? `; ${found.length} of ${all} heads read so far` : ""}.`,
      ),
      h(
        "ol",
        { class: "best wide" },
        ...top.map((x) => {
          const name = headTitle(app.seen[r], x.a, x.n);
          const go = () => app.store.set({ r, r2, a: x.a, h: x.n, a2: x.a, h2: x.n, zoom: "" });
          const said = fixed(x.bits, x.decimals);
          return drawRanked(button("", go, { "aria-label": `${name}: ${said} bits`, "data-k": `ranked ${x.a}.${x.n}` }), [name], said, x.bits / most);
        }),
      ),
    );
  }

  function drawApart(d: Difference): void {
    const step = Math.max(1, Math.ceil(d.queries.length / ROWS));
    const rows = d.queries.map((_, I) => I).filter((I) => I % step === 0);
    const values = rows.map((I) => d.apart(I)?.bits ?? NaN);
    const mean = meanApart(d, ROWS);
    const most = rows
      .map((I, n) => [I, values[n]] as const)
      .filter(([, x]) => x >= 0.5 * 10 ** -d.decimals)
      .sort((x, y) => y[1] - x[1])
      .slice(0, 5);
    const names = most.map(([I, x]) => `“${d.rows.label(I)}” ${fixed(x, d.decimals)}`).join(", ");
    const alone = d.keys.some((k) => !k.a || !k.b);
    const percent = (x: number) => `${Math.round(100 * x)}%`;
    replace(
      apart,
      h("h3", {}, "Which tokens look elsewhere"),
      bars({
        label: "Jensen–Shannon divergence of each row in bits, over tokens that both sides have",
        values: values.map((x) => (x >= 0.5 * 10 ** -d.decimals ? x : 0)), // what is less may be rounding
        least: LEAST,
        width: Math.max(320, Math.min(WIDEST, node.clientWidth - 48)),
        height: 130,
        unit: "bits",
        below: (n) => cut(d.rows.label(rows[n]), 9),
        name: (n) => `“${d.rows.label(rows[n])}” (${rows[n]})`,
      }),
      h(
        "p",
        { class: "note" },
        term("Bits", BITS),
        ` between the two rows of a token, over tokens that both sides have (Jensen–Shannon: 0 alike, 1 apart). Mean ${Number.isNaN(mean.bits) ? "–" : fixed(mean.bits, d.decimals)}${step > 1 ? `, from every ${step}th row` : ""}.${names ? ` Most: ${names}.` : ""}`,
      ),
      alone && mean.rows
        ? h(
            "p",
            { class: "note" },
            `Weight on tokens that only one side has, counted apart: ${percent(mean.left)} on the left, ${percent(mean.right)} on the right.`,
          )
        : null,
    );
  }

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "a", "h", "r2", "a2", "h2", "scale")) drawControls(state);
      if (changed(state, before, "r", "a", "h", "r2", "a2", "h2", "scale", "pool", "zoom"))
        void open(state).catch(app.fail);
      else if (changed(state, before, "i", "j")) point(pinned(state));
    },
    redraw: () => void open(app.store.state).catch(app.fail),
    saved: () => ({
      title: "Difference of two heads",
      lines: [
        ...titled.map((t) => t.textContent!),
        says.textContent!,
        ...[...apart.querySelectorAll("p")].map((p) => p.textContent!),
      ],
      pictures: [
        ...matrices.map(matrixPicture),
        matrixPicture(third),
        ...[...apart.querySelectorAll("svg")].map(copied),
      ],
      csv: () => matrixCsv(difference!, third.grid!),
    }),
    destroy: () => [...matrices, third].forEach((m) => m.destroy()),
  };
}

/** One scale for several heads: that of the one which needs most. */
function widest(all: Extent[]): Extent {
  const most = Math.max(...all.map((x) => x.most));
  return { most, clipped: most !== 1 && all.some((x) => x.clipped) };
}
