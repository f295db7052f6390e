// Builds the bundle into the package. The same sources give the same bytes: no dates, no paths, pinned tools.
import { build } from "esbuild";

const out = new URL("../regard/lens/static/", import.meta.url).pathname;
const common = {
  bundle: true,
  minify: true,
  charset: "utf8",
  legalComments: "none",
  target: "es2022",
  logLevel: "warning",
};

await build({
  ...common,
  entryPoints: ["src/main.ts"],
  format: "iife",
  globalName: "regardLens",
  outfile: `${out}lens.js`,
});
await build({ ...common, entryPoints: ["src/lens.css"], outfile: `${out}lens.css` });
