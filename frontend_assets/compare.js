// Plays two videos frame by frame, whatever their frame rates. The shorter one stops on its last frame. One of them, or
// none, is heard.
(() => {
  "use strict";
  const SLACK = 1.5;  // frames that a video may be off while it plays, before it is corrected
  let frame = 0, playing = false, began = 0, from = 0, shown = "";

  const root = () => document.querySelector("[data-compare]");
  const clips = () => [...(root()?.querySelectorAll("figure video") ?? [])].map((video) => ({
    video, fps: Number(video.dataset.fps), frames: Number(video.dataset.frames), times: Number(video.dataset.times),
  }));
  const total = (all) => Math.max(...all.map((clip) => clip.frames));
  // The middle of a generated frame, so that rounding never shows a neighbouring or an interpolated one.
  const timeOf = (clip, n) => (Math.min(n, clip.frames - 1) + 0.5 / clip.times) / clip.fps;

  const draw = (all) => {
    const scrub = root().querySelector("[data-scrub]");
    if (document.activeElement !== scrub || playing) scrub.value = frame;
    scrub.setAttribute("aria-valuetext", `Frame ${frame + 1} of ${total(all)}`);
    root().querySelector("[data-frame]").textContent = `${frame + 1} / ${total(all)}`;
    root().querySelector("[data-play]").textContent = playing ? "Pause" : "Play";
  };
  const seek = (n) => {
    const all = clips();
    if (!all.length) return;
    frame = Math.max(0, Math.min(n, total(all) - 1));
    for (const clip of all) clip.video.currentTime = timeOf(clip, frame);
    draw(all);
  };
  const pause = () => {
    playing = false;
    for (const { video } of clips()) video.pause();
    seek(frame);
  };
  const play = () => {
    const all = clips();
    if (!all.length) return;
    if (frame >= total(all) - 1) seek(0);
    playing = true;
    began = performance.now();
    from = frame;
    for (const clip of all) {
      clip.video.playbackRate = Math.min(Math.max(all[0].fps / clip.fps, 0.0625), 16);
      clip.video.play().catch(() => {});
    }
    requestAnimationFrame(follow);
  };
  const follow = (now) => {
    const all = clips();
    if (!playing || !all.length) { playing = false; return; }
    const exact = from + (now - began) / 1000 * all[0].fps;
    frame = Math.min(Math.max(Math.floor(exact), 0), total(all) - 1);
    for (const clip of all) {
      const there = Math.min(exact, clip.frames - 1) / clip.fps;
      if (exact >= clip.frames - 1) {
        if (!clip.video.paused) { clip.video.pause(); clip.video.currentTime = timeOf(clip, clip.frames - 1); }
      } else if (Math.abs(clip.video.currentTime - there) * clip.fps > SLACK && !clip.video.seeking) {
        clip.video.currentTime = there;
      }
    }
    draw(all);
    if (exact >= total(all)) { pause(); return; }
    requestAnimationFrame(follow);
  };
  // The button of a clip turns its sound on, and that of the other one off.
  const hear = (name) => {
    for (const button of root().querySelectorAll("[data-hear]")) {
      const on = button.dataset.hear === name && button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      root().querySelector(`[data-clip="${button.dataset.hear}"] video`).muted = !on;
    }
  };
  const step = (by) => { if (playing) pause(); seek(frame + by); };

  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-compare]")) return;
    if (event.target.closest("[data-play]")) { if (playing) pause(); else play(); }
    const by = event.target.closest("[data-step]");
    if (by) step(Number(by.dataset.step));
    const heard = event.target.closest("[data-hear]");
    if (heard) hear(heard.dataset.hear);
    const wipe = event.target.closest("[data-wipe]");
    if (wipe) {
      const on = wipe.getAttribute("aria-pressed") !== "true";
      wipe.setAttribute("aria-pressed", String(on));
      root().dataset.mode = on ? "wipe" : "side";
    }
  });
  document.addEventListener("input", (event) => {
    if (!event.target.closest("[data-compare]")) return;
    if (event.target.matches("[data-scrub]")) { if (playing) pause(); seek(Number(event.target.value)); }
    if (event.target.matches("[data-edge]")) root().style.setProperty("--edge-at", `${event.target.value}%`);
  });
  document.addEventListener("keydown", (event) => {
    if (!event.target.closest?.("[data-compare]") || event.ctrlKey || event.metaKey || event.altKey) return;
    const typed = event.target.matches("input, select, textarea");
    if (event.key === " " && !typed && !event.target.matches("button")) {
      event.preventDefault();
      if (playing) pause(); else play();
    }
    if (["ArrowLeft", "ArrowRight"].includes(event.key) && !typed) {
      event.preventDefault();
      step(event.key === "ArrowLeft" ? -1 : 1);
    }
  });
  // Another pair starts at its first frame.
  new MutationObserver(() => {
    const now = root()?.dataset.compare ?? "";
    if (now === shown) return;
    shown = now;
    playing = false;
    frame = 0;
    if (!now) return;
    root().dataset.mode = "side";
    root().querySelector("[data-wipe]").setAttribute("aria-pressed", "false");
    hear("");
    for (const clip of clips()) clip.video.addEventListener("loadedmetadata", () => seek(frame), { once: true });
  }).observe(document.documentElement, { subtree: true, childList: true, attributes: true,
    attributeFilter: ["data-compare"] });
})();
