// What the model will see of a control video: its frames, as the server makes them for a job, and which part is used.
// They are asked for when the place is open and something has changed that they depend on.
(() => {
  "use strict";
  const tandem = window.tandem;
  const REST_MS = 300;   // between the last change and the question
  const KEPT = 3;        // sets of frames, so that a change can be undone at no cost
  const TENTHS = 10;
  const $ = (selector) => document.querySelector(selector);
  const { set, value } = tandem;
  const write = (node, text) => { if (node && node.textContent !== text) node.textContent = text; };
  const hide = (node, hidden) => { if (node && node.hidden !== hidden) node.hidden = hidden; };

  // By key: the pictures by the number of their frame, whether all are there, and what went wrong.
  const sets = new Map();
  let planned = null, running = null, resting = 0, at = 0;

  const isOpen = () => Boolean($("#pop-images")?.matches(":popover-open"));
  const current = () => planned ? sets.get(planned.key) : null;
  // The picture of the frame that the slider is at, or of the nearest one before it that has arrived.
  const shown = () => {
    const pictures = current()?.pictures;
    if (!pictures?.size) return null;
    for (let number = at; number >= 0; number -= planned.every) if (pictures.has(number)) return pictures.get(number);
    return pictures.values().next().value;
  };
  // The last one of the same video stays until there is another one.
  let last = { video: "", picture: null };
  tandem.controlFrame = () => {
    const video = value("control"), picture = shown() ?? (last.video === video ? last.picture : null);
    last = { video, picture };
    return video || planned ? picture : null;
  };

  const stop = () => { running?.abort(); running = null; };
  const load = async () => {
    if (!planned || current()?.done || running || !isOpen()) return;
    const { key } = planned, abort = running = new AbortController();
    const entry = { pictures: new Map(), done: false, error: "" };
    sets.delete(key);
    sets.set(key, entry);
    while (sets.size > KEPT) sets.delete(sets.keys().next().value);
    try {
      const answer = await fetch("tandem/control", {
        method: "POST", headers: { "Content-Type": "application/json" }, cache: "no-store", signal: abort.signal,
        body: JSON.stringify({ form: await tandem.panels.formValues() }),
      });
      if (!answer.ok) throw new Error(await tandem.refusal(answer));
      await lines(answer.body, (line) => {
        if (line.error) entry.error = line.error;
        // The form has changed since it was planned: the next plan asks again.
        else if (line.key && line.key !== key) abort.abort();
        else if (line.picture) entry.pictures.set(line.frame, line.picture);
        show();
      });
      entry.done = !abort.signal.aborted;
    } catch (error) {
      if (abort.signal.aborted) sets.delete(key);
      else entry.error = error.message || "Tandem did not answer. Try again.";
      entry.done = !abort.signal.aborted;
    }
    if (running === abort) running = null;
    show();
  };
  const lines = async (body, take) => {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { done, value: text } = await reader.read();
      if (done) return;
      const parts = (rest + text).split("\n");
      rest = parts.pop();
      for (const part of parts) take(JSON.parse(part));
    }
  };

  // Kinds of control frames whose model is not installed cannot be chosen.
  const showMissing = (missing) => {
    const select = $("#preprocess"), note = $("#preprocess-missing");
    if (!select || !note) return;
    for (const option of select.options) {
      const off = option.value in missing;
      if (option.disabled !== off) option.disabled = off;
    }
    write(note.querySelector("span"), Object.values(missing).join(" "));
    hide(note, !Object.keys(missing).length);
  };

  // The plan of the form; `null` without a control video and without frames that are given.
  tandem.plannedControl = (control) => {
    if (control?.missing) showMissing(control.missing);
    if (control?.key !== planned?.key) {
      stop();
      clearTimeout(resting);
      resting = setTimeout(load, REST_MS);
    }
    planned = control;
    show();
  };
  document.addEventListener("toggle", ({ target, newState }) => {
    if (target.id !== "pop-images") return;
    if (newState === "open") { show(); load(); } else stop();
  }, true);

  const show = () => { if ($("#control-frames")) tandem.showImages(); };
  // Called for each change of the places; `moving` is the start while its slider moves.
  tandem.showControl = (seconds, moving) => {
    const frames = $("#control-frames"), start = $("#field-control_start"), line = $("#control-used");
    if (!frames) return;
    const isGiven = Boolean(value("control")), entry = current();
    // Without a control video, those that are given are seen.
    hide(frames, !(planned?.frames > 1));
    hide(line, !planned);
    const clip = planned ? planned.frames / planned.fps : Infinity, now = moving ?? value("control_start") ?? 0;
    // The start of the last part that is as long as the clip.
    const last = Math.floor(TENTHS * ((seconds ?? 0) - clip)) / TENTHS, most = Math.max(last, now, 0);
    hide(start, !(isGiven && (most > 0)));
    const slider = $("#control-start");
    set(slider, "max", String(most || 1));
    if (slider.value !== String(now) && document.activeElement !== slider) slider.value = now;
    const from = `${Number(now).toFixed(1)} s`;
    write($("#field-control_start output"), from);
    set(slider, "aria-valuetext", from);
    if (!planned) return;
    const bar = $("#control-frame");
    set(bar, "max", String(Math.floor((planned.frames - 1) / planned.every) * planned.every));
    set(bar, "step", String(planned.every));
    at = Math.min(at, Number(bar.max));
    const of = `${at + 1} of ${planned.frames}`;
    write($("#control-frames output"), of);
    set(bar, "aria-valuetext", `Frame ${of}, ${(at / planned.fps).toFixed(1)} seconds`);
    const reading = isOpen() && !entry?.done ? " Reading frames…" : "";
    write(line, entry?.error || `${planned.line}${reading}`);
    line.classList.toggle("bad", Boolean(entry?.error));
  };
  // Where the slider is, in seconds of the file.
  tandem.controlSecond = () => (value("control_start") || 0) + (planned ? at / planned.fps : 0);
  document.addEventListener("input", ({ target }) => {
    if (target.id !== "control-frame") return;
    at = Number(target.value);
    show();
  });
})();
