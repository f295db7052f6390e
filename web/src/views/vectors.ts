// What is behind one weight: query, key, value, and every number between them.

import { bars } from "../bars";
import { button, fixed, h, replace, select, shown, significant as number, times } from "../dom";
import { norm, type Explained, type Head } from "../head";
import type { Seen } from "../loader";
import { copied, csv } from "../save";
import type { State } from "../state";
import { changed, facts, headPicker, headTitle, type App, type View } from "../view";
import { WHY } from "./head";

const FORMULAS: Record<string, string> = {
  elu: "φ(q)·φ(k) with φ(x) = elu(x) + 1",
  quadratic: "(q·k + 1)²",
  performer: "positive random features of exp(q·k/√K)",
  fourier: "random Fourier features of exp(q·k/√K)",
  stored: "φ(q)·φ(k), features as the model made them",
};

const WIDEST = 1400; // of a chart
const BARS = "One bar an entry of the vector: blue above zero, orange below.";

export function vectorsView(app: App): View {
  const title = h("h2", {});
  const controls = h("div", { class: "controls" });
  const strip = h("div", { class: "strips" });
  const steps = h("div", { class: "card steps" });
  const drawn = h("div", { class: "card grow" });
  const twice = h("div", { class: "card" });
  const node = h(
    "section",
    { class: "view", "aria-label": "Vectors" },
    h("div", { class: "title" }, title),
    controls,
    strip,
    h("div", { class: "pair" }, steps, drawn),
    twice,
  );
  let turn = 0;
  let now: { head: Head; i: number; j: number; explained: Explained } | null = null;

  async function open(state: State): Promise<void> {
    const mine = ++turn;
    const seen = app.current();
    const head = await seen.head(state.a, state.h);
    await head.vectors();
    if (mine !== turn) return;
    const i = within(state.i, head.T, head.T - 1);
    const j = within(state.j, head.S, head.attention.mask.causal ? i : 0);
    now = { head, i, j, explained: head.explain(i, j) };
    title.textContent = `${headTitle(seen, state.a, state.h)}: “${shown(head.queries.tokens[i])}” asks “${shown(head.keys.tokens[j])}”`;
    const choose = (name: "i" | "j", n: number, most: number) =>
      h(
        "label",
        { class: "field" },
        h("span", {}, name === "i" ? "query" : "key"),
        h("input", {
          type: "number",
          min: 0,
          max: most - 1,
          value: n,
          "data-k": name,
          change: (e: Event) =>
            app.store.set({ [name]: within(Number((e.target as HTMLInputElement).value), most, 0) }),
        }),
      );
    replace(
      controls,
      headPicker(app),
      choose("i", i, head.T),
      choose("j", j, head.S),
      select(
        "bars in order",
        [
          ["index", "of the dimensions"],
          ["size", "of their share in the score"],
        ],
        state.order,
        (order) => app.store.set({ order }),
      ),
    );
    replace(
      strip,
      tokenStrip("query", head.queries.tokens, i, (n) => app.store.set({ i: n })),
      tokenStrip("key", head.keys.tokens, j, (n) => app.store.set({ j: n })),
    );
    drawSteps();
    drawBars(state.order);
    await drawTwice(seen, state, mine);
  }

  function drawSteps(): void {
    const { head, i, j, explained: x } = now!;
    const how = head.attention.weights;
    const v = head.value(j);
    const output = head.output(i);
    const rows: [string, string][] = [];
    if (how.kind === "softmax") {
      rows.push(["q·k", number(x.product)], [`× scale ${number(x.scale)}`, number(x.product! * x.scale!)]);
      if (how.softcap !== null) rows.push([`softcap ${number(how.softcap)}`, number(x.score)]);
      rows.push([
        head.attention.bias.length ? `+ bias (${head.attention.bias.join(", ")})` : "+ bias",
        head.attention.bias.length ? number(x.bias) : "none",
      ]);
      rows.push(["− log of the row's normaliser", number(x.normaliser)]);
    } else if (how.kind === "feature") {
      rows.push(
        [`similarity: ${FORMULAS[how.map]}`, number(x.score)],
        ["log of the row's normaliser", number(x.normaliser)],
      );
    } else if (how.kind === "onehot") {
      rows.push(["q·k/√K", number(x.score)], ["", "the row's largest takes all"]);
    } else if (how.kind === "recurrence") {
      const memory = head.memory!;
      const usual = j <= i ? memory.usual(i, j) : 0;
      const skip = i === j ? memory.parts.skip : 0;
      rows.push(["q·k", number(x.product)], [`× scale ${number(x.scale)}`, number(x.product! * x.scale!)]);
      rows.push([`× what decays since left, × b = ${number(memory.strength(j), 3)}`, number(usual)]);
      if (how.erases) rows.push(["+ what the delta rule erased in between", number(x.weight - usual - skip)]);
      if (skip) rows.push(["+ past the memory (D)", number(skip)]);
    } else rows.push(["", "weights as the model gave them"]);
    rows.push(["mask", x.reason === "visible" ? "lets it through" : `hides it: ${WHY[x.reason]}`]);
    rows.push([how.kind === "softmax" ? "weight = exp of the sum" : "weight", fixed(x.weight, head.decimals)]);
    if (v) rows.push(["‖v‖", number(norm(v))], ["‖weight·v‖", length(v)]);
    if (output) rows.push(["‖output of the head‖", number(norm(output))]);
    if (x.gradient !== null) rows.push(["gradient of the loss", number(x.gradient)]);
    replace(steps, h("h3", {}, "How the weight comes about"), facts(rows));
    steps
      .querySelectorAll("dl > div")
      .forEach((row) => row.classList.toggle("main", row.textContent!.startsWith("weight")));
  }

  /** ‖weight · v‖, with no more decimals than the error of the weight leaves to it. */
  function length(v: Float32Array): string {
    const { head, explained } = now!;
    const size = norm(v);
    return fixed(Math.abs(explained.weight) * size, head.decimalsTimes(size));
  }

  function drawBars(orderBy: string): void {
    const { head, i, j, explained: x } = now!;
    const q = head.query(i);
    const k = head.key(j);
    const v = head.value(j);
    const pair = head.factors(i, j);
    const parts: (Node | string)[] = [h("h3", {}, "Entry by entry"), h("p", { class: "note" }, BARS)];
    const row = (name: string, values: ArrayLike<number>, order: number[] | undefined, sum: string) =>
      h(
        "div",
        { class: "vector" },
        h("span", { class: "name" }, name),
        bars({ label: name, values, width: room(drawn), ...(order ? { order } : {}) }),
        h("span", { class: "sum" }, sum),
      );
    if (q && k && pair) {
      const scale = head.attention.weights.kind === "feature" ? 1 : (x.scale ?? 1);
      const product = pair.q.map((e, d) => e * pair.k[d] * scale);
      const sorted = (n: ArrayLike<number>) =>
        orderBy === "size" ? Array.from(n, (_, d) => d).sort((a, b) => Math.abs(n[b]) - Math.abs(n[a])) : undefined;
      const same = product.length === q.length ? sorted(product) : undefined;
      parts.push(row("q", q, same, `‖q‖ ${number(norm(q), 3)}`), row("k", k, same, `‖k‖ ${number(norm(k), 3)}`));
      parts.push(
        row(
          scale === 1 ? pair.name : `${pair.name} × scale`,
          product,
          sorted(product),
          `sum ${number(product.reduce((a, b) => a + b, 0))}`,
        ),
      );
    } else
      parts.push(
        h("p", { class: "note" }, "This attention has no queries and keys: its weights were recorded as they are."),
      );
    if (v)
      parts.push(
        row("v", v, undefined, `‖v‖ ${number(norm(v), 3)}`),
        row(
          "weight·v",
          v.map((e) => e * x.weight),
          undefined,
          `‖weight·v‖ ${length(v)}`,
        ),
      );
    replace(drawn, ...parts);
  }

  /** The chosen query's token where it stands elsewhere: in this text or in another. */
  async function drawTwice(seen: Seen, state: State, mine: number): Promise<void> {
    const { head, i } = now!;
    const plain = (t: string) => t.replace(/^[\s▁Ġ#]+/, "").toLowerCase();
    const wanted = plain(head.queries.tokens[i]);
    const places: [string, string][] = [];
    app.seen.forEach((other, r) => {
      if (other.card.key_width !== seen.card.key_width || state.a >= other.recording.attentions.length) return;
      other.queries(state.a).tokens.forEach((token, t) => {
        if (plain(token) === wanted && !(other === seen && t === i))
          places.push([
            `${r}:${t}`,
            `${app.seen.length > 1 ? other.recording.name + ", " : ""}token ${t}: ${context(other, state.a, t)}`,
          ]);
      });
    });
    if (!places.length) {
      replace(
        twice,
        h("h3", {}, "The same token in another context"),
        h(
          "p",
          { class: "note" },
          `“${shown(head.queries.tokens[i])}” stands here only once. Give a second text with it: regard view MODEL "text" "text b".`,
        ),
      );
      return;
    }
    const chosen = places.find(([key]) => key === state.elsewhere)?.[0] ?? places[0][0];
    const [r, t] = chosen.split(":").map(Number);
    const far = await app.seen[r].head(state.a, state.h);
    await far.vectors();
    if (mine !== turn) return;
    const parts: Node[] = [];
    for (const [name, x, y] of [
      ["q", head.query(i), far.query(t)],
      ["k", sameSide(head) ? head.key(i) : null, sameSide(far) ? far.key(t) : null],
      ["v", sameSide(head) ? head.value(i) : null, sameSide(far) ? far.value(t) : null],
    ] as const) {
      if (!x || !y || x.length !== y.length) continue;
      const cosine = x.reduce((sum, e, d) => sum + e * y[d], 0) / (norm(x) * norm(y) || 1);
      const difference = norm(x.map((e, d) => e - y[d]));
      parts.push(
        h(
          "div",
          { class: "vector" },
          h("span", { class: "name" }, name),
          bars({ label: `${name} here and there`, values: x, other: y, width: room(twice) }),
          h("span", { class: "sum" }, `cosine ${number(cosine, 3)}, ‖difference‖ ${number(difference, 3)}`),
        ),
      );
    }
    replace(
      twice,
      h("h3", {}, "The same token in another context"),
      h("p", { class: "quiet" }, `Bars: here, ${context(seen, state.a, i)} Marks: there.`),
      select("there", places.slice(0, 200), chosen, (elsewhere) => app.store.set({ elsewhere })),
      ...parts,
    );
  }

  return {
    node,
    update: (state, before) =>
      changed(state, before, "r", "a", "h", "i", "j", "order", "elsewhere") && void open(state).catch(app.fail),
    redraw: () => void open(app.store.state).catch(app.fail),
    saved() {
      const { head, i, j, explained: x } = now!;
      const lines = [...steps.querySelectorAll("dl > div")].map(
        (d) => `${d.querySelector("dt")!.textContent}: ${d.querySelector("dd")!.textContent}`,
      );
      const vectors: [string, Float32Array | null][] = [
        ["q", head.query(i)],
        ["k", head.key(j)],
        ["v", head.value(j)],
      ];
      const rows = vectors.flatMap(([name, e]) => (e ? [[name, ...e]] : []));
      return {
        title: title.textContent!,
        lines: [`Model: ${app.current().model}`, ...lines, `weight ${fixed(x.weight, head.decimals)}`, BARS],
        pictures: [...drawn.querySelectorAll("svg")].map(copied),
        csv: () => csv([["vector", ...times(Math.max(head.K, head.V), (d) => String(d))], ...rows]),
      };
    },
  };
}

/** The width that bars have inside a card, beside their names and sums. */
function room(card: HTMLElement): number {
  const inside = card.clientWidth - 36;
  return Math.max(220, Math.min(WIDEST, innerWidth > 960 ? inside - 256 : inside));
}

function sameSide(head: Head): boolean {
  return head.attention.kind === "self";
}

function within(n: number, size: number, otherwise: number): number {
  return Number.isInteger(n) && n >= 0 && n < size ? n : otherwise;
}

/** A token with a few around it. */
function context(seen: Seen, a: number, t: number): string {
  const { tokens } = seen.queries(a);
  const part = (from: number, to: number) =>
    tokens
      .slice(Math.max(0, from), to)
      .map((x) => shown(x, 12))
      .join(" ");
  return `… ${part(t - 3, t)} [${shown(tokens[t])}] ${part(t + 1, t + 4)} …`;
}

/** Tokens around the chosen one, to choose another. */
function tokenStrip(name: string, tokens: string[], at: number, choose: (n: number) => void): HTMLElement {
  const start = Math.max(0, Math.min(tokens.length - 24, at - 12));
  const buttons = tokens.slice(start, start + 24).map((token, n) =>
    button(shown(token, 12), () => choose(start + n), {
      class: "token",
      "aria-pressed": String(start + n === at),
      "data-k": `${name} ${start + n}`,
      "aria-label": `${name} ${start + n}: ${shown(token)}`,
    }),
  );
  return h(
    "div",
    { class: "strip", role: "group", "aria-label": `Choose the ${name}` },
    h("span", {}, name),
    ...buttons,
  );
}
