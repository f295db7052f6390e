// Where weight goes by distance and by place, and what positions add to scores.

import { bars } from "../bars";
import { named, Numbers } from "../cells";
import { h, number, replace } from "../dom";
import type { Head } from "../head";
import { Matrix } from "../matrix";
import { copied, csv, matrixPicture } from "../save";
import type { State } from "../state";
import { changed, headPicker, headTitle, scalePicker, type App, type View } from "../view";

const FAR = 48; // positions to either side
const ROWS = 192; // queries read, spread over the text

interface Profile {
  far: number;
  offsets: number[];
  means: Float32Array; // by offset
  seen: Float32Array; // queries that see a key there
  landed: Float32Array; // by key, in at most 256 parts
}

export function positionsView(app: App): View {
  const title = h("h2", {});
  const controls = h("div", { class: "controls" });
  const one = h("div", { class: "card" });
  const says = h("p", { class: "note" });
  let profiles: Profile[] = [];
  let turn = 0;
  const matrix = new Matrix({
    side: 420,
    axes: ["head", "distance"],
    describe: (n, d) => `head ${n}, ${away(profiles[n].offsets[d])}: mean weight ${number(profiles[n].means[d])}`,
    hovered: (cell) => matrix.cursor(cell),
    picked: (n, d) => {
      matrix.cursor([n, d]);
      app.store.set({ h: n });
    },
  });
  const node = h(
    "section",
    { class: "view", "aria-label": "Positions" },
    h("div", { class: "title" }, title, says),
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
    for (let n = 0; n < at.heads; n++) {
      const head = await seen.head(state.a, n);
      if (mine !== turn) return;
      found.push(profile(head));
      if (n === state.h) chosen = head;
    }
    profiles = found;
    const T = chosen!.T;
    says.textContent =
      at.kind === "cross"
        ? "Distances between texts mean little: counted by index."
        : T > ROWS
          ? `Means over ${Math.min(T, ROWS)} of ${T} queries, spread over the text.`
          : "";
    const p = profiles[state.h];
    const values = new Float32Array(at.heads * p.offsets.length);
    profiles.forEach((q, n) => values.set(q.means, n * p.offsets.length));
    matrix.update({
      label: `Mean weight by distance: ${at.heads} heads down, ${p.offsets.length} distances across`,
      mode: app.mode(),
      scale: state.scale,
      cells: new Numbers(
        named(at.heads, (n) => `head ${n}`),
        named(p.offsets.length, (d) => signed(p.offsets[d])),
        at.signed,
        values,
      ),
    });
    drawOne(chosen!, p);
  }

  function drawOne(head: Head, p: Profile): void {
    const width = Math.max(320, Math.min(1180, node.clientWidth - 48));
    const parts: (Node | null)[] = [
      h("h3", {}, "Mean weight by distance from the query"),
      bars({
        label: "Mean weight by distance",
        values: p.means,
        width,
        height: 130,
        name: (d) => away(p.offsets[d]),
      }),
      h(
        "p",
        { class: "ends" },
        h("span", {}, away(p.offsets[0])),
        h("span", {}, away(p.offsets[p.offsets.length - 1])),
      ),
      h("h3", {}, "Where the weight lands"),
      bars({
        label: "Mean weight by place of the key",
        values: p.landed,
        width,
        height: 90,
        name: (n) => `keys from ${Math.floor((n * head.S) / p.landed.length)}`,
      }),
      h("p", { class: "ends" }, h("span", {}, "first key"), h("span", {}, "last key")),
    ];
    if (head.attention.bias.length) {
      const middle = Math.floor(head.T / 2);
      const reach = Math.min(p.far, middle, head.S - 1 - middle);
      const offsets = Array.from({ length: 2 * reach + 1 }, (_, n) => n - reach);
      parts.push(
        h("h3", {}, `What positions add to a score (${head.attention.bias.join(", ")})`),
        bars({
          label: "Bias by distance",
          values: offsets.map((d) => head.bias(middle, middle + d)),
          width,
          height: 110,
          name: (n) => away(offsets[n]),
        }),
        h("p", { class: "ends" }, h("span", {}, away(-reach)), h("span", {}, away(reach))),
      );
    }
    replace(one, ...parts);
    one.querySelectorAll<HTMLElement>("p.ends").forEach((p) => (p.style.maxWidth = `${width}px`));
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
        csv([["head", ...profiles[0].offsets.map(signed)], ...profiles.map((p, n) => [`head ${n}`, ...p.means])]),
    }),
    destroy: () => matrix.destroy(),
  };
}

function profile(head: Head): Profile {
  const far = Math.min(FAR, Math.max(head.T, head.S) - 1);
  const causal = head.attention.mask.causal;
  const offsets = Array.from({ length: far + 1 + (causal ? 0 : far) }, (_, n) => n - far);
  const means = new Float32Array(offsets.length);
  const seen = new Float32Array(offsets.length);
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
      const d = (cross ? j - i : head.keys.positions[j] - head.queries.positions[i]) + far;
      if (d < 0 || d >= offsets.length) continue;
      means[d] += line[j];
      seen[d]++;
    }
  }
  return {
    far,
    offsets,
    means: means.map((x, d) => (seen[d] ? x / seen[d] : 0)),
    seen,
    landed: landed.map((x) => x / read),
  };
}

function signed(d: number): string {
  return d > 0 ? `+${d}` : d < 0 ? `−${-d}` : "0";
}

function away(d: number): string {
  return d === 0 ? "itself" : d < 0 ? `${-d} before` : `${d} after`;
}
