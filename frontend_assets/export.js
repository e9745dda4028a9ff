// Exports below the video on the stage, in the viewer of History, and of videos that are selected there: the form comes
// from the server, which answers with the progress and the file. Leaving the page or Cancel ends the export.
(() => {
  "use strict";
  const tandem = window.tandem;
  const { set } = tandem;
  const NEWLINE = 10, UNITS = ["B", "KB", "MB", "GB"], DECIMALS = 3;
  const $ = (selector, parent = document) => parent.querySelector(selector);
  const form = () => $("form.export");
  // As `units.estimated_size` and `units.byte_size`.
  const size = (bytes, digits = 0) => {
    let step = 0;
    while (step < UNITS.length - 1 && bytes >= 995 * 1000 ** step) step += 1;
    const value = bytes / 1000 ** step;
    return `${digits ? Number(value.toPrecision(digits)) : step ? value.toFixed(1) : value} ${UNITS[step]}`;
  };
  const duration = (seconds) => seconds < 1 ? "less than a second" : `about ${Math.round(seconds)} s`;

  let opener = null, stopping = null, isInViewer = false;
  const close = (focus = true) => {
    stopping?.abort();
    if (!form()) return;
    form().remove();
    set(opener, "aria-expanded", "false");
    if (focus && opener.isConnected) opener.focus();
  };
  const open = async (button, ids) => {
    const isOpen = form() && opener === button && form().dataset.ids === ids.join(" ");
    close(isOpen);
    if (isOpen) return;
    opener = button;
    isInViewer = Boolean(button.closest("#lightbox"));
    const answer = await fetch(`tandem/export/${ids.join("-")}`, { cache: "no-store" }).catch(() => null);
    if (!answer?.ok) {
      tandem.panels.notify(await tandem.refusal(answer) || "Tandem did not answer. Try again.", { error: true });
      return;
    }
    const html = await answer.text();
    if (opener !== button || form()) return;
    $("[data-export-place]", button.closest("#lightbox, #history-finder, #stage")).innerHTML = html;
    set(button, "aria-expanded", "true");
    describe();
    form().scrollIntoView({ block: "nearest" });
    $("select", form()).focus();
  };

  // The part, as a share of the video; the estimates follow it.
  const times = () => ["start", "end"].map((name) => $(`#export-${name}`)?.valueAsNumber ?? null);
  const describe = () => {
    if (!stopping) show("");
    const [start, end] = times(), whole = Number(form().dataset.seconds);
    const share = end > start ? (end - start) / whole : 1;
    for (const { dataset } of $("select", form()).options) dataset.now = "whole" in dataset ? 1 : share;
    for (const option of $("select", form()).options) {
      const text = `${option.dataset.title}, ${size(option.dataset.bytes * option.dataset.now, 2)}`;
      if (option.textContent !== text) option.textContent = text;
    }
    const { about, seconds, now, lossless } = $("select", form()).selectedOptions[0].dataset;
    $("[data-sound]", form()).hidden = lossless === undefined;
    $("#export-about").textContent = `${about} Takes ${duration(seconds * now)}. Sizes and times are estimates.`;
  };
  const here = (name) => {
    const video = form().closest("#lightbox") ? $("#history-detail video") : tandem.stageVideo();
    if (!video) return;
    const fps = Number(form().dataset.fps), whole = Number(form().dataset.seconds);
    // The frame that is shown is part of the export.
    const frame = Math.floor(video.currentTime * fps + 0.01) + (name === "end");
    $(`#export-${name}`).value = Number(Math.min(frame / fps, whole).toFixed(DECIMALS));
    describe();
  };

  const show = (text, share = null) => {
    if (!form()) return;
    const bar = $(".bar", form()), line = $(".outcome", form()), percent = String(Math.round(100 * share));
    bar.hidden = share === null;
    set(bar, "aria-valuenow", percent);
    $("span", bar).style.width = `${percent}%`;
    if (share === null) line.removeAttribute("data-share"); else set(line, "data-share", `${percent} %`);
    if (line.textContent !== text) line.textContent = text;
  };
  // Reads lines of JSON, the last of which describes the file that follows.
  const receive = async (body) => {
    const reader = body.getReader(), parts = [];
    let line = [], file = null;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      let rest = value;
      while (!file && rest.length) {
        const end = rest.indexOf(NEWLINE);
        line.push(...(end < 0 ? rest : rest.subarray(0, end)));
        rest = end < 0 ? rest.subarray(rest.length) : rest.subarray(end + 1);
        if (end < 0) break;
        const values = JSON.parse(new TextDecoder().decode(new Uint8Array(line)));
        line = [];
        if (values.error) throw new Error(values.error);
        if ("share" in values) show("Exporting…", values.share);
        if (values.name) file = values;
      }
      if (file && rest.length) parts.push(rest);
    }
    const blob = new Blob(parts, { type: file?.type });
    if (!file || blob.size !== file.size) throw new Error("The connection was lost. Export again.");
    return { ...file, blob };
  };
  const save = ({ blob, name }) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  };
  const run = async () => {
    const current = form(), [start, end] = times(), whole = Number(current.dataset.seconds);
    const button = $("[type=submit]", current), closing = $("[data-close]", current);
    const controller = stopping = new AbortController();
    const busy = (on) => {
      for (const control of current.querySelectorAll("select, input, [data-here]")) control.disabled = on;
      set(button, "aria-disabled", String(on));
      closing.textContent = on ? "Cancel" : "Close";
    };
    busy(true);
    show("Exporting…", 0);
    try {
      const answer = await fetch("tandem/export", {
        method: "POST", headers: { "Content-Type": "application/json" }, cache: "no-store", signal: controller.signal,
        body: JSON.stringify({
          clips: current.dataset.ids.split(" "), format: $("select", current).value,
          start: start || null, end: end === whole ? null : end,
          lossless_sound: !$("[data-sound]", current).hidden && $("#export-lossless", current).checked,
        }),
      });
      if (!answer.ok) throw new Error(await tandem.refusal(answer));
      const file = await receive(answer.body);
      save(file);
      show(`Saved ${file.name}, ${size(file.size)}.`);
    } catch (error) {
      show(controller.signal.aborted ? "Cancelled." : error instanceof TypeError ? "Tandem did not answer. Try again." : error.message);
    }
    busy(false);
    if (stopping === controller) stopping = null;
  };

  tandem.openExport = open;
  // The form of a video that the stage or the viewer no longer shows is closed, unless it is being exported.
  tandem.tidyExport = () => {
    if (!form() || stopping) return;
    const { export: id = form().dataset.ids } = opener.dataset;
    if (!opener.offsetParent || id !== form().dataset.ids) close(false);
  };
  document.addEventListener("click", ({ target }) => {
    const button = target.closest("[data-export]"), place = target.closest("[data-here]");
    if (button) open(button, [button.dataset.export]);
    if (place) here(place.dataset.here);
    if (target.closest("form.export [data-close]")) { if (stopping) stopping.abort(); else close(); }
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches("form.export")) return;
    event.preventDefault();
    event.stopPropagation();
    if (!stopping) run();
  }, true);
  for (const name of ["input", "change"]) {
    document.addEventListener(name, ({ target }) => { if (target.closest("form.export")) describe(); });
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !event.target.closest?.("form.export")) return;
    event.preventDefault();
    if (stopping) stopping.abort(); else close();
  });
  // The viewer is empty by then.
  document.addEventListener("close", ({ target }) => { if (target.id === "lightbox" && isInViewer) stopping?.abort(); }, true);
})();
