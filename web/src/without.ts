// A text with all heads and without some: what the model says next, and how it goes on.

import { button, counted, h, replace, select, shown, times } from "./dom";
import { drawRanked } from "./ranks";
import type { Attention } from "./format";
import { term } from "./tips";
import { percent } from "./views/next";

interface Reading {
  next: { id: number; text: string; p: number }[];
  loss: number | null;
  tokens: string[];
  text: string;
}

interface Removed {
  name: string; // of the attention
  layer: number;
  head: number;
}

const REMOVE_TIP =
  "The outputs of these heads are set to zero before the output projection. All else is the same, random numbers too: what differs is what the heads did.";
const LOSS_TIP = "Mean cross entropy of the text's own tokens, each after those before it. Less is better.";

export class Without {
  readonly node = h("details", { class: "without" });
  private removed: Removed[] = [];
  private attentions: Attention[] = [];
  private readonly chosen = h("div", { class: "controls" });
  private readonly shownIn = h("div", {});
  private layer = 0;
  private head = 0;

  /** `compare` asks for both readings and calls `show`. */
  constructor(private readonly compare: (heads: [string, number][]) => void) {
    this.node.append(
      h("summary", {}, "Remove heads, and see what changes"),
      h("p", { class: "quiet" }, "Choose heads here, or in the view of a head. ", term("How?", REMOVE_TIP)),
      this.chosen,
      this.shownIn,
    );
    this.draw();
  }

  /** The attentions of a text that was read: heads can be chosen now. */
  know(attentions: Attention[]): void {
    this.attentions = attentions.filter((a) => a.kind === "self");
    this.draw();
  }

  has(name: string, head: number): boolean {
    return this.removed.some((x) => x.name === name && x.head === head);
  }

  toggle(at: Attention, head: number): void {
    if (this.has(at.name, head)) this.removed = this.removed.filter((x) => x.name !== at.name || x.head !== head);
    else this.removed.push({ name: at.name, layer: at.layer, head });
    this.node.open = true;
    this.draw();
  }

  private draw(): void {
    const at = this.attentions[this.layer];
    const layers = this.attentions.map((a, n) => [String(n), `layer ${a.layer}`] as [string, string]);
    const heads = times(at?.heads ?? 0, (n) => [String(n), `head ${n}`] as [string, string]);
    const chips = this.removed.map((x) =>
      button(`layer ${x.layer}, head ${x.head} ×`, () => this.toggle(this.attentions.find((a) => a.name === x.name)!, x.head), { class: "chip", title: "Put it back" }),
    );
    replace(
      this.chosen,
      at && select("layer", layers, String(this.layer), (n) => this.go(Number(n), 0)),
      at && select("head", heads, String(this.head), (n) => this.go(this.layer, Number(n))),
      at && button("Remove", () => this.has(at.name, this.head) || this.toggle(at, this.head)),
      at && button("Whole layer", () => this.all(at), { title: "Remove all heads of this layer" }),
      ...chips,
      this.removed.length > 0 && button("Compare", () => this.compare(this.removed.map((x) => [x.name, x.head])), { class: "primary" }),
    );
  }

  private go(layer: number, head: number): void {
    [this.layer, this.head] = [layer, head];
    this.draw();
  }

  private all(at: Attention): void {
    for (let n = 0; n < at.heads; n++) if (!this.has(at.name, n)) this.removed.push({ name: at.name, layer: at.layer, head: n });
    this.draw();
  }

  show(whole: Reading, without: Reading): void {
    const same = whole.tokens.findIndex((x, n) => x !== without.tokens[n]);
    const from = same < 0 ? Math.min(whole.tokens.length, without.tokens.length) : same;
    const most = Math.max(whole.next[0].p, without.next[0].p);
    const removed = counted(this.removed.length, "head");
    replace(
      this.shownIn,
      h("div", { class: "two-up" }, column("All heads", whole, without, from, most), column(`Without ${removed}`, without, whole, from, most)),
    );
  }
}

function column(title: string, mine: Reading, other: Reading, from: number, most: number): HTMLElement {
  const before = new Map(other.next.map((x) => [x.id, x.p]));
  const rows = mine.next.map((x) => {
    return drawRanked(null, [shown(x.text, 18)], percent(x.p), x.p / most, before.has(x.id) ? "" : "fresh");
  });
  const kept = mine.tokens.slice(0, from).join("");
  const differs = mine.tokens.slice(from).join("");
  return h(
    "section",
    { "aria-label": title },
    h("h3", {}, title),
    mine.loss === null ? null : h("p", { class: "quiet" }, term("loss of the text", LOSS_TIP), ` ${mine.loss.toFixed(3)}`),
    h("h4", {}, "Likeliest next tokens"),
    h("ol", { class: "best" }, ...rows),
    h("h4", {}, "Goes on"),
    h("p", { class: "flow" }, kept, differs ? h("mark", {}, differs) : "", mine.tokens.length ? "" : h("span", { class: "quiet" }, "not at all")),
  );
}
