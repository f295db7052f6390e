// Where keys are patches of an image: the weights of one query at their places.

import { Ramp, type Mode } from "./colour";
import { h, number } from "./dom";
import type { Head } from "./head";

export function patches(): { node: HTMLElement; draw(head: Head, i: number, mode: Mode): void } {
  const canvas = h("canvas", { class: "patches", role: "img", "aria-label": "Weights over the image" });
  const note = h("p", { class: "note" });
  const node = h("div", { hidden: true }, canvas, note);
  return {
    node,
    draw(head, i, mode) {
      const { grid } = head.keys;
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
      canvas.width = columns;
      canvas.height = rows;
      canvas.getContext("2d")!.putImageData(picture, 0, 0);
      canvas.setAttribute("aria-label", `Weights of query ${i} over the ${rows} × ${columns} patches of the image`);
      note.textContent = `What token ${i} looks at, over the image: ${rows} × ${columns} patches, up to ${number(most, 3)}.`;
    },
  };
}
