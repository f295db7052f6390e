// Tokens that are patches of an image: the weights of one query at their places, over the picture where the trace has it.

import { Ramp, type Mode } from "./colour";
import { h, number } from "./dom";
import type { Sequence } from "./format";

const JPEG = /^data:image\/jpeg;base64,[A-Za-z0-9+/]*=*$/;

/** What is heard of a patch: its token. */
export interface Pointed {
  over(token: number | null): void;
  pick(token: number): void;
}

/** What is drawn: a number for each token, and what it is. */
export interface Painted {
  line: Float32Array;
  at: number; // the token that is asked about; −1 for none
  says: string;
  signed: boolean;
  mode: Mode;
}

export interface Patches {
  readonly node: HTMLElement;
  draw(sequence: Sequence, painted: Painted): void;
}

export function patches(heard: Pointed): Patches {
  const canvas = h("canvas", { role: "img", "aria-label": "Weights over the image" });
  const mark = h("i", { class: "patch" });
  const frame = h("div", { class: "patches" }, canvas, mark);
  const note = h("p", { class: "note" });
  const beside = h("div", { class: "imaged" }, frame);
  const node = h("div", { hidden: true }, beside, note);
  let pictured = ""; // what is below the map, and beside it
  let [rows, columns, start] = [1, 1, 0];

  const at = (event: MouseEvent): number => {
    const box = frame.getBoundingClientRect();
    const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    const place = (part: number, of: number) => Math.max(0, Math.min(of - 1, Math.floor(part * of)));
    return start + place(y, rows) * columns + place(x, columns);
  };
  frame.addEventListener("click", (event) => heard.pick(at(event)));
  frame.addEventListener("pointermove", (event) => heard.over(at(event)));
  frame.addEventListener("pointerleave", () => heard.over(null));

  function draw(sequence: Sequence, { line, at, says, signed, mode }: Painted): void {
    const { grid, picture: seen } = sequence;
    node.hidden = !grid;
    if (!grid) return;
    [rows, columns] = grid;
    start = line.length - rows * columns;
    const values = line.subarray(start);
    const most = values.reduce((m, x) => Math.max(m, Math.abs(x) || 0), 0) || 1;
    const ramp = new Ramp("head", signed, mode, most);
    const picture = new ImageData(columns, rows);
    values.forEach((x, n) => ramp.paint(x === x ? x : 0, picture.data, 4 * n));
    // Any other address would let a trace from somewhere ask for something.
    const shows = seen && JPEG.test(seen) ? seen : "";
    if (shows !== pictured) {
      node.querySelectorAll("img").forEach((image) => image.remove());
      if (shows) for (const place of [frame, beside]) place.prepend(h("img", { alt: "The image as the model saw it", src: shows }));
      pictured = shows;
    }
    frame.classList.toggle("pictured", shows !== "");
    beside.style.setProperty("--shape", `${columns} / ${rows}`);
    canvas.width = columns;
    canvas.height = rows;
    canvas.getContext("2d")!.putImageData(picture, 0, 0);
    mark.hidden = at < start;
    if (at >= start) {
      const [row, column] = [Math.floor((at - start) / columns), (at - start) % columns];
      const places = { left: column / columns, top: row / rows, width: 1 / columns, height: 1 / rows };
      Object.entries(places).forEach(([side, part]) => mark.style.setProperty(side, `${100 * part}%`));
    }
    const over = `${says} over the ${rows} × ${columns} patches of the image`;
    canvas.setAttribute("aria-label", over);
    note.textContent = `${over}, up to ${number(most, 3)}.`;
  }

  return { node, draw };
}
