// The row below the picture: play, position, sound, original size, full screen; and the blurred frame behind the video.
(() => {
  "use strict";
  const tandem = window.tandem;
  const { set } = tandem;
  const ACTUAL = "tandem.actual-size", VOLUME = "tandem.volume";
  const BACKDROP = [12, 7];   // pixels, which the browser enlarges smoothly
  const SHOW_MS = 100, DRAW_MS = 500;
  const SHORT_SECONDS = 10;
  const FRAME_SECONDS = 1 / 16, JUMP_SECONDS = 1;
  const $ = (selector) => document.querySelector(selector);
  // All videos of a group play together; the position is that of the selected one. So do both that are compared.
  const videos = () => [...document.querySelectorAll("#picture video[src]")];
  const video = tandem.stageVideo = () => $("#picture [aria-pressed=true] video") ?? $("#picture video");
  const row = () => $("#transport .transport");
  const clock = (seconds) => `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
  // Short clips show tenths of a second, as the chip of the length does.
  const position = (now, end) => end < SHORT_SECONDS ? `${now.toFixed(1)} / ${end.toFixed(1)} s`
    : `${clock(now)} / ${clock(end)}`;

  // Videos start without sound, as browsers demand; once it is on, later ones have it too. Of a group, one is heard, and
  // none below a dialog or on another tab.
  let isLoud = false;
  const volume = () => {
    const stored = Number.parseFloat(tandem.read("localStorage", VOLUME) ?? "1");
    return stored >= 0 && stored <= 1 ? stored : 1;
  };
  const showSound = (playing) => {
    const controls = $("#transport .sound"), has = "sound" in playing.dataset;
    if (controls.hidden === has) controls.hidden = !has;
    const isHeard = isLoud && has && playing.checkVisibility() && !$("dialog[open]");
    for (const each of videos()) {
      const muted = !(isHeard && each === playing);
      if (each.muted !== muted) each.muted = muted;
      if (each.volume !== volume()) each.volume = volume();
    }
    set($("#transport [data-mute]"), "aria-pressed", String(!isLoud));
    const bar = $("#transport [data-volume]");
    if (Number(bar.value) !== volume()) bar.value = volume();
    set(bar, "aria-valuetext", `${Math.round(100 * volume())} percent`);
  };
  const mute = () => {
    if (!video() || !("sound" in video().dataset)) return;
    isLoud = !isLoud;
    show();
  };
  // One video of the page is heard: the one whose sound was turned on last.
  const silence = ({ target }) => {
    if (!(target instanceof HTMLVideoElement) || target.muted || target.paused) return;
    for (const other of document.querySelectorAll("video")) if (other !== target && !other.muted) other.muted = true;
  };
  for (const name of ["play", "volumechange"]) document.addEventListener(name, silence, true);

  let dragging = false;
  const show = () => {
    const playing = video(), line = row();
    if (!line) return;
    const actual = tandem.read("localStorage", ACTUAL) === "yes";
    if (document.body.classList.contains("actual") !== actual) document.body.classList.toggle("actual", actual);
    set($("#transport [data-actual]"), "aria-pressed", String(actual));
    if (line.hidden !== !playing) line.hidden = !playing;
    if (!playing) return;
    const button = $("#transport [data-play]"), text = playing.paused ? "Play" : "Pause";
    set(button, "aria-label", text);
    set(button, "title", `Play or pause (${tandem.hasGroup() ? "Space" : "K"})`);
    const seconds = Number.isFinite(playing.duration) ? playing.duration : 0;
    const bar = $("#transport [data-position]");
    set(bar, "max", String(seconds || 1));
    if (!dragging) bar.value = playing.currentTime;
    set(bar, "aria-valuetext", `${playing.currentTime.toFixed(1)} of ${seconds.toFixed(1)} seconds`);
    const time = position(playing.currentTime, seconds);
    if ($("#transport .time").textContent !== time) $("#transport .time").textContent = time;
    showSound(playing);
    tandem.tidyBefore();
  };
  tandem.tidyTransport = show;
  for (const name of ["play", "pause", "loadedmetadata", "seeked", "emptied"]) {
    document.addEventListener(name, ({ target }) => { if (target === video()) show(); }, true);
  }
  setInterval(() => { if (!document.hidden && video()?.paused === false) show(); }, SHOW_MS);

  // The picture's own frame, too small for details, fills what its shape leaves.
  const draw = () => {
    const canvas = $("#picture .backdrop"), shown = video() ?? $("#picture .preview:not([hidden])");
    if (!canvas || document.hidden) return;
    if (canvas.width !== BACKDROP[0]) [canvas.width, canvas.height] = BACKDROP;
    const context = canvas.getContext("2d");
    if (!shown) { context.clearRect(0, 0, ...BACKDROP); return; }
    try { context.drawImage(shown, 0, 0, ...BACKDROP); } catch { /* not decoded yet */ }
  };
  setInterval(draw, DRAW_MS);

  const toggle = tandem.togglePlay = () => {
    const { paused } = video() ?? {};
    for (const each of videos()) if (paused) each.play(); else each.pause();
  };
  const go = (seconds) => {
    for (const each of videos()) {
      if (each.duration) each.currentTime = Math.min(Math.max(seconds, 0), each.duration - FRAME_SECONDS / 2);
    }
  };
  const seek = (by) => { if (video()) go(video().currentTime + by); };
  // A video that joins a group plays in step with the others.
  document.addEventListener("loadedmetadata", ({ target }) => {
    const leader = target.matches?.("#picture .cells video") && videos().find((each) => each !== target && each.duration);
    if (!leader) return;
    target.currentTime = Math.min(leader.currentTime, target.duration);
    // Before its first frame it is not paused by the user.
    if (leader.paused && leader.currentTime) target.pause();
  }, true);
  const full = () => {
    if (document.fullscreenElement) document.exitFullscreen(); else $("#picture .mat")?.requestFullscreen?.();
  };
  document.addEventListener("click", ({ target }) => {
    if (target.closest("#transport [data-play]") || target.matches("#picture .mat > video")) toggle();
    if (target.closest("#transport [data-full]")) full();
    if (target.closest("#transport [data-mute]")) mute();
    if (target.closest("#transport [data-actual]")) {
      tandem.write("localStorage", ACTUAL, document.body.classList.contains("actual") ? "no" : "yes");
      show();
    }
  });
  document.addEventListener("dblclick", ({ target }) => { if (target.matches("#picture .mat > video")) full(); });
  document.addEventListener("input", ({ target }) => {
    if (target.matches("#transport [data-volume]")) {
      tandem.write("localStorage", VOLUME, target.value);
      isLoud = Number(target.value) > 0;
      show();
    }
    if (!target.matches("#transport [data-position]")) return;
    dragging = true;
    go(Number(target.value));
  });
  document.addEventListener("change", ({ target }) => { if (target.matches("#transport [data-position]")) dragging = false; });
  // Keys of video editors, wherever no text is typed. Keys of a group come first, see group.js.
  const KEYS = { k: toggle, f: full, m: mute, j: () => seek(-JUMP_SECONDS), l: () => seek(JUMP_SECONDS),
    ",": () => seek(-FRAME_SECONDS), ".": () => seek(FRAME_SECONDS) };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    if (tandem.isTyping(event.target)) return;
    if (event.key === "?") { $("#keys").togglePopover(); return; }
    const run = KEYS[event.key.toLowerCase()];
    if (!run || !video()?.offsetParent) return;
    event.preventDefault();
    run();
  });
})();
