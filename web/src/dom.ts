// Elements made of plain values. Text only ever becomes a text node, so no token can become markup.

type Child = Node | string | number | null | false | undefined;
type Listener = (event: never) => void;
export type Attributes = Record<string, string | number | boolean | null | undefined | Listener>;

const SVG = "http://www.w3.org/2000/svg";

function fill<E extends Element>(element: E, attributes: Attributes, children: Child[]): E {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as unknown as EventListener);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(
    ...children
      .filter((c) => c !== null && c !== false && c !== undefined)
      .map((c) => (c instanceof Node ? c : String(c))),
  );
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return fill(document.createElement(name), attributes, children);
}

export function s<K extends keyof SVGElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

/** Words in a drawing: beside a place where nothing else is said, else as `more` has it. */
export function tick(x: number, y: number, text: string, more: Attributes = {}): SVGTextElement {
  return s("text", { class: "tick", "text-anchor": "end", x, y, ...more }, text);
}

/** Words over or under a place. */
export const CENTRED = { "text-anchor": "middle" };
/** Words as high as a place. */
export const MIDDLE = { dy: "0.33em" };

/** A labelled choice among values. */
export function select<T extends string>(
  label: string,
  options: readonly (readonly [T, string])[],
  value: T,
  chosen: (value: T) => void,
): HTMLLabelElement {
  const box = h("select", {
    "data-k": label,
    "aria-label": label,
    change: (event: Event) => chosen((event.target as HTMLSelectElement).value as T),
  });
  for (const [key, text] of options) box.append(h("option", { value: key, selected: key === value }, text));
  return h("label", { class: "field" }, h("span", {}, label), box);
}

/** A switch. */
export function toggle(label: string, on: boolean, changed: (on: boolean) => void, hint = ""): HTMLLabelElement {
  const box = h("input", {
    type: "checkbox",
    role: "switch",
    "data-k": label,
    change: (event: Event) => changed((event.target as HTMLInputElement).checked),
  });
  box.checked = on;
  return h("label", { class: "switch", title: hint || null }, box, h("span", {}, label));
}

export function button(label: string, pressed: () => void, attributes: Attributes = {}): HTMLButtonElement {
  return h(
    "button",
    { type: "button", "data-k": (attributes["aria-label"] as string) ?? label, click: pressed, ...attributes },
    label,
  );
}

/** Puts new children in place of the old; a control that had the focus has it again. */
export function replace(node: Element, ...children: Child[]): void {
  const key = node.contains(document.activeElement) ? document.activeElement?.getAttribute("data-k") : null;
  node.replaceChildren();
  fill(node, {}, children);
  if (key) node.querySelector<HTMLElement>(`[data-k="${CSS.escape(key)}"]`)?.focus();
}

/** The value of a CSS variable here and now. */
export function colour(name: string, at: Element): string {
  return getComputedStyle(at).getPropertyValue(`--${name}`).trim();
}

const GLYPHS: Record<string, string> = { "\n": "↵", "\t": "⇥", "\r": "␍", " ": "␣", "\u00a0": "⍽", "": "∅" };

/** A token as people can see it: white space and control characters get signs. */
export function shown(token: string, most = 24): string {
  const plain = /^\s*$/.test(token)
    ? [...token].map((c) => GLYPHS[c] ?? "␣").join("") || GLYPHS[""]
    : token
        .replace(/[\n\t\r]/g, (c) => GLYPHS[c])
        .replace(/[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, "�");
  const letters = Array.from(plain);
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : plain;
}

/** What somebody does to choose something: without a mouse there is nothing to click or to point with. */
export function press(mouse = "Click"): string {
  return matchMedia("(hover: none)").matches ? "Tap" : mouse;
}

/** What a function says of 0, 1, 2 … up to a number. */
export function times<T>(n: number, of: (n: number) => T): T[] {
  return Array.from({ length: n }, (_, at) => of(at));
}

/** A number as it reads best. */
export function number(x: number | null | undefined, digits = 4): string {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x === Infinity) return "∞";
  if (x === -Infinity) return "−∞";
  const size = Math.abs(x);
  const text = size !== 0 && (size < 1e-4 || size >= 1e5) ? x.toExponential(Math.min(2, digits - 1)) : String(Number(x.toPrecision(digits)));
  return text.replaceAll("-", "−");
}

/** A number with so many digits, zeros at its end included: 3.60 says more than 3.6. */
export function significant(x: number | null | undefined, digits = 3): string {
  const plain = number(x, digits);
  if (!x || !Number.isFinite(x) || plain.includes("e")) return plain;
  const rounded = Number(x.toPrecision(digits));
  return rounded.toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(rounded))))).replace("-", "−");
}

/** A number with so many decimals, all of which are known to hold; one too small for them is said to be so. */
export function fixed(x: number, decimals: number): string {
  if (!Number.isFinite(x)) return number(x);
  const half = 0.5 * 10 ** -decimals;
  const said = half.toFixed(decimals + 1);
  if (x !== 0 && Math.abs(x) < half) return x < 0 ? `>−${said}` : `<${said}`;
  return x.toFixed(decimals).replace("-", "−");
}

export function counted(n: number, noun: string, many = `${noun}s`): string {
  return `${n.toLocaleString("en")} ${n === 1 ? noun : many}`;
}
