// Where keys are patches of an image: the weights of one query at their places, over the picture where the trace has it.

import { Ramp, type Mode } from "./colour";
import { h, number } from "./dom";
import type { Head } from "./head";

const JPEG = /^data:image\/jpeg;base64,[A-Za-z0-9+/]*=*$/;

export function patches(): { node: HTMLElement; draw(head: Head, i: number, mode: Mode): void } {
  const canvas = h("canvas", { role: "img", "aria-label": "Weights over the image" });
  const below = h("img", { alt: "The image as the model saw it", hidden: true });
  const frame = h("div", { class: "patches" }, below, canvas);
  const note = h("p", { class: "note" });
  const node = h("div", { hidden: true }, frame, note);
  return {
    node,
    draw(head, i, mode) {
      const { grid, picture: seen } = head.keys;
      node.hidden = !grid || i < 0;
      if (!grid || i < 0) return;
      const [rows, columns] = grid;
      const start = head.S - rows * columns;
      const line = new Float32Array(rows * columns);
      head.row(i, start, head.S, line);
      const most = line.reduce((m, x) => Math.max(m, Math.abs(x) || 0), 0) || 1;
      const ramp = new Ramp("head", head.attention.signed, mode, most);
      const picture = new ImageData(columns, rows);
      line.forEach((x, n) => ramp.paint(x === x ? x : 0, picture.data, 4 * n));
      // Any other address would let a trace from somewhere ask for something.
      const shows = seen !== undefined && JPEG.test(seen);
      below.hidden = !shows;
      if (shows && below.src !== seen) below.src = seen;
      frame.classList.toggle("pictured", shows);
      frame.style.aspectRatio = `${columns} / ${rows}`;
      canvas.width = columns;
      canvas.height = rows;
      canvas.getContext("2d")!.putImageData(picture, 0, 0);
      canvas.setAttribute("aria-label", `Weights of query ${i} over the ${rows} × ${columns} patches of the image`);
      note.textContent = `What token ${i} looks at, over the image: ${rows} × ${columns} patches, up to ${number(most, 3)}.${shows ? " Click a cell to keep it, and point here to see the image alone." : ""}`;
    },
  };
}
