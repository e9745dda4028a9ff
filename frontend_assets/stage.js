// The stage: which video it shows, long prompts, and the choice of two videos to compare.
(() => {
  "use strict";
  const tandem = window.tandem;
  const $ = (selector) => document.querySelector(selector);

  // Shows one video, even while another runs; an empty id shows that there is none.
  tandem.show = (id) => {
    tandem.select(id);
    $("#show")?.click();
    $("#picture").scrollIntoView({ block: "nearest" });
  };

  const tidy = () => {
    // A long prompt is cut after a few lines, with a button that shows the rest.
    for (const text of document.querySelectorAll(".clamp")) {
      const more = text.nextElementSibling;
      if (!more?.classList.contains("show-all")) continue;
      const cut = text.classList.contains("whole") || text.scrollHeight > text.clientHeight + 1;
      if (text.clientHeight && more.hidden === cut) more.hidden = !cut;
    }
    const now = $("#status .status")?.dataset.job;
    for (const clip of document.querySelectorAll("[data-show]")) {
      const current = clip.dataset.members.split(" ").includes(now);
      if (clip.hasAttribute("aria-current") !== current) {
        if (current) clip.setAttribute("aria-current", "true"); else clip.removeAttribute("aria-current");
      }
    }
    tandem.tidyExport?.();
    tandem.tidyGroup();
    tandem.tidyTransport();
    tidyCompare();
  };
  tandem.tidyStage = tidy;

  // Compare: a press chooses the clip on the stage, the next one in its group or in the strip is compared with it. With
  // two clips there is nothing to choose.
  let first = "";
  const comparable = (id) => {
    const clips = [...document.querySelectorAll("#picture [data-pick][data-done], #recent [data-done]")];
    const ids = clips.filter((clip) => !clip.dataset.members?.split(" ").includes(id))
      .map((clip) => clip.dataset.pick ?? clip.dataset.show);
    return [...new Set(ids)].filter((other) => other !== id);
  };
  tandem.isComparing = () => Boolean(first);
  // Compares the chosen clip with another one; returns whether one was chosen.
  tandem.compareWith = (id) => {
    if (!first || id === first) return false;
    tandem.compare([id, first]);
    first = "";
    tidyCompare();
    return true;
  };
  const tidyCompare = () => {
    const button = $("#facts [data-compare-with]");
    if (first && first !== button?.dataset.compareWith) first = "";
    const text = first ? "Select the video to compare with." : "";
    if ($("#pick") && $("#pick").textContent !== text) $("#pick").textContent = text;
    if (!button) return;
    const none = !comparable(button.dataset.compareWith).length;
    if (button.hidden !== none) button.hidden = none;
    const pressed = String(Boolean(first));
    if (button.getAttribute("aria-pressed") !== pressed) button.setAttribute("aria-pressed", pressed);
  };
  const choose = (id) => {
    const choices = comparable(id);
    if (choices.length === 1) { tandem.compare([choices[0], id]); return; }
    first = first ? "" : id;
    tidyCompare();
    if (first) {
      $("#picture [data-pick][data-done][aria-pressed=false], #recent [data-done]:not([aria-current])")
        .focus({ focusVisible: true });
    }
  };
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !first) return;
    event.preventDefault();
    first = "";
    tidyCompare();
    $("#facts [data-compare-with]").focus();
  });

  // The clip of what is finished is replaced by a longer one: it keeps its position, and stays paused.
  let played = { job: "", seconds: 0, paused: false };
  const growing = (event) => event.target.matches?.("#picture video[data-grows]");
  document.addEventListener("timeupdate", (event) => {
    const { currentTime, paused, seeking } = event.target, job = $("#status .status").dataset.job;
    if (growing(event) && currentTime > 0 && !seeking) played = { job, seconds: currentTime, paused };
  }, true);
  document.addEventListener("loadedmetadata", (event) => {
    if (!growing(event) || played.job !== $("#status .status").dataset.job) return;
    if (played.seconds < event.target.duration) event.target.currentTime = played.seconds;
    if (played.paused) event.target.pause();
  }, true);

  document.addEventListener("click", (event) => {
    const more = event.target.closest(".show-all");
    if (more) {
      const whole = more.previousElementSibling.classList.toggle("whole");
      more.textContent = whole ? "Show less" : "Show all";
      more.setAttribute("aria-expanded", String(whole));
    }
    const clip = event.target.closest("[data-show]");
    const comparing = event.target.closest("[data-compare-with]");
    if (comparing) choose(comparing.dataset.compareWith);
    if (clip && !("done" in clip.dataset && tandem.compareWith(clip.dataset.show))) tandem.show(clip.dataset.show);
  });
})();
