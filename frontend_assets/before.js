// Compares the video on the stage with what it was made from: both play in step, one on each side of a divider.
(() => {
  "use strict";
  const tandem = window.tandem;
  const SLACK = 0.1;   // seconds that both may be apart while they play
  const $ = (selector) => document.querySelector(selector);
  const { set } = tandem;
  const before = () => $("#picture .mat > video.before");
  const after = () => $("#picture .mat > video:not(.before)");
  let isOn = false;

  // The divider is on the picture, which its frame does not fill.
  const place = () => {
    const video = after(), mat = $("#picture .mat");
    if (!isOn || !video?.videoWidth) return;
    const box = video.getBoundingClientRect(), scale = Math.min(box.width / video.videoWidth, box.height / video.videoHeight);
    const wide = video.videoWidth * scale, left = box.left - mat.getBoundingClientRect().left + (box.width - wide) / 2;
    const at = Number($("#transport [data-divide]").value) / 100;
    $("#picture").style.setProperty("--edge-at", `${left + wide * at}px`);
    $("#picture").style.setProperty("--edge-in", `${(box.width - wide) / 2 + wide * at}px`);
  };
  const resized = new ResizeObserver(place);
  const follow = () => {
    const [first, second] = [before(), after()];
    if (!isOn || !first?.duration || !second) return;
    const apart = Math.abs(first.currentTime - second.currentTime);
    if (apart > (second.paused ? 0 : SLACK)) first.currentTime = Math.min(second.currentTime, first.duration);
    if (first.paused !== second.paused) { if (second.paused) first.pause(); else first.play().catch(() => {}); }
  };
  tandem.tidyBefore = () => {
    const video = before(), row = $("#transport .divide"), button = $("#transport [data-before]");
    if (!row) return;
    if (!video) isOn = false;
    if (button.hidden !== !video) button.hidden = !video;
    if (row.hidden === isOn) row.hidden = !isOn;
    set(button, "aria-pressed", String(isOn));
    $("#picture").classList.toggle("comparing", isOn);
    if (!video) { resized.disconnect(); return; }
    set(button, "title", video.dataset.title);
    set(button, "aria-label", video.dataset.title);
    if (isOn && video.getAttribute("src") !== video.dataset.src) {
      video.src = video.dataset.src;
      resized.disconnect();
      resized.observe(after());
    }
    if (!isOn && video.hasAttribute("src")) { video.removeAttribute("src"); video.load(); }
  };
  document.addEventListener("click", ({ target }) => {
    if (!target.closest("#transport [data-before]")) return;
    isOn = !isOn;
    tandem.tidyBefore();
    place();
    if (isOn) $("#transport [data-divide]").focus();
  });
  document.addEventListener("input", ({ target }) => {
    if (!target.matches("#transport [data-divide]")) return;
    set(target, "aria-valuetext", `${target.value} percent before`);
    place();
  });
  for (const name of ["play", "pause", "seeked", "timeupdate", "loadedmetadata"]) {
    document.addEventListener(name, ({ target }) => {
      if (!isOn || (target !== before() && target !== after())) return;
      if (name === "loadedmetadata") place();
      if (target === after() || name === "loadedmetadata") follow();
    }, true);
  }
  // Its file is gone.
  document.addEventListener("error", ({ target }) => {
    if (target !== before() || !target.getAttribute("src")) return;
    isOn = false;
    tandem.tidyBefore();
    tandem.panels.notify("What the video was made from cannot be read any more.", { error: true });
  }, true);
})();
