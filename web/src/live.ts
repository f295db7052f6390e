// The lens with a model behind it: type a text and see it, let the model go on and watch where it looks.

import { mount } from "./app";
import { button, counted, h, number, press, replace } from "./dom";
import type { Card } from "./format";
import { recordings } from "./loader";
import { opened } from "./source";
import { Told, type Line } from "./told";
import type { App } from "./view";
import { Without } from "./without";

interface About {
  model: Card;
  example: string;
  generates: boolean;
  tokens: number; // that can be read
  written: number; // tokens that can be generated at a time
}

const KEPT = "regard-text";
const ENDS: Record<string, string> = {
  end: "the model ended it",
  max: "as many tokens as asked for",
  full: "the model can read no more",
  time: "time was up",
  stop: "stopped",
};

/** Puts the box to type in into `talk` and, once there is something to see, the lens into `root`. */
export function live(root: HTMLElement, talk: HTMLElement, about: About): void {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  let app: App | null = null;
  let going: AbortController | null = null;
  let count = 0;

  const text = h("textarea", { rows: 2, "aria-label": "Text", spellcheck: "false" });
  text.value = sessionStorage.getItem(KEPT) ?? about.example;
  const says = h("p", { class: "says quiet", role: "status" });
  const told = new Told();
  const without = new Without((heads) => void comparing(heads));
  const temperature = slider("temperature", 0, 2, 0.05, 0.8, (x) => (x === 0 ? "greedy" : number(x, 3)));
  const k = slider("top-k", 0, 100, 1, 0, (x) => (x === 0 ? "all" : String(x)));
  const p = slider("top-p", 0.05, 1, 0.05, 1, (x) => (x === 1 ? "all" : number(x, 3)));
  const most = field("tokens", 1, about.written, 200);
  const seed = field("seed", 0, 2 ** 31, 0);
  const read = button("Read", () => void reading(), { class: "primary", title: "Ctrl+Enter" });
  const write = button("Go on", () => void writing(), { title: "Let the model continue the text" });
  const stop = button("Stop", () => going?.abort(), { hidden: true });

  async function ask(path: string, asked: object, signal: AbortSignal | null = null): Promise<Response> {
    const answer = await fetch(path, {
      method: "POST",
      signal,
      headers: { "content-type": "application/json", authorization: `Bearer ${token}` },
      body: JSON.stringify(asked),
    });
    if (!answer.ok) throw new Error(await answer.text());
    return answer;
  }

  /** Shows a trace of these beside those that are there. */
  async function see(asked: object): Promise<void> {
    count += 1;
    const answer = await ask("record", { ...asked, name: `text ${count}` });
    const source = opened(await answer.arrayBuffer());
    if (!app) {
      const made: App = (app = mount(root, source, {
        address: true,
        model: about.generates
          ? {
              ask,
              remove: (a, head) => without.toggle(made.current().attention(a), head),
              removed: (a, head) => without.has(made.current().attention(a).name, head),
            }
          : null,
      }));
      without.know(made.current().recording.attentions);
      const dress = () => (talk.dataset.theme = made.store.state.theme);
      made.store.listen(dress);
      dress();
      return;
    }
    const more = recordings(source);
    app.seen.push(...more);
    const { state } = app.store;
    const all = more[0].recording.attentions;
    const a = Math.min(state.a, all.length - 1);
    app.store.set({
      r: app.seen.length - more.length,
      a,
      h: Math.min(state.h, all[a].heads - 1),
      i: -1,
      j: -1,
      fixed: false,
      zoom: "",
      hover: null,
    });
  }

  function say(words: string, wrong = false): void {
    says.textContent = words;
    says.classList.toggle("bad", wrong);
  }

  async function during(does: () => Promise<void>): Promise<void> {
    sessionStorage.setItem(KEPT, text.value);
    read.disabled = write.disabled = true;
    try {
      await does();
    } catch (error) {
      const lost = error instanceof TypeError; // what fetch says when nobody answers
      say(
        lost ? "No answer: is regard serve still running?" : error instanceof Error ? error.message : String(error),
        true,
      );
    } finally {
      read.disabled = false;
      write.disabled = !about.generates;
    }
  }

  const reading = () =>
    during(async () => {
      told.clear();
      say("Reading …");
      const before = performance.now();
      await see({ text: text.value });
      say(`Read in ${number((performance.now() - before) / 1000, 2)} s.`);
    });

  const writing = () =>
    during(async () => {
      going = new AbortController();
      stop.hidden = false;
      told.clear();
      say("Writing …");
      let why = "stop";
      try {
        const answer = await ask("generate", { text: text.value, max_tokens: most.value(), ...sampled() }, going.signal);
        for await (const line of lines(answer.body!)) {
          if (line.kind === "error") throw new Error(line.message);
          if (line.kind === "end") why = line.why;
          else told.take(line);
          if (line.kind === "token") say(`${counted(told.written, "token")} …`);
        }
      } catch (error) {
        if (!going.signal.aborted) throw error;
      } finally {
        stop.hidden = true;
      }
      if (!told.written) return say(why === "stop" ? "Stopped." : `Nothing was written: ${ENDS[why] ?? why}.`);
      say(`${counted(told.written, "token")}: ${ENDS[why] ?? why}. Reading them for the lens …`);
      await see({ ids: told.ids, prompt: told.prompt });
      say(
        `${counted(told.written, "token")}: ${ENDS[why] ?? why}. ${press("Point at")} a token to see where the model looked for it; the lens below has every head.`,
      );
    });

  /** How the numbers are drawn that choose the next token. */
  const sampled = () =>
    temperature.value() > 0
      ? { temperature: temperature.value(), top_k: k.value() || null, top_p: p.value() < 1 ? p.value() : null, seed: seed.value() }
      : {};

  const comparing = (heads: [string, number][]) =>
    during(async () => {
      say(`Reading and going on twice, ${counted(Math.min(most.value(), 40), "token")} each …`);
      const asked = { text: text.value, heads, max_tokens: Math.min(most.value(), 40), ...sampled() };
      const answer = await (await ask("ablate", asked)).json();
      without.show(answer.with, answer.without);
      say(`Compared with and without ${counted(heads.length, "head")}.`);
    });

  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (!read.disabled) void reading();
    }
  });
  write.disabled = !about.generates;
  const settings = about.generates
    ? h("div", { class: "controls" }, temperature.node, k.node, p.node, most.node, seed.node)
    : h("p", { class: "quiet" }, `${about.model.class} reads and does not write on.`);
  replace(
    talk,
    h(
      "section",
      { class: "card", "aria-label": "Type a text" },
      h("div", { class: "typing" }, text, h("div", { class: "do" }, read, write, stop)),
      settings,
      says,
      told.node,
      about.generates ? without.node : null,
    ),
  );
  void reading();
}

/** The lines of a stream of JSON. */
async function* lines(body: ReadableStream<Uint8Array>): AsyncGenerator<Line> {
  const reader = body
    .pipeThrough(new TextDecoderStream() as unknown as ReadableWritablePair<string, Uint8Array>)
    .getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop()!;
    for (const part of parts) yield JSON.parse(part) as Line;
  }
}

interface Value {
  node: HTMLElement;
  value(): number;
}

function slider(
  label: string,
  min: number,
  max: number,
  step: number,
  start: number,
  words: (x: number) => string,
): Value {
  const out = h("output", {}, words(start));
  const box = h("input", {
    type: "range",
    min,
    max,
    step,
    "aria-label": label,
    input: () => (out.textContent = words(Number(box.value))),
  });
  box.value = String(start);
  return { node: h("label", { class: "field" }, h("span", {}, label), box, out), value: () => Number(box.value) };
}

function field(label: string, min: number, max: number, start: number): Value {
  const box = h("input", { type: "number", min, max, step: 1, "aria-label": label });
  box.value = String(start);
  const value = () => Math.min(max, Math.max(min, Math.round(Number(box.value) || 0)));
  return { node: h("label", { class: "field" }, h("span", {}, label), box), value };
}
