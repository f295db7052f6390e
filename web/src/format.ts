// The header of a trace, as docs/trace-format.md describes it.

export type ArrayType = "f32" | "f16" | "i32" | "i16" | "u8" | "step" | "bit";

export interface ArrayRef {
  block: number;
  at: number;
  bytes: number;
  type: ArrayType;
  shape: number[];
}

export interface Card {
  name: string;
  class: string;
  home: string;
  parameters: number;
  layers: number;
  heads: number;
  groups: number;
  width: number;
  key_width: number;
  value_width: number;
  mechanisms: string[];
  signed: boolean;
  trained: boolean | null;
  note: string;
}

export interface Sequence {
  name: string;
  text: string;
  tokens: string[];
  ids: number[] | null;
  starts: number[];
  ends: number[];
  words: number[];
  special: number[];
  visible: number[];
  positions: number[];
  prompt: number | null;
  steps: number[] | null;
  segment?: number[]; // of a pair of texts: 0, 1, or −1 for neither
  grid: [number, number] | null;
  picture?: string; // of an image: what the model saw, a JPEG as a data: address
}

export type FeatureMap = "elu" | "quadratic" | "performer" | "fourier" | "stored";

export type Weights =
  | { kind: "softmax"; scale: number; softcap: number | null }
  | { kind: "feature"; map: FeatureMap }
  | { kind: "onehot" }
  | { kind: "dense"; tile: number }
  | { kind: "recurrence"; scale: number; erases: boolean };

export type FigureName = "entropy" | "distance" | "first" | "self" | "peak";

export interface Attention {
  layer: number;
  side: "encoder" | "decoder";
  kind: "self" | "cross";
  name: string;
  mechanism: string;
  queries: number;
  keys: number;
  heads: number;
  groups: number;
  signed: boolean;
  weights: Weights;
  mask: { causal: boolean; window: number | null; chunk: number | null; hidden: boolean };
  bias: ("slopes" | "offsets")[];
  arrays: {
    q?: ArrayRef[];
    k?: ArrayRef[];
    v?: ArrayRef[];
    n?: ArrayRef;
    sign?: ArrayRef;
    choice?: ArrayRef;
    w?: ArrayRef;
    cq?: ArrayRef;
    ck?: ArrayRef;
    tiles?: ArrayRef[][];
    slopes?: ArrayRef;
    offsets?: ArrayRef;
    hidden?: ArrayRef;
    a?: ArrayRef[];
    b?: ArrayRef;
    skip?: ArrayRef;
    g?: ArrayRef[];
    vo?: ArrayRef; // length of each value after the output projection
  };
  overview: ArrayRef;
  figures: Record<FigureName, (number | null)[] | null>;
  error: number[];
  missed?: Record<string, number[]>; // of a memory: what its weights miss of the layer's outputs
}

export interface Score {
  score: number;
  baseline: number;
  effect?: number; // absent in traces of before: score less baseline
  low: number | null;
  high: number | null;
}

export interface Label {
  attention: number;
  head: number;
  label: string;
  effect: number;
  low: number | null; // of its own score; null where it is mixed
  high: number | null;
  scores: Record<string, Score>;
  rests?: (Score & { on: string }) | null; // where it rests beside what it does
}

/** A score less what even weights would have, as labels count it. */
export function effect(score: Score): number {
  return score.effect ?? score.score - score.baseline;
}

/** What a language model would say next, at each layer, and which parts speak for which token. */
export interface Predictions {
  sequence: number;
  attentions: number[]; // of each block
  tokens: [number, string][];
  why: string; // why heads do not add up to logits, or ""
  arrays: { top: ArrayRef; p: ArrayRef; candidates: ArrayRef; logits: ArrayRef; rest: ArrayRef; heads: ArrayRef[] };
}

export interface Recording {
  name: string;
  model: number;
  sequences: Sequence[];
  attentions: Attention[];
  loss: number | null;
  labels: Label[] | null;
  predictions?: Predictions | null; // absent in traces of before
}

export interface Header {
  format: string;
  version: number;
  made_by: string;
  blocks: number[];
  models: Card[];
  recordings: Recording[];
}

const VERSION = 2;

/** The header, or an error that says what to do. */
export function checked(header: Header): Header {
  if (header.format !== "regard-trace") throw new Error(`not a trace: format ${JSON.stringify(header.format)}`);
  if (header.version > VERSION) {
    throw new Error(
      `a trace of version ${header.version}; this page reads up to ${VERSION}: make it with a newer regard`,
    );
  }
  return header;
}
