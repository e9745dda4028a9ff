// Settings from a video: an MP4 of Tandem has its request as JSON in the comment. The browser reads it, a few bytes at
// a time; nothing is uploaded. JSON files with a request are read too.
(() => {
  "use strict";
  const MAX_BYTES = 32 * 1024 * 1024;  // of a file's index, which holds the comment
  const MAX_TEXT = 1024 * 1024;        // of a JSON file
  const $ = (selector) => document.querySelector(selector);
  class Damaged extends Error {}

  const name = (data, at) => String.fromCharCode(...[4, 5, 6, 7].map((offset) => data.getUint8(at + offset)));
  // Returns where the content of the box at `at` begins and where it ends.
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
      if (name(data, at) === wanted) return content;
      at = content[1];
    }
    return null;
  };

  const index = async (file) => {
    for (let at = 0; at + 8 <= file.size;) {
      const data = new DataView(await file.slice(at, at + 16).arrayBuffer());
      if (at === 0 && name(data, 0) !== "ftyp") throw new Damaged();
      let size = data.getUint32(0);
      if (size === 1) size = Number(data.getBigUint64(8));
      if (size === 0) size = file.size - at;
      if (size < 8 || at + size > file.size) throw new Damaged();
      if (name(data, 0) === "moov") {
        if (size > MAX_BYTES) throw new Damaged();
        return new DataView(await file.slice(at, at + size).arrayBuffer());
      }
      at += size;
    }
    throw new Damaged();
  };

  const comment = (data) => {
    let place = box(data, 0, data.byteLength);
    for (const wanted of ["udta", "meta", "ilst", "\u00a9cmt", "data"]) {
      // A meta box has a version before what it holds.
      if (wanted === "ilst") place = [place[0] + 4, place[1]];
      place = inside(data, place, wanted);
      if (!place) return null;
    }
    return new TextDecoder().decode(new Uint8Array(data.buffer, data.byteOffset + place[0] + 8, place[1] - place[0] - 8));
  };

  // Returns the request of a result, or the request itself, with the version of the model that made it if a plan has it;
  // `null` if it is neither.
  const settingsOf = (made) => {
    const request = made?.request ?? made;
    if (typeof request?.prompt !== "string") return null;
    return made.plan ? { ...request, model_version: made.plan.model_version ?? 1 } : request;
  };

  // Returns the request of a video, `null` if it has none. Small pictures of its images are in the file too.
  const requestOf = async (file) => {
    let text;
    try {
      text = comment(await index(file));
    } catch (error) {
      if (error instanceof Damaged || error instanceof RangeError) throw new Damaged();
      throw error;
    }
    try {
      const made = JSON.parse(text).tandem;
      window.tandem.thumbnails(made.images);
      return settingsOf(made);
    } catch { return null; }
  };

  // Returns the request in a JSON file: one of Tandem's own objects that have it, or the request itself.
  const requestIn = async (file) => {
    if (file.size > MAX_TEXT) throw new Damaged();
    let content;
    try { content = JSON.parse(await file.text()); } catch { throw new Damaged(); }
    return settingsOf(content?.tandem ?? content);
  };

  // Fills the form and shows it; the server lists the values that it does not take. Without settings, the reason
  // appears where the user is.
  const restore = async (file, isDropped = false) => {
    const { panels } = window.tandem;
    const isText = /\.json$/i.test(file.name) || file.type === "application/json";
    const choose = "Choose an MP4 that Tandem generated, or a JSON file with its request.";
    let text, request = null;
    try {
      request = await (isText ? requestIn(file) : requestOf(file));
      text = request ? `Settings of “${file.name}”:` : `“${file.name}” has no settings. ${choose}`;
    } catch {
      text = `“${file.name}” is damaged or not ${isText ? "JSON" : "an MP4"}. ${choose}`;
    }
    // A video that Tandem did not make can be changed.
    if (!request && isDropped && window.tandem.takeVideo(file)) return;
    if (!request && panels.tab() !== "Make") { panels.notify(text, { error: true }); return; }
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    panels.goTo("Make");
    const line = $("#restored");
    $("#refused .restored")?.replaceChildren();
    if (request) window.tandem.fill(request, "all", text); else line.textContent = text;
    setTimeout(() => line.scrollIntoView({ block: "nearest" }), 0);
  };

  document.addEventListener("click", ({ target }) => {
    const use = target.closest("[data-use]");
    if (use) $("#restored").textContent = use.dataset.source ?? "";
  }, true);
  // What was filled in is history once the form is changed by hand, what was refused once a video is made.
  const forget = () => {
    if ($("#restored").textContent) $("#restored").textContent = "";
    $("#refused .restored")?.replaceChildren();
  };
  document.addEventListener("input", ({ target, isTrusted }) => {
    if (isTrusted && target.closest("#compose, #settings") && !$("#refused .trouble")) forget();
  });
  document.addEventListener("click", ({ target }) => { if (target.closest("#generate")) forget(); });
  document.addEventListener("change", (event) => {
    if (event.target.id !== "restore" || !event.target.files.length) return;
    restore(event.target.files[0]);
    event.target.value = "";
  });
  // A video may be dropped anywhere on the page; by default the browser would leave the page and play it.
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const hover = (on) => document.body.classList.toggle("dropping", on);
  document.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    hover(true);
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) hover(false); });
  document.addEventListener("drop", (event) => {
    hover(false);
    if (!carries(event)) return;
    event.preventDefault();
    const { files } = event.dataTransfer;
    const { takeImages, takeLatents } = window.tandem;
    if (files.length && !takeLatents(files, event.target) && !takeImages(files, event.target)) restore(files[0], true);
  }, true);
})();
