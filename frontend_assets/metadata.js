// Reads the tags of a file that Tandem or another program made: an MP4, MOV, WebM, PNG, GIF or WebP. The browser reads
// them, a few bytes at a time. Tandem's comments are written by `runtime/video/mp4.py`, `export.py` and
// `image_metadata.py`; names are in lower case here.
(() => {
  "use strict";
  const MAX_BYTES = 32 * 1024 * 1024;      // of an index or a chunk that holds the comment
  const GIF_BYTES = 4 * 1024 * 1024;       // of the start of a GIF, which has it
  const MOVIE = "moov", SEGMENT = 0x18538067, TAGS = 0x1254C367, TAG = 0x7373, SIMPLE = 0x67C8, NAME = 0x45A3, TEXT = 0x4487;
  const MOST_TAGS = 100;
  class Damaged extends Error {}

  const part = async (file, start, end) => {
    if (end > file.size || end - start > MAX_BYTES) throw new Damaged();
    return new DataView(await file.slice(start, end).arrayBuffer());
  };
  const text = (data, start = 0, end = data.byteLength) =>
    new TextDecoder().decode(new Uint8Array(data.buffer, data.byteOffset + start, end - start));
  const latin = (data) => new TextDecoder("latin1").decode(data);

  // MP4 and MOV: boxes. Returns where the content of the box at `at` begins and where it ends.
  const boxName = (data, at) => String.fromCharCode(...[4, 5, 6, 7].map((offset) => data.getUint8(at + offset)));
  const box = (data, at, end) => {
    let size = data.getUint32(at), head = 8;
    if (size === 1) { size = Number(data.getBigUint64(at + 8)); head = 16; }
    if (size === 0) size = end - at;
    if (size < head || at + size > end) throw new Damaged();
    return [at + head, at + size];
  };
  const inside = (data, [start, end], wanted) => {
    for (let at = start; at + 8 <= end;) {
      const content = box(data, at, end);
      if (wanted === boxName(data, at) || wanted === data.getUint32(at + 4)) return content;
      at = content[1];
    }
    return null;
  };
  const movie = async (file) => {
    for (let at = 0; at + 8 <= file.size;) {
      const data = await part(file, at, Math.min(at + 16, file.size));
      let size = data.getUint32(0);
      if (size === 1) size = Number(data.getBigUint64(8));
      if (size === 0) size = file.size - at;
      if (size < 8) throw new Damaged();
      if (boxName(data, 0) === MOVIE) return part(file, at, at + size);
      at += size;
    }
    throw new Damaged();
  };
  // An MP4 has a box for each kind of tag, a MOV numbers their names.
  const mp4 = async (file) => {
    const data = await movie(file), whole = box(data, 0, data.byteLength);
    const user = inside(data, whole, "udta"), meta = inside(data, user ?? whole, "meta");
    if (!meta) return null;
    // A meta box has a version before what it holds.
    const place = [meta[0] + 4, meta[1]], keys = inside(data, place, "keys"), values = inside(data, place, "ilst");
    const wanted = new Map([["\u00a9cmt", "comment"]]), tags = {};
    for (let at = keys ? keys[0] + 8 : 0, number = 1; keys && at < keys[1] && number <= MOST_TAGS; number += 1) {
      const [start, end] = box(data, at, keys[1]);
      wanted.set(number, text(data, start, end).toLowerCase());
      at = end;
    }
    for (const [kind, name] of values ? wanted : []) {
      const value = inside(data, values, kind), content = value && inside(data, value, "data");
      if (content) tags[name] = text(data, content[0] + 8, content[1]);
    }
    return tags;
  };

  // WebM: elements. The highest bit of the first byte of a number says how long it is.
  const number = (data, at, keep) => {
    const length = Math.clz32(data.getUint8(at)) - 23;
    let value = keep ? data.getUint8(at) : data.getUint8(at) & (0xff >> length);
    for (let n = 1; n < length; n += 1) value = value * 256 + data.getUint8(at + n);
    return [value, at + length];
  };
  const element = (data, at) => {
    const [id, sizeAt] = number(data, at, true), [size, start] = number(data, sizeAt, false);
    return { id, start, end: start + size };
  };
  const children = function* (data, start, end) {
    for (let at = start; at < end;) { const child = element(data, at); yield child; at = child.end; }
  };
  const webm = async (file) => {
    for (let at = 0; at + 12 <= file.size;) {
      const { id, start, end } = element(await part(file, at, Math.min(at + 16, file.size)), 0);
      if (id === TAGS) return tagged(await part(file, at + start, at + end));
      at += id === SEGMENT ? start : end;
    }
    return null;
  };
  const tagged = (data) => {
    const tags = {};
    for (const tag of children(data, 0, data.byteLength)) {
      for (const simple of tag.id === TAG ? children(data, tag.start, tag.end) : []) {
        if (simple.id !== SIMPLE) continue;
        const fields = new Map([...children(data, simple.start, simple.end)].map((child) => [child.id, child]));
        const [name, value] = [NAME, TEXT].map((id) => fields.get(id))
          .map((child) => child && text(data, child.start, child.end));
        if (name) tags[name.toLowerCase()] = value ?? "";
      }
    }
    return tags;
  };

  const png = async (file) => {
    const tags = {};
    for (let at = 8; at + 12 <= file.size;) {
      const head = await part(file, at, at + 8), size = head.getUint32(0), name = boxName(head, 0);
      if (name === "IDAT" || Object.keys(tags).length >= MOST_TAGS) return tags;
      if (name === "iTXt" || name === "tEXt") {
        const data = await part(file, at + 8, at + 8 + size);
        if (name === "tEXt") {
          const [key, ...value] = latin(data).split("\0");
          tags[key.toLowerCase()] = value.join("\0");
        } else {  // whether it is compressed, the method, a language, and the translated name are before the text
          const [, key, compressed, value] = /^([^\0]*)\0([^])[^][^\0]*\0[^\0]*\0([^]*)$/.exec(text(data)) ?? [];
          if (compressed === "\0") tags[key.toLowerCase()] = value;
        }
      }
      at += 12 + size;
    }
    throw new Damaged();
  };

  const gif = async (file) => {
    const data = await part(file, 0, Math.min(file.size, GIF_BYTES));
    const colors = data.getUint8(10) & 0x80 ? 3 << ((data.getUint8(10) & 7) + 1) : 0;
    for (let at = 13 + colors; data.getUint8(at) === 0x21;) {
      const isComment = data.getUint8(at + 1) === 0xfe, blocks = [];
      for (at += 2; data.getUint8(at); at += 1 + data.getUint8(at)) blocks.push(text(data, at + 1, at + 1 + data.getUint8(at)));
      if (isComment) return { comment: blocks.join("") };
      at += 1;
    }
    return null;
  };

  const webp = async (file) => {
    for (let at = 12; at + 8 <= file.size;) {
      const head = await part(file, at, at + 8), size = head.getUint32(4, true);
      if (text(head, 0, 4) === "XMP ") {
        const xmp = new DOMParser().parseFromString(text(await part(file, at + 8, at + 8 + size)), "application/xml");
        const comment = xmp.getElementsByTagNameNS("*", "li")[0]?.textContent;
        return comment ? { comment } : null;
      }
      at += 8 + size + size % 2;
    }
    return null;
  };

  const READERS = [
    ["\x89PNG", 0, png], ["GIF8", 0, gif], ["WEBP", 8, webp], ["\x1aE\xdf\xa3", 0, webm], ["ftyp", 4, mp4],
  ];
  window.tandem.Damaged = Damaged;
  // Returns the texts of a file's tags by name.
  window.tandem.tagsOf = async (file) => {
    const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
    const [, , read] = READERS.find(([bytes, at]) => start.startsWith(bytes, at)) ?? [];
    if (!read) throw new Damaged();
    try {
      return await read(file) ?? {};
    } catch (error) {
      if (error instanceof Damaged || error instanceof RangeError) throw new Damaged();
      throw error;
    }
  };
})();
