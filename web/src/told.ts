// A text while a model writes it: each new token, and how much the model looked at each one before.

import { h, replace, select, shown, times } from "./dom";

export type Line =
  | { kind: "start"; ids: number[]; tokens: string[] }
  | { kind: "token"; id: number; text: string; p: number; heads: number[]; scale: number; weights: string }
  | { kind: "end"; why: string; ids: number[] }
  | { kind: "error"; message: string };

type Token = Extract<Line, { kind: "token" }>;

export class Told {
  readonly node = h("div", { class: "told", hidden: true });
  ids: number[] = [];
  prompt = 0;
  private tokens: HTMLElement[] = [];
  private steps: Token[] = [];
  private layer = -1; // −1: all of them
  private head = -1;
  private pointed: number | null = null; // a step
  private readonly flow = h("p", { class: "flow", lang: "" });
  private readonly choice = h("div", { class: "controls" });
  private readonly about = h("p", { class: "quiet" });

  constructor() {
    replace(this.node, this.choice, this.flow, this.about);
    this.flow.addEventListener("pointerleave", () => this.point(null));
  }

  get written(): number {
    return this.steps.length;
  }

  clear(): void {
    this.ids = [];
    this.tokens = [];
    this.steps = [];
    this.prompt = 0;
    this.pointed = null;
    this.flow.replaceChildren();
    this.about.textContent = "";
    this.node.hidden = true;
  }

  take(line: Exclude<Line, { kind: "end" | "error" }>): void {
    if (line.kind === "start") {
      this.ids = [...line.ids];
      this.prompt = line.ids.length;
      this.tokens = line.tokens.map((text) => chip(text));
      this.flow.replaceChildren(...this.tokens);
      this.node.hidden = false;
      return;
    }
    const step = this.steps.length;
    const made = chip(line.text);
    made.classList.add("new");
    made.tabIndex = 0;
    made.addEventListener("pointerenter", () => this.point(step));
    made.addEventListener("focus", () => this.point(step));
    made.setAttribute("aria-label", `${shown(line.text)}, probability ${line.p.toFixed(2)}`);
    this.ids.push(line.id);
    this.tokens.push(made);
    this.steps.push(line);
    this.flow.append(made);
    if (step === 0) this.drawChoice();
    if (this.pointed === null) this.shade();
  }

  private point(step: number | null): void {
    this.pointed = step;
    this.shade();
  }

  private drawChoice(): void {
    const heads = this.steps[0].heads;
    const layers = [["-1", "all, their mean"], ...heads.map((_, n) => [String(n), `layer ${n}`])] as [string, string][];
    const most = this.layer < 0 ? 0 : heads[this.layer];
    const each = [["-1", "all, their mean"], ...times(most, (n) => [String(n), `head ${n}`])] as [
      string,
      string,
    ][];
    const pick = (layer: number, head: number) => {
      this.layer = layer;
      this.head = head;
      this.drawChoice();
      this.shade();
    };
    replace(
      this.choice,
      h("span", { class: "quiet" }, "Where it looked for a token:"),
      select("layers", layers, String(this.layer), (n) => pick(Number(n), -1)),
      this.layer < 0 ? null : select("heads", each, String(this.head), (n) => pick(this.layer, Number(n))),
    );
  }

  /** Colours the tokens by the weights of the step that is pointed at, or of the last. */
  private shade(): void {
    const at = this.pointed ?? this.steps.length - 1;
    const step = this.steps[at];
    if (!step) return;
    const row = this.row(step);
    const top = row.reduce((a, b) => Math.max(a, Math.abs(b)), 1e-9);
    this.tokens.forEach((token, n) => {
      const w = n < row.length ? row[n] : 0;
      token.style.setProperty("--w", String(Math.round((Math.abs(w) / top) * 100) / 100));
      token.classList.toggle("below", w < 0);
      token.classList.toggle("on", n === this.prompt + at);
    });
    const best = [...row.keys()].sort((a, b) => Math.abs(row[b]) - Math.abs(row[a])).slice(0, 3);
    const most = best.map((n) => `“${shown(this.tokens[n].textContent!)}” (${n}) ${row[n].toFixed(2)}`).join(", ");
    this.about.textContent = `“${shown(step.text)}” (${this.prompt + at}), probability ${step.p.toFixed(3)}: looked most at ${most}`;
  }

  /** Weights over the tokens before a step's, of the chosen head or the mean of several. */
  private row(step: Token): number[] {
    const bytes = Int8Array.from(atob(step.weights), (c) => c.charCodeAt(0));
    const total = step.heads.reduce((a, b) => a + b, 0);
    const S = bytes.length / total;
    const before = step.heads.slice(0, Math.max(this.layer, 0)).reduce((a, b) => a + b, 0);
    let [first, last] = this.layer < 0 ? [0, total] : [before, before + step.heads[this.layer]];
    if (this.head >= 0) [first, last] = [first + this.head, first + this.head + 1];
    return times(S, (j) => {
      let sum = 0;
      for (let n = first; n < last; n++) sum += bytes[n * S + j];
      return (sum / (last - first) / 127) * step.scale;
    });
  }
}

function chip(text: string): HTMLElement {
  return h("span", { class: "piece" }, text === "" ? "·" : text);
}
