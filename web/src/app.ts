// The frame around the views: which recording, which view, keys, colours, saving.

import type { Mode } from "./colour";
import { button, h, replace, select } from "./dom";
import { help } from "./help";
import { names, recordings, type Seen } from "./loader";
import { reading } from "./reading";
import { saver } from "./saver";
import { opened, type Source } from "./source";
import { Store, VIEWS, written, type State, type Theme, type ViewName } from "./state";
import { suggestions } from "./suggest";
import { tips } from "./tips";
import { neighbour, type App, type Asks, type View } from "./view";
import { compareView } from "./views/compare";
import { headView } from "./views/head";
import { headsView } from "./views/heads";
import { nextView } from "./views/next";
import { layersView } from "./views/layers";
import { masksView } from "./views/masks";
import { memoryView } from "./views/memory";
import { positionsView } from "./views/positions";
import { vectorsView } from "./views/vectors";

export interface Settings {
  /** Keep the state in the address of the page. */
  address?: boolean;
  /** The model behind the page. */
  model?: Asks | null;
}

const MADE: Record<ViewName, (app: App) => View> = {
  heads: headsView,
  head: headView,
  vectors: vectorsView,
  compare: compareView,
  masks: masksView,
  positions: positionsView,
  layers: layersView,
  next: nextView,
  memory: memoryView,
};
const NAMES: Record<ViewName, string> = {
  heads: "All heads",
  head: "Head",
  vectors: "Vectors",
  compare: "Compare",
  masks: "Masks",
  positions: "Positions",
  layers: "Layers",
  next: "Next token",
  memory: "Memory",
};
/** What each view answers. */
const ANSWERS: Record<ViewName, string> = {
  heads: "All heads at a glance",
  head: "One head: every weight",
  vectors: "How one weight comes about",
  compare: "What differs between two texts, models or heads",
  masks: "Who may look at whom, and why not",
  positions: "How far heads look",
  layers: "How heads change over the layers",
  next: "What the model would say next, at each layer, and which heads make it likely",
  memory: "What a memory that fades holds, and how long",
};
/** What makes another entry of the history, so that Back leads to it. */
const PLACES = ["view", "r", "a", "h", "r2", "a2", "h2"] as const;
const THEMES: Theme[] = ["auto", "light", "dark"];

/** Shows a trace inside an element. */
export function mount(root: HTMLElement, source: Source, settings: Settings = {}): App {
  const seen = recordings(source);
  const address = settings.address && location.protocol !== "about:"; // the frame of a notebook has none
  const store = new Store(address ? location.hash : "");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const wrong = h("p", { class: "wrong", role: "alert", hidden: true });
  const bar = h("header", { class: "bar" });
  const main = h("main", { tabindex: -1 });
  const beside = h("aside", { class: "side", "aria-label": "Text and figures" });
  const over = new AbortController(); // ends all listening
  const { signal } = over;
  let view: View | null = null;
  let waiting = 0; // to write the address
  let going = false; // to an address that is in the history already

  const app: App = {
    store,
    seen,
    model: settings.model ?? null,
    mode: (): Mode => (store.state.theme === "auto" ? (dark.matches ? "dark" : "light") : store.state.theme),
    current: () => seen[store.state.r],
    fail(error) {
      wrong.hidden = false;
      wrong.textContent = error instanceof Error ? error.message : String(error);
      console.error(error);
    },
    unmount() {
      over.abort();
      clearTimeout(waiting);
      view?.destroy?.();
      root.replaceChildren();
    },
  };
  const keys = help();
  const saving = saver(app, () => view!, signal);
  const text = reading(app);

  function drawBar(state: State): void {
    const card = app.current().card;
    const trained = card.trained === false ? ", untrained" : "";
    const file = h("input", {
      type: "file",
      accept: ".trace",
      hidden: true,
      change: () => void add(file.files?.[0]),
    });
    replace(
      bar,
      h(
        "div",
        { class: "who" },
        h("h1", { title: card.name }, app.current().model),
        h(
          "p",
          { class: "quiet" },
          `${card.class}, ${card.layers} layers × ${card.heads} heads${card.groups < card.heads ? ` (${card.groups} key heads)` : ""}, ${card.mechanisms.join(", ")}${trained}`,
        ),
      ),
      h(
        "nav",
        { "aria-label": "Views" },
        ...views().map((name, n) =>
          h(
            "a",
            {
              class: "tab",
              href: link(name),
              "data-view": name,
              "data-k": NAMES[name],
              "aria-current": state.view === name ? "page" : null,
              title: `${ANSWERS[name]} (key ${n + 1})`,
              click(event: MouseEvent) {
                if (event.ctrlKey || event.metaKey || event.shiftKey) return; // a window of its own
                event.preventDefault();
                store.set({ view: name });
              },
            },
            NAMES[name],
          ),
        ),
      ),
      h(
        "div",
        { class: "right" },
        seen.length > 1
          ? select(
              "text",
              names(seen).map((name, r) => [String(r), name] as const),
              String(state.r),
              (r) => choose(Number(r)),
            )
          : null,
        button("Open…", () => file.click(), { title: "Add a .trace file, to compare" }),
        file,
        button("Save…", () => saving.open(), { title: "Save what is shown: SVG, PNG, CSV, PDF, a page (e)" }),
        button({ auto: "Auto", light: "Light", dark: "Dark" }[state.theme], turn, {
          "aria-label": `Colours: ${state.theme}`,
          title: "Light or dark (t)",
        }),
        button("?", () => keys.showModal(), { "aria-label": "Keys", title: "Keys (?)" }),
      ),
    );
  }

  /** The views that this recording has: without gated or delta attention no memory, and an encoder says no next token. */
  function views(): ViewName[] {
    const { attentions, predictions } = app.current().recording;
    const has: Partial<Record<ViewName, boolean>> = {
      memory: attentions.some((at) => at.weights.kind === "recurrence"),
      next: Boolean(predictions) || !attentions.some((at) => at.side === "encoder"),
    };
    return VIEWS.filter((name) => has[name] ?? true);
  }

  /** On a narrow screen the tab of the view may be out of sight. */
  function reveal(): void {
    const tab = bar.querySelector<HTMLElement>("[aria-current]");
    const nav = tab?.parentElement;
    if (tab && nav) nav.scrollLeft = tab.offsetLeft - (nav.clientWidth - tab.clientWidth) / 2;
  }

  function link(name: ViewName): string {
    return `#${written({ ...store.state, view: name })}`;
  }

  /** Puts the state into the address: as a new entry of the history where another place is looked at. */
  function write(state: State, before: State): void {
    bar.querySelectorAll<HTMLAnchorElement>("a.tab").forEach((a) => a.setAttribute("href", link(a.dataset.view as ViewName)));
    if (!address || going || written(state) === written(before)) return;
    clearTimeout(waiting);
    if (PLACES.some((key) => state[key] !== before[key])) {
      history.replaceState(null, "", `#${written(before)}`);
      history.pushState(null, "", `#${written(state)}`);
    } else waiting = setTimeout(() => history.replaceState(null, "", `#${written(store.state)}`), 120);
  }

  function choose(r: number): void {
    const { a, h: head } = store.state;
    const all = seen[r].recording.attentions;
    const at = Math.min(a, all.length - 1);
    store.set({
      r,
      a: at,
      h: Math.min(head, all[at].heads - 1),
      i: -1,
      j: -1,
      fixed: false,
      zoom: "",
      hover: null,
    });
  }

  function turn(): void {
    store.set({ theme: THEMES[(THEMES.indexOf(store.state.theme) + 1) % THEMES.length] });
  }

  async function add(file: File | undefined): Promise<void> {
    if (!file) return;
    try {
      const more: Seen[] = recordings(opened(await file.arrayBuffer()));
      seen.push(...more);
      store.set({ view: "compare", r2: seen.length - more.length, a2: -1, h2: -1, zoom: "" });
      drawBar(store.state);
    } catch (error) {
      app.fail(error);
    }
  }

  /** Numbers that an address may have wrong. */
  function clamp(): void {
    const s = store.state;
    const fit = (n: number, size: number) => (Number.isInteger(n) && n >= 0 && n < size ? n : 0);
    const r = fit(s.r, seen.length);
    const a = fit(s.a, seen[r].recording.attentions.length);
    store.set({ r, a, h: fit(s.h, seen[r].attention(a).heads) });
  }

  function update(state: State, before: State | null): void {
    root.dataset.theme = state.theme;
    if (!before || state.view !== before.view || state.r !== before.r || state.theme !== before.theme) {
      drawBar(state);
      reveal();
    }
    if (!view || !before || state.view !== before.view) {
      view?.destroy?.();
      wrong.hidden = true;
      const focused = main.contains(document.activeElement);
      view = MADE[state.view](app);
      main.replaceChildren(view.node);
      beside.replaceChildren(text.node, ...(view.aside ? [view.aside] : []));
      root.dataset.view = state.view;
      if (focused) main.focus();
      document.title = address ? `${NAMES[state.view]} · ${app.current().model} · regard` : document.title;
      view.update(state, null);
    } else {
      view.update(state, before);
      if (state.theme !== before.theme) view.redraw();
    }
    text.update(state, before);
    if (before && state.theme !== before.theme) text.redraw();
  }

  if (address && location.hash.length < 2) {
    const [first] = suggestions(seen[0]); // something to look at before anything was chosen
    if (first) store.set({ a: first.a, h: first.h });
  }
  clamp();
  store.listen((state, before) => {
    update(state, before);
    write(state, before);
  });
  if (address) {
    const went = () => {
      clearTimeout(waiting);
      going = true;
      store.go(location.hash);
      clamp();
      going = false;
    };
    window.addEventListener("hashchange", went, { signal });
  }
  const repaint = () => {
    view?.redraw();
    text.redraw();
  };
  dark.addEventListener("change", repaint, { signal });
  let width = 0;
  const room = new ResizeObserver(() => {
    const now = main.clientWidth;
    if (Math.abs(now - width) > 8) view?.redraw();
    width = now;
  });
  room.observe(main);
  signal.addEventListener("abort", () => room.disconnect());
  root.classList.add("lens");
  root.replaceChildren(bar, wrong, h("div", { class: "body" }, main, beside), keys, saving.node, saving.paper, tips(root, signal));
  root.addEventListener("keydown", pressed, { signal });
  const lost = (event: KeyboardEvent) => event.target === document.body && pressed(event);
  document.addEventListener("keydown", lost, { signal });

  function pressed(event: KeyboardEvent): void {
    const on = event.target as HTMLElement;
    if (
      event.defaultPrevented ||
      event.ctrlKey ||
      event.metaKey ||
      event.altKey ||
      on.closest?.("dialog, textarea, select, input:not([type=checkbox])")
    )
      return;
    const { state } = store;
    const step = (by: number) => store.set({ ...neighbour(app.current(), state.a, state.h, by), zoom: "" });
    const does: Record<string, () => void> = {
      "?": () => keys.showModal(),
      e: () => saving.open(),
      t: turn,
      w: () => store.set({ words: !state.words, zoom: "" }),
      s: () => store.set({ sinks: !state.sinks }),
      x: () => text.turn(),
      "/": () => text.find(),
      c: () => store.set({ scale: ({ head: "row", row: "log", log: "head" } as const)[state.scale] }),
      "[": () => step(-1),
      "]": () => step(1),
      Escape: () => store.set(state.fixed ? { fixed: false, i: -1, j: -1, hover: null } : { view: "heads" }),
    };
    views().forEach((name, n) => (does[String(n + 1)] = () => store.set({ view: name })));
    if (!does[event.key]) return;
    event.preventDefault();
    does[event.key]();
  }

  width = main.clientWidth; // what the first drawing is made for
  update(store.state, null);
  return app;
}
