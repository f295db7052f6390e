// What a language model would say next: at each layer, and which parts of it speak for which token.

import { legible, Ramp, rounded } from "../colour";
import { button, CENTRED, h, MIDDLE, number, press, replace, s, select, shown, tick, times } from "../dom";
import { legend } from "../legend";
import { cut } from "../matrix";
import { drawRanked } from "../ranks";
import { parts, Predicted, type Candidate, type Part } from "../predicted";
import { copied, csv, stacked } from "../save";
import type { State } from "../state";
import { term } from "../tips";
import { changed, type App, type Export, type View } from "../view";
import { DIRECT_TIP, LENS_TIP, LOGIT_TIP } from "../words";

const [COLUMN, NARROW, TIGHT] = [78, 56, 30]; // of a position, on a phone, and where tokens are letters
const LETTER = 7.4; // pixels of one
const LEFT = 112; // room for the names of layers
const PHONE = 420; // width of a narrow drawing
const BEST = 12; // parts that are listed
const MISSING =
  "This page has no predictions: of a long text, or of a model that caps or scales its logits, they are recorded only where they are asked for, and if they cannot be, why is said: regard view MODEL TEXT --contributions.";
const ENCODER = "This model reads in both directions: it does not say what comes next. The view is for language models such as GPT-2 or Llama.";

/** A probability: 99.8%, 1.5%, 0.02%, < 0.01%. */
export function percent(p: number): string {
  const x = 100 * p;
  return x < 0.01 ? "<0.01%" : `${x >= 10 ? x.toFixed(1) : Number(x.toPrecision(2))}%`;
}

export function nextView(app: App): View {
  const about = h("p", { class: "quiet" });
  const lens = h("div", { class: "card" });
  const choice = h("div", { class: "card said" });
  const direct = h("div", { class: "card grow" });
  const node = h(
    "section",
    { class: "view", "aria-label": "Next token" },
    h("div", { class: "title" }, h("h2", {}, "What would come next"), about),
    lens,
    h("div", { class: "pair" }, choice, direct),
  );
  const more = new Map<number, Candidate[]>(); // of each position, asked of the model
  let found: Predicted | null = null;
  let turn = 0;

  async function open(): Promise<void> {
    const mine = ++turn;
    more.clear();
    const opened = await Predicted.open(app.current());
    if (mine !== turn) return;
    found = opened;
    for (const card of [lens, choice, direct]) card.hidden = !found;
    if (!found) about.textContent = missing();
    else replace(about, `After each token a language model gives every token of its vocabulary a probability to come next. ${press()} a cell to ask for what comes after its token.`);
    draw();
  }

  function missing(): string {
    return app.current().recording.attentions.some((x) => x.side === "encoder") ? ENCODER : MISSING;
  }

  /** The token after which is asked. */
  function position(state: State): number {
    const t = state.way === "to" ? state.i : state.j;
    return t >= 0 && t < found!.T ? t : found!.T - 1;
  }

  const go = (t: number, token = -1) => app.store.set({ way: "to", i: t, j: -1, fixed: true, hover: null, token, against: -1 });
  const token = (t: number) => shown(app.current().recording.sequences[found!.about.sequence].tokens[t], 16);
  const name = (text: string) => `“${shown(text, 16)}”`;

  function draw(): void {
    if (!found) return;
    const { state } = app.store;
    const t = position(state);
    const all = [...found.at(t), ...(more.get(t) ?? [])];
    const chosen = all.find((x) => x.id === state.token) ?? all[0];
    const against = all.find((x) => x.id === state.against && x !== chosen) ?? null;
    drawLens(t);
    drawChoice(t, all, chosen, against);
    drawDirect(t, chosen, against);
  }

  /** Letters of the longest word that a column shows, with the sign of what comes. */
  function widest(): number {
    const { M, T } = found!;
    const places = times(T, (t) => t);
    const words = places.flatMap((t) => [token(t), ...times(M, (m) => `✓ ${shown(found!.likeliest(m, t)[0].text, 20)}`)]);
    return words.reduce((most, word) => Math.max(most, Array.from(word).length), 0);
  }

  /** A row a layer, a column a token: the likeliest next one by what the model has so far. */
  function drawLens(t: number): void {
    const { M, T, ids } = found!;
    const width = Math.max(260, (lens.clientWidth || 800) - 36);
    const least = Math.min(width < PHONE ? NARROW : COLUMN, Math.max(TIGHT, LETTER * widest() + 8));
    const N = Math.max(2, Math.min(T, Math.floor((width - LEFT) / least)));
    const first = Math.max(0, Math.min(T - N, t - (N >> 1)));
    const size = Math.min(150, Math.max(least, Math.floor((width - LEFT) / N)));
    const row = M > 20 ? 19 : 24;
    const top = 24;
    const ramp = new Ramp("head", false, app.mode(), 1);
    const height = top + row * (M + 1) + 8;
    const svg = s("svg", { class: "lens-grid", width: LEFT + N * size + 4, height, viewBox: `0 0 ${LEFT + N * size + 4} ${height}`, role: "group", "aria-label": "Likeliest next token after each layer" });
    const fit = Math.floor(size / LETTER);
    svg.append(tick(LEFT - 8, 15, "after the token →", { class: "axis" }));
    for (let m = 0; m < M; m++) {
      const said = m === 0 ? "embeddings" : m === M - 1 ? `layer ${m - 1}, says` : `layer ${m - 1}`;
      svg.append(tick(LEFT - 8, top + (m + 0.5) * row, said, { ...MIDDLE, class: m === M - 1 ? "tick strong" : "tick" }));
    }
    svg.append(tick(LEFT - 8, top + (M + 0.5) * row + 4, "what comes", MIDDLE));
    for (let n = 0; n < N; n++) {
      const at = first + n;
      const x = LEFT + n * size;
      const centre = x + size / 2;
      svg.append(tick(centre, 15, cut(token(at), fit), { ...CENTRED, class: at === t ? "tick strong" : "tick" }));
      for (let m = 0; m < M; m++) {
        const best = found!.likeliest(m, at);
        const right = at + 1 < T && best[0].id === ids[at + 1];
        const cell = s("g", { class: "cell-of-lens", click: () => go(at, best[0].id) });
        const tip = `${m === 0 ? "embeddings" : `after layer ${m - 1}`}, after “${token(at)}”: ${best.map((b) => `${name(b.text)} ${percent(b.p)}`).join(", ")}`;
        cell.append(
          s("rect", { x: x + 0.5, y: top + m * row + 0.5, width: size - 1, height: row - 1, fill: ramp.css(best[0].p) }),
          tick(centre, top + (m + 0.5) * row, cut(`${right ? "✓ " : ""}${shown(best[0].text, 20)}`, fit), { ...MIDDLE, ...CENTRED, fill: legible(ramp.colour(best[0].p)), class: "word" }),
          s("title", {}, tip),
        );
        svg.append(cell);
      }
      const coming = at + 1 < T ? cut(token(at + 1), fit) : "–";
      svg.append(tick(centre, top + (M + 0.5) * row + 4, coming, { ...MIDDLE, ...CENTRED, class: "tick strong" }));
      if (at === t) svg.append(s("rect", { class: "chosen", x: x + 1, y: top - 1, width: size - 2, height: M * row + 2 }));
    }
    const step = (by: number) => button(by < 0 ? "‹" : "›", () => go(Math.max(0, Math.min(T - 1, t + by))), { "aria-label": by < 0 ? "The token before" : "The token after", disabled: t + by < 0 || t + by >= T });
    const key = legend("probability of the likeliest next token", ramp, { masked: "", alone: "" });
    const head = h("div", { class: "top" }, h("h3", {}, term("At each layer (logit lens)", LENS_TIP)), h("div", { class: "picker" }, step(-1), h("span", { class: "quiet" }, `after “${token(t)}” (${t})`), step(1)));
    const note = `Each cell has the likeliest next token by the vectors up to that layer; the ${app.mode() === "dark" ? "brighter" : "darker"} the likelier. ✓: it is what comes.${N < T ? ` Shown: tokens ${first} to ${first + N - 1} of ${T}.` : ""}`;
    replace(lens, head, h("p", { class: "note" }, note), h("div", { class: "wide-drawing" }, svg), h("div", { class: "legends" }, key));
  }

  /** What may come after a token. */
  function drawChoice(t: number, all: Candidate[], chosen: Candidate, against: Candidate | null): void {
    const most = Math.max(...all.map((x) => x.p));
    const rows = all.map((x) => {
      const comes = found!.ids[t + 1] === x.id ? " ✓" : "";
      const control = button("", () => app.store.set({ token: x.id }), { "aria-label": `${shown(x.text)}: ${percent(x.p)}`, "aria-pressed": String(x === chosen), "data-k": `next ${x.id}` });
      const said = `${percent(x.p)} · ${x.logit.toFixed(2).replace("-", "−")}`;
      return drawRanked(control, [shown(x.text, 18), comes], said, x.p / most, x === chosen ? "on" : "");
    });
    replace(
      choice,
      h("h3", {}, `After “${token(t)}” (${t})`),
      h("p", { class: "quiet" }, "Probability · ", term("logit", LOGIT_TIP), `. ✓: what comes in the text. ${press()} one to see which heads make it likely.`),
      h("ol", { class: "best one" }, ...rows),
      select(
        "compared with",
        [["-1", "nothing"], ...all.filter((x) => x !== chosen).map((x) => [String(x.id), shown(x.text, 18)] as [string, string])],
        String(against?.id ?? -1),
        (id) => app.store.set({ against: Number(id) }),
      ),
      app.model ? ask(t) : null,
    );
  }

  /** Any other token: the model behind the page is asked. */
  function ask(t: number): HTMLElement {
    const box = h("input", { type: "search", placeholder: "another token", "aria-label": "Another token", "data-k": "another" });
    const send = async () => {
      const ids = found!.ids.slice(0, t + 1);
      const answer = (await (await app.model!.ask("contributions", { ids, position: t, token: box.value })).json()) as Candidate & { token: string };
      const made = { ...answer, text: answer.token };
      if (!found!.at(t).some((x) => x.id === made.id)) more.set(t, [...(more.get(t) ?? []).filter((x) => x.id !== made.id), made]);
      app.store.set({ token: made.id });
      draw();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && box.value) void send().catch(app.fail);
    });
    return h("p", { class: "find" }, box, button("Ask", () => box.value && void send().catch(app.fail)));
  }

  /** What each head, each MLP, the embeddings and a constant add to the logit. */
  function drawDirect(t: number, chosen: Candidate, against: Candidate | null): void {
    const title = h("h3", {}, term("Direct contributions", DIRECT_TIP), ` to “${shown(chosen.text, 16)}” after “${token(t)}”${against ? `, rather than “${shown(against.text, 16)}”` : ""}`);
    if (!chosen.heads.length) {
      replace(direct, title, h("p", { class: "quiet" }, `Heads do not add up to logits in this model: ${found!.about.why}.`));
      return;
    }
    const all = parts(chosen, against, found!.about);
    const sum = (some: Part[]) => some.reduce((total, x) => total + x.value, 0);
    const said = (x: number) => (Math.abs(x) < 0.005 ? "0.00" : x.toFixed(2).replace("-", "−"));
    const heads = all.filter((x) => x.a >= 0);
    const mlps = all.filter((x) => x.name.startsWith("MLP"));
    const [first, last] = [all[heads.length], all[all.length - 1]];
    const line = `embeddings ${said(first.value)} + ${heads.length} heads ${said(sum(heads))} + ${mlps.length} MLPs ${said(sum(mlps))} + constant ${said(last.value)} = ${against ? "difference of the logits" : "logit"} ${said(sum(all))}`;
    const order = [...all].sort((x, y) => Math.abs(y.value) - Math.abs(x.value)).slice(0, BEST);
    const largest = Math.abs(order[0].value) || 1;
    const rows = order.map((x) => {
      const control = x.a >= 0 ? button("", () => app.store.set({ view: "head", a: x.a, h: x.h, i: t, zoom: "" }), { "aria-label": `Open ${x.name}` }) : null;
      return drawRanked(control, [x.name], said(x.value), x.value / largest);
    });
    replace(
      direct,
      title,
      h("p", { class: "note" }, line),
      drawParts(t, chosen, against),
      h("h4", {}, "The largest parts"),
      h("ol", { class: "best wide" }, ...rows),
    );
  }

  /** A row a layer, a column a head, and one for the MLP. */
  function drawParts(t: number, chosen: Candidate, against: Candidate | null): HTMLElement {
    const all = parts(chosen, against, found!.about);
    const H = Math.max(...chosen.heads.map((x) => x.length));
    const L = chosen.heads.length;
    const width = Math.max(240, (direct.clientWidth || 560) - 36);
    const left = 62;
    const size = Math.max(10, Math.min(34, (width - left - 8) / (H + 1.5)));
    const row = Math.min(size, L > 16 ? 15 : 24);
    const top = 20;
    const shade = all.filter((x) => x.a >= 0 || x.name.startsWith("MLP"));
    const most = rounded(Math.max(...shade.map((x) => Math.abs(x.value)), 1e-9));
    const ramp = new Ramp("head", true, app.mode(), most);
    const [w, t2] = [left + (H + 1.5) * size + 4, top + L * row + 4];
    const svg = s("svg", { class: "parts", width: w, height: t2, viewBox: `0 0 ${w} ${t2}`, role: "group", "aria-label": "What each head and MLP adds to the logit" });
    for (let n = 0; n < H; n++) if (size >= 17 || n % 2 === 0) svg.append(tick(left + (n + 0.5) * size, 14, String(n), CENTRED));
    svg.append(tick(left - 8, 14, "head →", { class: "axis" }), tick(left + (H + 1) * size, 14, "MLP", CENTRED));
    for (let l = 0; l < L; l++)
      if (row >= 13 || l % 2 === 0) svg.append(tick(left - 8, top + (l + 0.5) * row, `layer ${l}`, MIDDLE));
    const cell = (x: Part, column: number, l: number) => {
      const open = x.a < 0 ? {} : { click: () => app.store.set({ view: "head", a: x.a, h: x.h, i: t, zoom: "" }), class: "open" };
      const rect = s("rect", { x: left + column * size + 0.5, y: top + l * row + 0.5, width: size - 1, height: row - 1, fill: ramp.css(x.value), ...open });
      rect.append(s("title", {}, `${x.name}: ${number(x.value, 3)}`));
      svg.append(rect);
    };
    let n = 0;
    for (let l = 0; l < L; l++) for (let head = 0; head < chosen.heads[l].length; head++) cell(all[n++], head, l);
    for (let l = 0; l < L; l++) cell(all[n + 1 + l], H + 0.5, l);
    svg.append(s("rect", { class: "outline", x: left, y: top, width: H * size, height: L * row, fill: "none" }), s("rect", { class: "outline", x: left + (H + 0.5) * size, y: top, width: size, height: L * row, fill: "none" }));
    const what = against ? `adds to ${name(chosen.text)} more than to ${name(against.text)}` : `adds to the logit of ${name(chosen.text)}`;
    return h("div", {}, h("div", { class: "wide-drawing" }, svg), h("div", { class: "legends" }, legend(what, ramp, { masked: "", alone: "" })));
  }

  function saved(): Export {
    const seen = app.current();
    if (!found) return { title: "What would come next", lines: [missing()], pictures: [], csv: null };
    const { state } = app.store;
    const t = position(state);
    const all = [...found.at(t), ...(more.get(t) ?? [])];
    const chosen = all.find((x) => x.id === state.token) ?? all[0];
    const rows = times(found.M, (m) =>
      times(found!.T, (at) => found!.likeliest(m, at).map((b, k) => [m === 0 ? "embeddings" : `after layer ${m - 1}`, at, token(at), k + 1, b.text, b.p])).flat(),
    ).flat();
    const who = parts(chosen, null, found.about).map((x) => [x.name, x.value]);
    const drawings = [lens, direct].filter((x) => x.querySelector("svg")).map((x) => stacked([...x.querySelectorAll<SVGSVGElement>("svg")].map(copied)));
    return {
      title: `What ${seen.model} would say next`,
      lines: [`Text: ${seen.text}`, `Left: the likeliest next token by the vectors up to each layer. Right: what each head and MLP adds to the logit of ${name(chosen.text)} after “${token(t)}” (${t}).`],
      pictures: drawings,
      csv: () => csv([["layer", "position", "token", "rank", "next", "probability"], ...rows, [], ["part", `adds to the logit of ${chosen.text} after position ${t}`], ...who]),
    };
  }

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r")) void open().catch(app.fail);
      else if (changed(state, before, "i", "j", "way", "token", "against")) draw();
    },
    redraw: draw,
    saved,
  };
}
