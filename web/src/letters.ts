// Bytes that a page holds as letters: 13 bits in two of 91 letters of ASCII, all that print but " & < and \.

const VALUE = new Uint8Array(128);
let letters = 0;
for (let c = 32; c < 127; c++) if (!'"&<\\'.includes(String.fromCharCode(c))) VALUE[c] = letters++;

/** Some bytes of a block, of which `at` is a multiple of 13. */
export function bytes(text: string, at: number, count: number): Uint8Array<ArrayBuffer> {
  const out = new Uint8Array(count);
  let [place, bits, have] = [(at / 13) * 16, 0, 0];
  for (let n = 0; n < count; have -= 8, bits >>>= 8) {
    if (have < 8) {
      bits |= (VALUE[text.charCodeAt(place)] + 91 * VALUE[text.charCodeAt(place + 1)]) << have;
      place += 2;
      have += 13;
    }
    out[n++] = bits & 255;
  }
  return out;
}
