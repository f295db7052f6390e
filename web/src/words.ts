// What labels, scores and figures mean, in a sentence each: the page's own glossary.

import type { FigureName } from "./format";

const averaged = (tip: string) => `${tip} Mean over the tokens of this text.`;

export const FIGURES: Record<FigureName, { name: string; tip: string }> = {
  entropy: {
    name: "evenness (entropy)",
    tip: averaged("How evenly a token spreads its weight over the tokens that it sees: 1 is all alike, 0 is one token only."),
  },
  distance: { name: "mean distance", tip: averaged("How many tokens away the head looks, weighted.") },
  first: {
    name: "on the first token",
    tip: averaged("Weight on the first token, where heads rest that have nothing to look for."),
  },
  self: { name: "on itself", tip: averaged("Weight of a token on itself.") },
  peak: { name: "mean largest weight", tip: averaged("The largest weight of a token.") },
};

/** What a head looks at that has a label: the end of “looks at …”. */
const TARGETS: Record<string, string> = {
  previous: "the token before",
  next: "the token after",
  self: "the token itself",
  first: "the first token, where heads rest that have nothing to look for",
  separator: "special tokens such as [SEP]",
  punctuation: "punctuation",
  "same word": "the same word elsewhere",
  "rare word": "words that are rare",
  induction: "what followed the last time this token occurred",
  local: "tokens at most 3 away",
  broadcast: "one token that all others look at",
  broad: "many tokens, more evenly than chance",
};

/** Labels as there is room for them under a small picture. */
const SHORT: Record<string, string> = {
  previous: "prev.",
  separator: "separ.",
  punctuation: "punc.",
  "same word": "same",
  "rare word": "rare",
  induction: "induc.",
  broadcast: "bcast.",
};

export function shortened(label: string): string {
  return SHORT[label] ?? label;
}

export function target(label: string): string {
  return TARGETS[label] ?? `“${label}”`;
}

export function labelTip(label: string): string {
  if (label === "mixed") return "No score of this head stands out from even weights, over the texts it was measured on.";
  return `Looks at ${target(label)}. Measured over several other texts, not this one.`;
}

export const SCORE_TIP =
  "Share of the head's weight that falls on such tokens, as a mean over several other texts. The black mark is the share that even weights would have.";
export const REST_TIP =
  "Where the head puts its weight when it finds nothing to look for, over several other texts; what it does otherwise is its label.";
export const INTERVAL_TIP =
  "Effect: the share beyond even weights, (score − even) / (1 − even), with its 95% interval from resampling several other texts.";
export const ERROR_TIP =
  "The page computes weights from stored queries and keys. This is the most by which any weight of this head differs from the model's own; only digits that hold are written.";
export const EXACT_TIP =
  "The page computes weights from the model's own queries and keys, in full precision; three decimals are written.";
export const TOKEN_TIP = "What a model reads at a time: a word, a piece of one, a letter, or a patch of an image.";
export const HEAD_TIP =
  "One of the parts of a layer: for each token it decides how much to take from which tokens, its weights.";
export const WEIGHT_TIP = "A token's weights say how it mixes what the tokens it sees hand on. They sum to 1 over a row.";
export const LENGTH_TIP =
  "‖weight · v · Wₒ‖: the length of the vector that a token hands on through this head. A large weight on a token whose value is short changes little.";
export const GRADIENT_TIP = "How much the loss would change if this weight were a little larger.";
export const LENS_TIP =
  "The model's vector after each layer, read as if it were the last one: the last norm, then the table of words (logit lens). The last row is what the model says; the rows above are a way of reading it.";
export const DIRECT_TIP =
  "What a part adds to the logit by itself, with the divisor of the last norm kept as it was: embeddings, heads, MLPs and a constant add up to the logit. What a head does through later layers is not in it.";
export const LOGIT_TIP = "The score of a next token before the softmax: one more in the logit is 2.7 times the odds.";
