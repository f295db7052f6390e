// Where weight goes by distance and by place, and what positions add to scores.

import { bars, nice } from "../bars";
import { named, Numbers } from "../cells";
import { fixed, h, replace, shown } from "../dom";
import type { Head } from "../head";
import { cut, Matrix } from "../matrix";
import { copied, csv, matrixPicture } from "../save";
import type { State } from "../state";
import { away, changed, headPicker, headTitle, scalePicker, type App, type View } from "../view";

const ROWS = 192; // queries read, spread over the text
const NUMBER = 44; // pixels for the number of a token
const MOST = 9; // decimals of a mean weight
export const WIDEST = 2100; // of a chart

/** Distances that are counted together: from … to, negative before the query. */
interface Bin {
  from: number;
  to: number;
}

interface Profile {
  bins: Bin[];
  means: Float32Array; // of a weight, by bin
  landed: Float32Array; // by key, in at most 256 parts
}

export function positionsView(app: App): View {
  const title = h("h2", {});
  const controls = h("div", { class: "controls" });
  const one = h("div", { class: "card" });
  const says = h("p", { class: "note" });
  const reads = h("p", { class: "how" });
  let profiles: Profile[] = [];
  let decimals = 2; // of a mean weight, of all heads alike
  let turn = 0;
  const matrix = new Matrix({
    side: 420,
    what: "mean weight of a token at that distance",
    axes: ["head", "distance"],
    describe: (n, d) => `head ${n}, ${spelled(profiles[n].bins[d])}: mean weight ${fixed(profiles[n].means[d], decimals)}`,
    hovered: (cell) => matrix.cursor(cell),
    picked: (n, d) => {
      matrix.cursor([n, d]);
      app.store.set({ h: n });
    },
  });
  const node = h(
    "section",
    { class: "view", "aria-label": "Positions" },
    h("div", { class: "title" }, title, reads, says),
    controls,
    one,
    h("div", { class: "card" }, h("h3", {}, "All heads of this attention, by distance"), matrix.node),
  );

  async function open(state: State): Promise<void> {
    const mine = ++turn;
    const seen = app.current();
    const at = seen.attention(state.a);
    title.textContent = `${headTitle(seen, state.a, state.h)}, by position`;
    replace(controls, headPicker(app), scalePicker(app));
    const found: Profile[] = [];
    let chosen: Head | null = null;
    let most = MOST;
    for (let n = 0; n < at.heads; n++) {
      const head = await seen.head(state.a, n);
      if (mine !== turn) return;
      found.push(profile(head));
      most = Math.min(most, head.decimals);
      if (n === state.h) chosen = head;
    }
    profiles = found;
    decimals = digits(found, most);
    const T = chosen!.T;
    reads.textContent =
      "How much weight goes how far: − before the token that looks, + after it. Distances beyond 4 are taken together, two steps for each doubling.";
    says.textContent =
      at.kind === "cross"
        ? "Distances between texts mean little: counted by index."
        : T > ROWS
          ? `Means over ${Math.min(T, ROWS)} of ${T} queries, spread over the text.`
          : "";
    const p = profiles[state.h];
    const values = new Float32Array(at.heads * p.bins.length);
    profiles.forEach((q, n) => values.set(q.means, n * p.bins.length));
    matrix.update({
      label: `Mean weight by distance: ${at.heads} heads down, ${p.bins.length} distances across`,
      mode: app.mode(),
      scale: state.scale,
      cells: new Numbers(
        named(at.heads, (n) => `head ${n}`),
        named(p.bins.length, (d) => short(p.bins[d])),
        at.signed,
        values,
        (x) => fixed(x, decimals),
      ),
    });
    drawOne(chosen!, p);
  }

  function drawOne(head: Head, p: Profile): void {
    const width = Math.max(320, Math.min(WIDEST, node.clientWidth - 48));
    // A bar of several tokens is named where a round number is among them.
    const round = nice(Math.max(1, (head.S * NUMBER) / width));
    const from = (n: number) => Math.ceil((n * head.S) / p.landed.length);
    const numbered = (n: number) => {
      const first = Math.ceil(from(n) / round) * round;
      return first < from(n + 1) ? String(first) : "";
    };
    const parts: (Node | null)[] = [
      h("h3", {}, "Mean weight by distance"),
      bars({
        label: "Mean weight by distance",
        values: p.means,
        width,
        height: 150,
        unit: "mean weight of a token at that distance",
        below: (d) => short(p.bins[d]),
        name: (d) => spelled(p.bins[d]),
      }),
      h("h3", {}, "Where the weight lands"),
      bars({
        label: "Mean weight by place of the key",
        values: p.landed,
        width,
        height: 110,
        unit: "weight that a token gets, mean over all",
        below: (n) => (p.landed.length === head.S ? cut(shown(head.keys.tokens[n].trim() || head.keys.tokens[n]), 9) : numbered(n)),
        name: (n) => (p.landed.length === head.S ? `“${shown(head.keys.tokens[n])}” (${n})` : `tokens from ${from(n)}`),
      }),
    ];
    if (head.attention.bias.length) {
      const middle = Math.floor(head.T / 2);
      const far = Math.min(middle, head.S - 1 - middle);
      const near = p.bins.filter((d) => Math.abs(d.from) <= far && Math.abs(d.to) <= far);
      parts.push(
        h("h3", {}, `What positions add to a score (${head.attention.bias.join(", ")})`),
        bars({
          label: "Bias by distance",
          values: near.map((d) => head.bias(middle, middle + (d.from < 0 ? d.to : d.from))),
          width,
          height: 130,
          unit: "added to the score, at the nearest of those distances",
          below: (d) => short(near[d]),
          name: (d) => spelled(near[d]),
        }),
      );
    }
    replace(one, ...parts);
  }

  return {
    node,
    update: (state, before) => changed(state, before, "r", "a", "h", "scale") && void open(state).catch(app.fail),
    redraw: () => void open(app.store.state).catch(app.fail),
    saved: () => ({
      title: title.textContent!,
      lines: [says.textContent!].filter(Boolean),
      pictures: [...[...one.querySelectorAll("svg")].map(copied), matrixPicture(matrix)],
      csv: () =>
        csv([["head", ...profiles[0].bins.map(short)], ...profiles.map((p, n) => [`head ${n}`, ...p.means])]),
    }),
    destroy: () => matrix.destroy(),
  };
}

/** All distances from the farthest before to the farthest after: singly up to 4, then two bins for each doubling. */
function bins(far: number, causal: boolean): Bin[] {
  const after: Bin[] = [];
  for (let from = 1; from <= far; ) {
    // Up to 4 one by one; 5 and 6, 7 and 8, 9 to 12, 13 to 16, 17 to 24 …
    const power = 2 ** Math.floor(Math.log2(Math.max(1, from - 1)));
    const to = from <= 4 ? from : Math.min(far, from - 1 + power / 2);
    after.push({ from, to });
    from = to + 1;
  }
  const before = after.map(({ from, to }) => ({ from: -to, to: -from })).reverse();
  return [...before, { from: 0, to: 0 }, ...(causal ? [] : after)];
}

function profile(head: Head): Profile {
  const far = Math.max(head.T, head.S) - 1;
  const all = bins(far, head.attention.mask.causal);
  const bin = new Int32Array(2 * far + 1).fill(-1); // of each distance
  all.forEach(({ from, to }, n) => bin.fill(n, from + far, to + far + 1));
  const means = new Float64Array(all.length);
  const seen = new Float64Array(all.length);
  const landed = new Float32Array(Math.min(head.S, 256));
  const line = new Float32Array(head.S);
  const step = Math.max(1, head.T / ROWS);
  const cross = head.attention.kind === "cross";
  let read = 0;
  for (let at = 0; at < head.T; at += step, read++) {
    const i = Math.floor(at);
    head.row(i, 0, head.S, line);
    for (let j = 0; j < head.S; j++) {
      if (line[j] !== line[j]) continue;
      landed[Math.floor((j * landed.length) / head.S)] += line[j];
      const d = bin[(cross ? j - i : head.keys.positions[j] - head.queries.positions[i]) + far] ?? -1;
      if (d < 0) continue;
      means[d] += line[j];
      seen[d]++;
    }
  }
  return {
    bins: all,
    means: Float32Array.from(means, (x, d) => (seen[d] ? x / seen[d] : 0)),
    landed: landed.map((x) => x / read),
  };
}

/** Decimals of the means of all heads: three digits of the largest, and no more than hold of a single weight. */
function digits(all: Profile[], most: number): number {
  const top = Math.max(...all.map((p) => p.means.reduce((size, x) => Math.max(size, Math.abs(x)), 0)));
  return Math.min(most, Math.max(2, 2 - Math.floor(Math.log10(top || 1))));
}

function short({ from, to }: Bin): string {
  const sign = (d: number) => `${d < 0 ? "−" : d > 0 ? "+" : ""}${Math.abs(d)}`;
  return from === to ? sign(from) : `${sign(from)}…${sign(to)}`;
}

function spelled({ from, to }: Bin): string {
  if (from === to) return away(from);
  return from < 0 ? `${-to} to ${-from} before` : `${from} to ${to} after`;
}
