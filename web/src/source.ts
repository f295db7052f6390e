// Where the bytes of a trace come from. A page holds them as inert text; other homes may fetch or be handed them.

import { checked, type ArrayRef, type Header } from "./format";
import { bytes } from "./letters";

export interface Source {
  readonly header: Header;
  /** The compressed bytes of one array. */
  bytes(ref: ArrayRef): Promise<Uint8Array<ArrayBuffer>>;
}

/** The trace inside a page: the header in #trace, blocks in #block-0, #block-1 … as letters. */
export function embedded(page: Document): Source {
  const header = checked(JSON.parse(page.getElementById("trace")!.textContent!) as Header);
  return {
    header,
    async bytes(ref) {
      return bytes((await block(page, ref.block)).textContent!, ref.at, ref.bytes);
    },
  };
}

/** A trace file as `Trace.save` writes it. */
export function opened(file: ArrayBuffer): Source {
  const all = new Uint8Array(file);
  const letters = "REGARD\x01\n";
  if (file.byteLength < 16 || [...letters].some((c, n) => all[n] !== c.charCodeAt(0))) {
    throw new Error("not a trace file: it does not begin with REGARD; expected one that Trace.save wrote");
  }
  const length = Number(new DataView(file).getBigUint64(8, true));
  if (16 + length > file.byteLength) throw new Error("the trace file ends inside its header: copy it again");
  const header = checked(JSON.parse(new TextDecoder().decode(all.subarray(16, 16 + length))) as Header);
  const starts: number[] = [];
  let at = 16 + length;
  for (const size of header.blocks) {
    starts.push(at);
    at += size;
  }
  if (at > file.byteLength) throw new Error("the trace file is shorter than its header says: copy it again");
  return {
    header,
    async bytes(ref) {
      return all.subarray(starts[ref.block] + ref.at, starts[ref.block] + ref.at + ref.bytes);
    },
  };
}

/** A block's element. The page is shown before all of it has been read, so a block may have to be waited for. */
function block(page: Document, n: number): Promise<Element> {
  return new Promise((found, failed) => {
    const look = () => {
      const element = page.getElementById(`block-${n}`);
      // Its text is complete once something follows it.
      if (element && (element.nextSibling || page.readyState !== "loading")) found(element);
      else if (page.readyState === "loading") setTimeout(look, 20);
      else failed(new Error(`block ${n} is missing: the page was cut short; make it again`));
    };
    look();
  });
}
