// The running text beside every view, coloured by one token: what it looks at, or who looks at it.

import { extent, HeadCells } from "./cells";
import { legible, Ramp, type Extent } from "./colour";
import { button, h, press, replace, shown } from "./dom";
import { drawRanked } from "./ranks";
import type { Sequence } from "./format";
import { patches } from "./patches";
import type { State, Way } from "./state";
import { term } from "./tips";
import { letters } from "./units";
import { changed, headTitle, type App } from "./view";
import { GRADIENT_TIP, LENGTH_TIP, WEIGHT_TIP } from "./words";

const BEST = 10; // weights that are listed
const MOST = 600; // tokens that are written out; of longer texts those around the chosen one
const READ = 256; // rows that the mean over all tokens is taken from

export interface Reading {
  readonly node: HTMLElement;
  update(state: State, before: State | null): void;
  redraw(): void;
  find(): void;
  turn(): void;
}

interface Flow {
  first: number;
  pieces: HTMLElement[];
}

export function reading(app: App): Reading {
  const head = h("p", { class: "quiet" });
  const ways = h("div", { class: "ways", role: "group", "aria-label": "Which way" });
  const texts = h("div", { class: "texts" });
  const title = h("h3", {}, "The text");
  const image = patches({ over: (token) => hover(token ?? -1), pick: (token) => pick(chooses(), token) });
  const says = h("p", { class: "about", role: "status" });
  const best = h("ol", { class: "best" });
  const count = h("span", { class: "quiet", role: "status" });
  const search = h("input", { type: "search", placeholder: "find a token", "aria-label": "Find a token", "data-k": "find" });
  const node = h(
    "section",
    { class: "card reading", "aria-label": "The text" },
    h("div", { class: "top" }, title, head),
    ways,
    texts,
    image.node,
    says,
    best,
    h("div", { class: "find" }, search, count),
  );
  let cells: HeadCells | null = null;
  let scale: Extent = { most: 1, clipped: false };
  let flows: [Flow, Flow] | null = null; // of those that look, of those that are looked at: the same in self-attention
  let means: Float32Array | null = null;
  let turn = 0;

  const drawnOf = (side: Way): Sequence => (side === "to" ? cells!.head.queries : cells!.head.keys);
  const cross = () => cells!.head.queries !== cells!.head.keys;
  /** The side on which tokens are chosen. */
  const chooses = (): Way => app.store.state.way;

  async function open(state: State): Promise<void> {
    const mine = ++turn;
    const seen = app.current();
    const opened = await seen.head(state.a, state.h);
    if (state.show === "gradient" && opened.hasGradient) await opened.vectors();
    if (mine !== turn) return;
    cells = new HeadCells(opened, { words: false, sinks: state.sinks, show: state.show });
    scale = extent(cells, state.scale);
    means = null;
    head.replaceChildren(headTitle(seen, state.a, state.h));
    const { side, kind } = opened.attention;
    const written = kind === "self" && side === "decoder" && seen.recording.attentions.some((at) => at.kind === "cross");
    title.textContent = opened.keys.grid ? "The image" : written ? "The decoder's text" : "The text";
    drawWays();
    write();
    shade();
  }

  /** Asks the other way; the chosen token stays chosen. */
  function set(to: Way): void {
    const { i, j, way } = app.store.state;
    const token = way === "to" ? i : j;
    const turned = to !== way && cells && !cross() && token >= 0 ? { i: token, j: token } : {};
    app.store.set({ way: to, hover: null, ...turned });
  }

  function drawWays(): void {
    const { way } = app.store.state;
    replace(
      ways,
      button("looks at", () => set("to"), { "aria-pressed": String(way === "to"), title: "Colour the text by the weights of the chosen token (x)" }),
      button("looked at by", () => set("from"), { "aria-pressed": String(way === "from"), title: "Colour each token by its weight on the chosen one (x)" }),
    );
  }

  /** The tokens of both sides as running text. */
  function write(): void {
    const { i, j } = app.store.state;
    if (!cross()) {
      const flow = flowOf(drawnOf("to"), Math.max(i, j));
      flows = [flow.made, flow.made];
      replace(texts, flow.node);
      return;
    }
    const [asks, asked] = [flowOf(drawnOf("to"), i), flowOf(drawnOf("from"), j)];
    flows = [asks.made, asked.made];
    replace(texts, h("h4", {}, "looks"), asks.node, h("h4", {}, "is looked at"), asked.node);
  }

  function flowOf(sequence: Sequence, at: number): { made: Flow; node: HTMLElement } {
    // Patches of an image are seen in the picture.
    const n = sequence.tokens.length - (sequence.grid ? sequence.grid[0] * sequence.grid[1] : 0);
    const first = Math.max(0, Math.min(n - MOST, at - MOST / 2));
    const last = Math.min(n, first + MOST);
    const node = h("p", { class: "run", lang: "", dir: "auto" });
    const pieces: HTMLElement[] = [];
    let end = sequence.starts[first] ?? -1;
    for (let t = first; t < last; t++) {
      const [start, stop] = [sequence.starts[t], sequence.ends[t]];
      if (end >= 0 && start > end) node.append(letters(sequence).slice(end, start).join(""));
      const special = start < 0 || stop <= start;
      const written = special ? shown(sequence.tokens[t]) : plain(letters(sequence).slice(Math.max(start, end), stop).join(""));
      const piece = h("span", { class: special ? "tok special" : "tok", "data-t": t }, written || shown(sequence.tokens[t]));
      pieces.push(piece);
      node.append(special && t > first ? " " : "", piece, special ? " " : "");
      if (!special) end = stop;
    }
    if (first > 0) node.prepend(h("span", { class: "quiet" }, `… from token ${first} `));
    if (last < n) node.append(h("span", { class: "quiet" }, ` … ${n - last} more`));
    return { made: { first, pieces }, node };
  }

  /** The token that counts now: under the mouse, or chosen; −1 for none. */
  function chosen(state: State): number {
    const to = state.way === "to";
    const hover = state.hover && !state.fixed ? (to ? state.hover.i : state.hover.j) : -1;
    const token = hover >= 0 ? hover : to ? state.i : state.j;
    return token < drawnOf(state.way).tokens.length ? token : -1;
  }

  function values(token: number, way: Way): Float32Array {
    const c = cells!;
    if (token < 0) return (means ??= received(c));
    const line = new Float32Array(way === "to" ? c.columns.n : c.rows.n);
    if (way === "to") c.row(token, 0, line.length, line);
    else c.column(token, 0, line.length, line);
    return line;
  }

  function shade(): void {
    if (!cells || !flows) return;
    const { state } = app.store;
    const token = chosen(state);
    const to = state.way === "to" || token < 0;
    const line = values(token, state.way);
    const { scale: kind } = state;
    const largest = line.reduce((top, x) => (Math.abs(x) > top ? Math.abs(x) : top), 0) || 1;
    // A mean over all tokens is smaller than weights are: it has a scale of its own, as a row has.
    const own = kind === "row" || token < 0;
    const ramp = new Ramp(own ? "row" : kind, cells.signed, app.mode(), own ? largest : scale.most);
    const [mine, others] = to ? [flows[0], flows[1]] : [flows[1], flows[0]];
    for (const piece of mine.pieces) paint(piece, null);
    others.pieces.forEach((piece, n) => {
      const x = line[others.first + n];
      paint(piece, x === x ? ramp.colour(x) : null);
      piece.classList.toggle("hides", x !== x);
    });
    for (const flow of new Set(flows))
      flow.pieces.forEach((piece, n) => piece.classList.toggle("on", flow === mine && flow.first + n === token));
    tell(token, line, largest);
    const asked = `“${shown(drawnOf(to ? "to" : "from").tokens[token] ?? "")}”`;
    const what = to ? `What ${asked} looks at` : `Who looks at ${asked}`;
    const mean = `Mean ${cells.word} that each gets`;
    image.draw(drawnOf("from"), { line, at: token, says: token < 0 ? mean : what, signed: cells.signed, mode: app.mode() });
  }

  /** Where the largest are, by their colour: of what has signs the largest may be below zero. */
  function strongest(): string {
    if (cells!.signed) return "largest in the strongest colours";
    return `most on the ${app.mode() === "dark" ? "brightest" : "darkest"}`;
  }

  /** In words and numbers. */
  function tell(token: number, line: Float32Array, largest: number): void {
    const { state } = app.store;
    const [from, on] = state.way === "to" ? (["to", "from"] as const) : (["from", "to"] as const);
    const others = token < 0 ? drawnOf("from") : drawnOf(on);
    const order = [...line.keys()].filter((u) => line[u] === line[u]).sort((x, y) => Math.abs(line[y]) - Math.abs(line[x]));
    const top = order.slice(0, BEST);
    const name = (sequence: Sequence, t: number) => `“${shown(sequence.tokens[t], 14)}”`;
    const sum = top.reduce((total, u) => total + Math.abs(line[u]), 0);
    const all = order.reduce((total, u) => total + Math.abs(line[u]), 0) || 1;
    const share = order.length > BEST ? `; these ${BEST} have ${Math.round((100 * sum) / all)}% of it` : "";
    const what = cells!.word;
    const hides = order.length < line.length ? ". Struck through: hidden by the mask" : "";
    const hint = `${hides}${state.fixed ? "" : `. ${press()} a token to hold it.`}`;
    if (token < 0)
      replace(says, `Mean ${what} from all tokens, the ${strongest()}. `, h("b", {}, `${press()} a token`), state.way === "to" ? " to see what it looks at." : " to see who looks at it.");
    else if (state.way === "to")
      replace(says, h("b", {}, name(drawnOf(from), token)), ` (${token}) looks at: its largest `, term(plural(what), tip(what)), share, hint);
    else replace(says, "Who looks at ", h("b", {}, name(drawnOf(from), token)), ` (${token}): the largest `, term(plural(what), tip(what)), share, hint);
    replace(
      best,
      ...top.map((u) => {
        const go = () => pick(token < 0 ? state.way : on, u, token >= 0);
        const said = cells!.say(line[u]);
        const control = button("", go, { "aria-label": `${shown(others.tokens[u])} (${u}): ${said}`, "data-k": `best ${u}` });
        return drawRanked(control, [shown(others.tokens[u], 14), h("small", {}, ` ${u}`)], said, line[u] / largest);
      }),
    );
  }

  /** Chooses a token; `other`: of the pair the one that is not asked about, which only moves the cursor. */
  function pick(side: Way, token: number, other = false): void {
    const { state } = app.store;
    const key = side === "to" ? "i" : "j";
    const again = !other && state.fixed && state[key] === token && side === state.way;
    const twin = cells && !cross() && !other ? { i: state.way === "to" ? token : state.i, j: state.way === "from" ? token : state.j } : {};
    app.store.set(
      again ? { fixed: false, i: -1, j: -1, hover: null } : { ...twin, [key]: token, fixed: true, hover: null, zoom: within(side, token) },
    );
  }

  /** The zoom, moved so far that a token is in it. */
  function within(side: Way, token: number): string {
    const found = /^(\d+)-(\d+),(\d+)-(\d+)$/.exec(app.store.state.zoom)?.slice(1).map(Number);
    if (!found) return app.store.state.zoom;
    const at = side === "to" ? 0 : 2;
    const [from, end] = [found[at], found[at + 1]];
    if (token >= from && token < end) return app.store.state.zoom;
    const size = end - from;
    const start = Math.max(0, Math.min(drawnOf(side).tokens.length - size, token - (size >> 1)));
    [found[at], found[at + 1]] = [start, start + size];
    return `${found[0]}-${found[1]},${found[2]}-${found[3]}`;
  }

  const tokenAt = (event: Event) => {
    const piece = (event.target as Element).closest<HTMLElement>(".tok");
    if (!piece || !flows) return -1;
    const side = flows[chooses() === "to" ? 0 : 1];
    return side.pieces.includes(piece) ? Number(piece.dataset.t) : -1;
  };
  function hover(token: number): void {
    const { fixed, way, i, j } = app.store.state;
    if (fixed) return;
    app.store.set({ hover: token < 0 ? null : way === "to" ? { i: token, j } : { i, j: token } });
  }
  texts.addEventListener("pointerover", (event) => hover(tokenAt(event)));
  texts.addEventListener("pointerleave", () => !app.store.state.fixed && app.store.set({ hover: null }));
  texts.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token >= 0) pick(chooses(), token);
  });

  function matches(): number[] {
    const wanted = search.value.trim().toLowerCase();
    if (!wanted || !cells) return [];
    return drawnOf(chooses()).tokens.flatMap((token, t) => (token.toLowerCase().includes(wanted) || String(t) === wanted ? [t] : []));
  }
  function mark(): void {
    const found = new Set(matches());
    const flow = flows?.[chooses() === "to" ? 0 : 1];
    flow?.pieces.forEach((piece, n) => piece.classList.toggle("found", found.has(flow.first + n)));
    count.textContent = search.value.trim() ? (found.size ? `${found.size} found; Enter goes on` : "none") : "";
  }
  search.addEventListener("input", mark);
  search.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      search.value = "";
      mark();
      search.blur();
    }
    if (event.key !== "Enter") return;
    const found = matches();
    if (!found.length) return;
    const now = chosen(app.store.state);
    const next = found.find((t) => t > now) ?? found[0];
    if (next !== now || !app.store.state.fixed) pick(chooses(), next);
    const flow = flows![chooses() === "to" ? 0 : 1];
    if (!flow.pieces[next - flow.first]) write();
    shade();
    mark();
    count.textContent = `${found.indexOf(next) + 1} of ${found.length}`;
    const fresh = flows![chooses() === "to" ? 0 : 1];
    fresh.pieces[next - fresh.first]?.scrollIntoView({ block: "nearest" });
  });

  return {
    node,
    update(state, before) {
      if (changed(state, before, "r", "a", "h", "sinks", "show", "scale")) void open(state).catch(app.fail);
      else if (changed(state, before, "way", "i", "j", "fixed", "hover")) {
        if (changed(state, before, "way")) drawWays();
        shade();
      }
    },
    redraw: shade,
    find: () => search.focus(),
    turn: () => set(app.store.state.way === "to" ? "from" : "to"),
  };
}

function plural(what: string): string {
  return what.startsWith("length") ? "lengths handed on" : what.startsWith("share") ? "shares of the rest" : `${what}s`;
}

function tip(what: string): string {
  return what.startsWith("length") ? LENGTH_TIP : what === "gradient" ? GRADIENT_TIP : WEIGHT_TIP;
}

/** Colours a token's ground, and its letters so that they can be read on it. */
function paint(piece: HTMLElement, ground: ArrayLike<number> | null): void {
  piece.style.background = ground ? `rgb(${Array.from(ground).join(",")})` : "";
  piece.style.color = ground ? legible(ground) : "";
}

function plain(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "�");
}

/** What each key gets, as a mean over all queries; of long texts over some of them. */
function received(cells: HeadCells): Float32Array {
  const { rows, columns } = cells;
  const read = Math.max(1, Math.min(rows.n, READ, Math.ceil(1e6 / columns.n)));
  const [sum, seen, line] = [0, 1, 2].map(() => new Float32Array(columns.n));
  for (let n = 0; n < read; n++) {
    cells.row(Math.floor(((n + 0.5) * rows.n) / read), 0, columns.n, line);
    line.forEach((x, J) => {
      if (x !== x) return;
      sum[J] += x;
      seen[J]++;
    });
  }
  return sum.map((x, J) => (seen[J] ? x / read : NaN)); // of all: a late token has few that may see it
}
