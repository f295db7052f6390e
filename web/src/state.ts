// What is looked at, in one place, and the same in the address of the page.

export const VIEWS = ["heads", "head", "vectors", "compare", "masks", "positions", "layers", "next", "memory"] as const;
export type ViewName = (typeof VIEWS)[number];
export type Scale = "head" | "row" | "log";
export type Pool = "max" | "mean";
export type Show = "weight" | "gradient" | "length";
export type Way = "to" | "from";
export type Theme = "auto" | "light" | "dark";

export interface State {
  view: ViewName;
  r: number; // recording
  a: number; // attention in it
  h: number; // head of that
  i: number; // query
  j: number; // key
  fixed: boolean; // the token stays while the mouse moves
  way: Way; // what the chosen token looks at (the query i), or who looks at it (the key j)
  scale: Scale;
  pool: Pool; // of cells too small to be seen alone
  show: Show;
  over: string; // heads laid over this one, "attention.head …"
  token: number; // the next token whose logit is looked at
  against: number; // and the one that it is compared with
  words: boolean; // sub-words merged
  sinks: boolean; // sinks hidden and rows renormalised
  threshold: number; // arcs below this share of the scale are not drawn
  sort: string;
  filter: string;
  least: number; // of the score that heads are sorted by
  side: string; // which attentions the grid shows
  r2: number; // the other one to compare with
  a2: number;
  h2: number;
  zoom: string; // rows and columns shown, "from-to,from-to"
  elsewhere: string; // another occurrence of a token, "recording:token"
  order: string; // of the bars of vectors
  theme: Theme;
  hover: { i: number; j: number } | null; // under the mouse; not part of the address
}

const START: State = {
  view: "heads",
  r: 0,
  a: 0,
  h: 0,
  i: -1,
  j: -1,
  fixed: false,
  way: "to",
  scale: "head",
  pool: "max",
  show: "weight",
  over: "",
  token: -1,
  against: -1,
  words: false,
  sinks: false,
  threshold: 0.05,
  sort: "place",
  filter: "",
  least: -1,
  side: "",
  r2: -1,
  a2: -1,
  h2: -1,
  zoom: "",
  elsewhere: "",
  order: "index",
  theme: "auto",
  hover: null,
};

type Heard = (state: State, before: State) => void;

export class Store {
  state: State;
  private readonly heard: Heard[] = [];

  constructor(hash: string) {
    this.state = { ...START, ...parsed(hash) };
  }

  set(changes: Partial<State>): void {
    const before = this.state;
    const after = { ...before, ...changes };
    if (after.view !== before.view) after.hover = null; // another view is under the mouse
    if ((Object.keys(after) as (keyof State)[]).every((key) => Object.is(after[key], before[key]))) return;
    this.state = after;
    for (const heard of this.heard) heard(after, before);
  }

  /** Another address was entered, or one of before; it changes light and dark only where it says so. */
  go(hash: string): void {
    this.set({ ...START, theme: this.state.theme, ...parsed(hash) });
  }

  listen(heard: Heard): void {
    this.heard.push(heard);
  }
}

/** The state as the part of an address after #; only what differs from the beginning. */
export function written(state: State): string {
  const said = new URLSearchParams();
  for (const [key, value] of Object.entries(state)) {
    if (key !== "hover" && value !== START[key as keyof State]) said.set(key, String(value));
  }
  return said.toString();
}

/** What an address says, as far as it makes sense. */
export function parsed(hash: string): Partial<State> {
  const found: Record<string, unknown> = {};
  for (const [key, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const start = START[key as keyof State];
    if (typeof start === "number") {
      if (text !== "" && Number.isFinite(Number(text))) found[key] = Number(text);
    } else if (typeof start === "boolean") found[key] = text === "true";
    else if (typeof start === "string" && allowed(key, text)) found[key] = text;
  }
  return found as Partial<State>;
}

const CHOICES: Record<string, readonly string[]> = {
  view: VIEWS,
  scale: ["head", "row", "log"],
  pool: ["max", "mean"],
  way: ["to", "from"],
  show: ["weight", "gradient", "length"],
  theme: ["auto", "light", "dark"],
  order: ["index", "size"],
};

function allowed(key: string, text: string): boolean {
  return CHOICES[key]?.includes(text) ?? true;
}
