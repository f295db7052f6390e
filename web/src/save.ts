// Saving what is shown: pictures with real text, numbers, and findings.

import type { Grid } from "./pooled";
import type { Matrix } from "./matrix";
import type { Cells } from "./cells";
import { colour, h, s, times } from "./dom";
import { hatching } from "./legend";
import type { Export } from "./view";

const STYLE = [
  "fill",
  "fill-opacity",
  "stroke",
  "stroke-width",
  "stroke-opacity",
  "stroke-dasharray",
  "opacity",
  "font-size",
  "font-family",
  "font-weight",
  "font-variant-numeric",
  "letter-spacing",
];

/** A copy of a drawing that looks the same anywhere: what CSS said stands in its attributes. */
export function copied(svg: SVGSVGElement): SVGSVGElement {
  const copy = svg.cloneNode(true) as SVGSVGElement;
  const [from, to] = [
    [svg, ...svg.querySelectorAll("*")],
    [copy, ...copy.querySelectorAll("*")],
  ];
  from.forEach((element, n) => {
    const style = getComputedStyle(element);
    for (const name of STYLE) {
      const value = style.getPropertyValue(name);
      if (value && value !== "none" && value !== "normal") to[n].setAttribute(name, value);
      else if (name === "fill" && value === "none") to[n].setAttribute("fill", "none");
    }
    for (const gone of ["class", "aria-hidden", "tabindex", "role", "data-k"]) to[n].removeAttribute(gone);
  });
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  copy.setAttribute("overflow", "visible"); // slanted words reach over the edge
  return copy;
}

const VECTOR = 20000; // cells that are drawn one by one; more become one picture inside the drawing

/** A matrix with its labels and its legend: cells as rectangles, or as an image where they are too many. */
export function matrixPicture(matrix: Matrix): SVGSVGElement {
  const over = matrix.node.querySelector<SVGSVGElement>("svg.over")!;
  const copy = copied(over);
  const { canvas } = matrix;
  const grid = matrix.grid!;
  const place = matrix.frame;
  if (grid.R * grid.C > VECTOR)
    copy.prepend(
      s("image", { ...place, href: canvas.toDataURL("image/png"), preserveAspectRatio: "none", "image-rendering": "pixelated" }),
    );
  else copy.prepend(cellsOf(matrix, place));
  if (matrix.hides || matrix.options.hatched) copy.prepend(...ground(matrix.node, place));
  const drawn = matrix.node.querySelector<SVGSVGElement>("svg.legend");
  return drawn ? stacked([copy, copied(drawn)]) : copy;
}

type Place = Matrix["frame"];

/** Each cell as a rectangle; hidden ones are left out. */
function cellsOf(matrix: Matrix, { x, y, width, height }: Place): SVGGElement {
  const grid = matrix.grid!;
  const pixels = matrix.picture!.data;
  const cells = s("g", { "shape-rendering": "crispEdges" });
  const across = matrix.picture!.width; // more than cells where each has several stripes
  const [w, t] = [width / across, height / grid.R];
  for (let n = 0; n < grid.R * across; n++) {
    if (!pixels[4 * n + 3]) continue;
    const fill = "#" + [0, 1, 2].map((c) => pixels[4 * n + c].toString(16).padStart(2, "0")).join("");
    const [left, top] = [x + (n % across) * w, y + Math.floor(n / across) * t];
    cells.append(s("rect", { x: round(left), y: round(top), width: round(w), height: round(t), fill }));
  }
  return cells;
}

/** The hatching behind the cells, as it shows where the mask hides them. */
function ground(at: Element, place: Place): SVGElement[] {
  const pattern = hatching("ground");
  const [back, line] = [...pattern.children] as SVGElement[];
  back.setAttribute("fill", colour("hidden", at));
  line.setAttribute("stroke", colour("hatch", at));
  return [s("defs", {}, pattern), s("rect", { ...place, fill: "url(#ground)" })];
}

/** Drawings under each other as one. */
export function stacked(parts: SVGSVGElement[]): SVGSVGElement {
  const sizes = parts.map((p) => [Number(p.getAttribute("width")), Number(p.getAttribute("height"))]);
  const width = Math.max(...sizes.map(([w]) => w));
  const height = sizes.reduce((sum, [, t]) => sum + t + 8, -8);
  let y = 0;
  parts.forEach((part, n) => {
    part.setAttribute("y", String(y));
    y += sizes[n][1] + 8;
  });
  return s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` }, ...parts);
}

function round(x: number): number {
  return Math.round(x * 100) / 100;
}

const WIDEST = 1700; // of a sheet: what goes beyond stands below

/** One drawing with a title above its parts and a few lines below; `bare`: the parts alone. */
export function sheet(saved: Export, ink: string, page: string, bare = false): SVGSVGElement {
  const pad = 24;
  const sizes = saved.pictures.map((p) => [Number(p.getAttribute("width")), Number(p.getAttribute("height"))]);
  const out = s("svg", { xmlns: "http://www.w3.org/2000/svg", role: "img" });
  const text = (words: string, y: number, size: number, weight = 400) =>
    s(
      "text",
      { x: pad, y, fill: ink, "font-size": size, "font-weight": weight, "font-family": "system-ui, sans-serif" },
      words,
    );
  const top = bare ? 8 : 64;
  let [x, y, right, bottom] = [pad, top, 0, top];
  saved.pictures.forEach((picture, n) => {
    const [w, t] = sizes[n];
    if (x > pad && x + w > WIDEST) [x, y] = [pad, bottom + pad];
    picture.setAttribute("x", String(x));
    picture.setAttribute("y", String(y));
    right = Math.max(right, x + w);
    bottom = Math.max(bottom, y + t);
    x += w + pad;
  });
  const width = Math.max(right + pad, 480);
  const lines = (bare ? [] : saved.lines).flatMap((line) => wrapped(line, Math.floor((width - 2 * pad) / 6.6)));
  const height = bottom + 20 + lines.length * 18 + pad;
  for (const [name, value] of Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }))
    out.setAttribute(name, String(value));
  out.append(
    s("title", {}, saved.title),
    s("rect", { width, height, fill: page }),
    bare ? "" : text(saved.title, 38, 19, 650),
    ...saved.pictures,
  );
  lines.forEach((line, n) => out.append(text(line, bottom + 30 + 18 * n, 12.5)));
  return out;
}

function wrapped(line: string, most: number): string[] {
  const lines: string[] = [];
  for (const word of line.split(" ")) {
    const last = lines[lines.length - 1];
    if (last !== undefined && last.length + word.length < most) lines[lines.length - 1] = `${last} ${word}`;
    else lines.push(word);
  }
  return lines;
}

export function svgText(svg: SVGSVGElement): string {
  // What XML forbids cannot stand in the file, whatever a token says.
  return new XMLSerializer()
    .serializeToString(svg)
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "\ufffd");
}

/** The drawing as dots, twice as fine. */
export async function png(svg: SVGSVGElement): Promise<Blob> {
  const [width, height] = [Number(svg.getAttribute("width")), Number(svg.getAttribute("height"))];
  const image = new Image();
  const loaded = new Promise((ok, failed) => {
    image.onload = ok;
    image.onerror = () => failed(new Error("the picture cannot be drawn; save it as SVG instead"));
  });
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(svgText(svg));
  await loaded;
  const canvas = h("canvas", { width: Math.round(2 * width), height: Math.round(2 * height) });
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((ok, failed) =>
    canvas.toBlob((blob) =>
      blob ? ok(blob) : failed(new Error("the picture is too large for PNG; save it as SVG instead")),
    ),
  );
}

/** Rows of cells with the names of rows and columns, every text in quotes. */
export function csv(rows: (string | number)[][]): string {
  const quoted = (x: string | number) =>
    typeof x === "number" ? (x === x ? String(x) : "") : `"${x.replaceAll('"', '""')}"`;
  return rows.map((row) => row.map(quoted).join(",")).join("\r\n") + "\r\n";
}

const MOST = 4e6; // cells of a file of numbers; larger matrices are written as they are shown

/** The cells in the window of a matrix; an empty field is a cell that the mask hides. */
export function matrixCsv(cells: Cells, grid: Grid): string {
  const [rows, columns] = [grid.i1 - grid.i0, grid.j1 - grid.j0];
  if (rows * columns > MOST) {
    const at = (n: number, all: number, of: number, from: number) => from + Math.floor((n * all) / of);
    const head = times(grid.C, (c) => `from ${at(c, columns, grid.C, grid.j0)}`);
    const body = times(grid.R, (r) => [
      `from ${at(r, rows, grid.R, grid.i0)}`,
      ...grid.values.subarray(r * grid.C, (r + 1) * grid.C),
    ]);
    return csv([["dots, each several cells", ...head], ...body]);
  }
  const line = new Float32Array(columns);
  const head = times(columns, (c) => cells.columns.label(grid.j0 + c));
  const body = times(rows, (r) => {
    cells.row(grid.i0 + r, grid.j0, grid.j1, line);
    return [cells.rows.label(grid.i0 + r), ...line];
  });
  return csv([["query \\ key", ...head], ...body]);
}

const HEAD = `<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 17px/1.6 system-ui, sans-serif; max-width: 60rem; margin: 3rem auto; padding: 0 1.5rem; color: #1b2129; background: #fff; }
svg { max-width: 100%; height: auto; }
blockquote { margin: 1.5rem 0; padding-left: 1rem; border-left: 3px solid #1d5fa6; white-space: pre-wrap; }
</style>`;

/** A page of its own: picture, what it is of, values, and what somebody thought of it. Elements escape their text. */
export function finding(saved: Export, svg: SVGSVGElement, note: string): string {
  const body = h(
    "body",
    {},
    h("h1", {}, saved.title),
    note ? h("blockquote", {}, note) : null,
    svg,
    h("ul", {}, ...saved.lines.map((line) => h("li", {}, line))),
    h("p", {}, "Made with the lens of regard."),
  );
  return `<!doctype html>\n<html lang="en">\n<head>\n${HEAD}\n${h("title", {}, saved.title).outerHTML}\n</head>\n${body.outerHTML}\n</html>\n`;
}

export function download(name: string, what: Blob | string, type = "text/plain"): void {
  const blob = typeof what === "string" ? new Blob([what], { type: `${type};charset=utf-8` }) : what;
  const url = URL.createObjectURL(blob);
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
