// Recordings of one or more traces, and their arrays, decoded when they are first asked for.

import { numbers } from "./arrays";
import { Head } from "./head";
import type { ArrayRef, Attention, Card, Label, Recording, Sequence } from "./format";
import type { Source } from "./source";

const MOST = 384 << 20; // bytes of decoded arrays that are kept

export class Loader {
  private readonly kept = new Map<string, Promise<Float32Array>>();
  private size = 0;

  constructor(readonly source: Source) {}

  /** An array as numbers. The ones that were not used for longest are forgotten when too many are kept. */
  array(ref: ArrayRef): Promise<Float32Array> {
    const key = `${ref.block}:${ref.at}`;
    const found = this.kept.get(key) ?? numbers(this.source, ref);
    if (!this.kept.delete(key)) this.size += bytes(ref);
    this.kept.set(key, found);
    for (const old of this.kept.keys()) {
      if (this.size <= MOST || old === key) break;
      this.kept.delete(old);
      this.size -= this.sizes.get(old)!;
    }
    this.sizes.set(key, bytes(ref));
    return found;
  }

  private readonly sizes = new Map<string, number>();

  /** The array where the trace has it. */
  async maybe(ref: ArrayRef | undefined): Promise<Float32Array | null> {
    return ref ? this.array(ref) : null;
  }
}

function bytes(ref: ArrayRef): number {
  return 4 * ref.shape.reduce((a, b) => a * b, 1);
}

/** One recording with all that is needed to look at it. */
export class Seen {
  private readonly heads = new Map<string, Promise<Head>>();

  constructor(
    readonly loader: Loader,
    readonly recording: Recording,
    readonly card: Card,
  ) {}

  /** What the model is called: of a path its last parts. */
  get model(): string {
    return this.card.name.split(/[\\/]/).filter(Boolean).slice(-2).join("/") || this.card.class;
  }

  /** All that was read and written. */
  get text(): string {
    return this.recording.sequences
      .map((q) => q.text)
      .filter(Boolean)
      .join(" → ");
  }

  attention(a: number): Attention {
    return this.recording.attentions[a];
  }

  queries(a: number): Sequence {
    return this.recording.sequences[this.attention(a).queries];
  }

  keys(a: number): Sequence {
    return this.recording.sequences[this.attention(a).keys];
  }

  label(a: number, head: number): Label | null {
    return this.recording.labels?.find((l) => l.attention === a && l.head === head) ?? null;
  }

  overview(a: number): Promise<Float32Array> {
    return this.loader.array(this.attention(a).overview);
  }

  /** One head with queries, keys and whatever else its weights need. */
  head(a: number, head: number): Promise<Head> {
    const key = `${a}:${head}`;
    let found = this.heads.get(key);
    if (!found) {
      found = Head.open(this.loader, this.attention(a), head, this.queries(a), this.keys(a));
      this.heads.set(key, found);
      if (this.heads.size > 24) this.heads.delete(this.heads.keys().next().value!);
    }
    return found;
  }
}

const NAMED = 36; // letters of a text in a name
const KEPT = 12; // letters that texts may begin with alike before they are left out

/** What recordings are called where several are there: by what differs of their models, texts and names. */
export function names(seen: Seen[]): string[] {
  const texts = seen.map((s) => Array.from(s.text));
  const differ = (all: string[]) => new Set(all).size > 1;
  const models = differ(seen.map((s) => s.model));
  const read = differ(seen.map((s) => s.text));
  const called = differ(seen.map((s) => s.recording.name)) || !models;
  const from = read ? alike(texts) : 0;
  const found = seen.map((s, r) => {
    const name = called ? s.recording.name : "";
    return [models ? s.model : "", (read && excerpt(texts[r], from)) || name].filter(Boolean).join(": ");
  });
  return found.map((name, r) => (found.indexOf(name) === found.lastIndexOf(name) ? name : `${r + 1}: ${name}`));
}

/** Where texts that begin alike begin to differ, back to the start of that word; 0 where that is soon. */
function alike(texts: string[][]): number {
  const [one] = texts;
  let n = 0;
  while (n < one.length && texts.every((text) => text[n] === one[n])) n++;
  if (n <= KEPT || n === one.length) return 0;
  const space = one.lastIndexOf(" ", n - 1);
  return space > n - KEPT ? space + 1 : n;
}

function excerpt(letters: string[], from: number): string {
  const rest = letters.slice(from);
  const cut = rest.length > NAMED ? `${rest.slice(0, NAMED - 1).join("")}…` : rest.join("");
  return from && cut ? `…${cut}` : cut;
}

/** All recordings of a source. */
export function recordings(source: Source): Seen[] {
  const loader = new Loader(source);
  return source.header.recordings.map((r) => new Seen(loader, r, source.header.models[r.model]));
}
