// Explanations that show where the mouse or the focus is: elements say theirs in data-tip.

import { h, type Attributes } from "./dom";

/** A word with an explanation, which the keyboard reaches too. */
export function term(word: string, tip: string, attributes: Attributes = {}): HTMLElement {
  return h("span", { class: "term", tabindex: 0, "data-tip": tip, "aria-description": tip, ...attributes }, word);
}

/** Shows the explanations of everything inside an element; the node belongs into it. */
export function tips(root: HTMLElement, signal: AbortSignal): HTMLElement {
  const box = h("div", { class: "tip", role: "tooltip", hidden: true });
  const hide = (): void => {
    box.hidden = true;
  };
  const show = (event: Event): void => {
    const on = (event.target as Element).closest?.<HTMLElement>("[data-tip]");
    if (!on) {
      hide();
      return;
    }
    box.textContent = on.dataset.tip!;
    box.hidden = false;
    const at = on.getBoundingClientRect();
    const { width, height } = box.getBoundingClientRect();
    const below = at.bottom + 6 + height < innerHeight;
    box.style.left = `${Math.max(8, Math.min(at.left, document.documentElement.clientWidth - width - 8))}px`;
    box.style.top = `${below ? at.bottom + 6 : Math.max(8, at.top - height - 6)}px`;
  };
  root.addEventListener("pointerover", show, { signal });
  root.addEventListener("focusin", (event) => (event.target as Element).matches(":focus-visible") && show(event), { signal });
  root.addEventListener("pointerleave", hide, { signal });
  root.addEventListener("focusout", hide, { signal });
  root.addEventListener("keydown", (event) => event.key === "Escape" && hide(), { signal });
  addEventListener("scroll", hide, { signal, capture: true, passive: true });
  return box;
}
