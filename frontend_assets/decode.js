// The panel that decodes latents: uploads files in parts, selects what was uploaded, and plays the newest clip.
(() => {
  "use strict";
  const tandem = window.tandem;
  const PART_BYTES = 8 * 1024 * 1024;   // each has to arrive within the time of a request
  const NAME = 200;
  const $ = (selector) => document.querySelector(selector);
  const { notify, request } = tandem.panels;

  let isCancelled = false, isUploading = false, uploaded = "", newest = "";
  const show = (text) => {
    $("#decode-uploading").textContent = text;
    $("#decode-upload").textContent = isUploading ? "Cancel the upload" : "Upload a file";
  };
  const random = () => [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  // Returns the name of the file on the server; empty if it was not uploaded.
  const send = async (file) => {
    const id = random(), name = encodeURIComponent(file.name.slice(-NAME).toWellFormed?.() ?? file.name.slice(-NAME));
    for (let at = 0; ; at += PART_BYTES) {
      show(`Uploading ${file.name}: ${file.size ? Math.floor(100 * at / file.size) : 0}%`);
      const body = file.slice(at, at + PART_BYTES);
      const answer = await fetch(`tandem/latents/${id}/${at}/${file.size}/${name}`, { method: "POST", body, cache: "no-store" })
        .catch(() => null);
      if (isCancelled) return "";
      if (!answer?.ok) {
        notify(await tandem.refusal(answer) || `${file.name} cannot be sent. Try again.`, { error: true, panel: "decode" });
        return "";
      }
      if (at + PART_BYTES >= file.size) return (await answer.json()).file;
    }
  };
  const upload = async (file) => {
    if (isUploading) return;
    isUploading = true;
    isCancelled = false;
    uploaded = await send(file);
    isUploading = false;
    show(uploaded ? `Uploaded: ${uploaded}` : "");
    request("decode");
  };
  // Takes files that were dropped on the panel; returns whether it did.
  tandem.takeLatents = (files, target) => {
    const isHere = Boolean(target.closest?.('[data-panel="decode"]'));
    if (isHere) upload(files[0]);
    return isHere;
  };

  document.addEventListener("click", ({ target }) => {
    if (!target.closest("#decode-upload")) return;
    if (isUploading) isCancelled = true; else $("#decode-upload-file").click();
  });
  document.addEventListener("change", ({ target }) => {
    if (target.id !== "decode-upload-file" || !target.files.length) return;
    upload(target.files[0]);
    target.value = "";
  });
  document.addEventListener("tandem:reply", ({ detail: { panel } }) => {
    if (panel !== "decode") return;
    const list = $("#decode-file");
    if (uploaded && [...list.options].some((option) => option.value === uploaded)) { list.value = uploaded; uploaded = ""; }
    const clips = [...document.querySelectorAll("#decode-clips details")];
    // A new clip closes the others.
    if (newest && clips[0] && clips[0].dataset.key !== newest) for (const clip of clips.slice(1)) clip.open = false;
    newest = clips[0]?.dataset.key ?? newest;
  });
})();
