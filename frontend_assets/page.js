// What the page does in the browser alone: it remembers the form and this tab's job, keeps size and length in step,
// switches light and dark, and notices when the server is gone. Fetches nothing but this server's own pages.
(() => {
  "use strict";
  const NAMES = ["prompt", "negative_prompt", "model", "width", "height", "frames", "fps", "steps",
    "guidance_scale", "guidance_scale_2", "seed"];
  const FORM = "tandem.form", JOB = "tandem.job", THEME = "tandem.theme";
  const LOOK_MS = 4000;      // how often the server is asked whether it is there
  const SILENCE_MS = 6000;   // a running job says something every second or so; longer is a lost connection

  // Storage may be forbidden (private windows): then nothing is remembered, and that is all.
  const recall = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const keep = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not remembered */ } };
  const $ = (selector) => document.querySelector(selector);

  const tandem = window.tandem = {
    used: {},
    restored: false,
    job: () => recall("sessionStorage", JOB) || "",
    remember: (id) => { if (id) keep("sessionStorage", JOB, id); },
    // Before the stored form is back in place, the page's defaults must not overwrite it.
    save: (values) => {
      if (!tandem.restored) return;
      keep("localStorage", FORM, JSON.stringify(Object.fromEntries(NAMES.map((name, i) => [name, values[i]]))));
    },
    stored: () => recall("localStorage", FORM) || "",
    startKeeping: () => { tandem.restored = true; },
    use: (request) => { tandem.used = JSON.parse(request); },
    sizeChosen: (size, width, height) => {
      const match = /^(\d+)x(\d+)$/.exec(size);
      return match ? [Number(match[1]), Number(match[2])] : [width, height];
    },
    sizeTyped: (width, height) => {
      const own = [...document.querySelectorAll("#size input[type=radio]")].map((radio) => radio.value);
      const typed = `${width}x${height}`;
      return own.includes(typed) ? typed : "custom";
    },
    length: (frames, fps) => {
      const known = frames >= 1 && fps > 0;
      const seconds = known ? ` · ${(frames / fps).toFixed(1)} s at ${fps} fps` : "";
      return `<p class="length">${known ? `${frames} frame${frames === 1 ? "" : "s"}${seconds}` : "&nbsp;"}</p>`;
    },
  };

  // Light and dark: the system's choice until the button is pressed, then the button's.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (recall("localStorage", THEME) || (system.matches ? "dark" : "light")) === "dark";
  const applyTheme = () => {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    document.documentElement.style.colorScheme = dark() ? "dark" : "light";
    if (!document.body) return;
    if (document.body.classList.contains("dark") !== dark()) document.body.classList.toggle("dark", dark());
    const button = $("#theme");
    const text = dark() ? "Light" : "Dark";
    if (button && button.textContent !== text) {
      button.textContent = text;
      button.setAttribute("aria-label", `Switch to ${text.toLowerCase()} colours`);
    }
  };
  system.addEventListener("change", applyTheme);
  applyTheme();

  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    keep("localStorage", THEME, dark() ? "light" : "dark");
    applyTheme();
  });

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    const button = $("#generate");
    if (button && button.offsetParent) { event.preventDefault(); button.click(); }
  });

  // Generate and Cancel stand in one place: the focus stays there when one makes way for the other.
  let inActions = false;
  document.addEventListener("focusin", (event) => { inActions = Boolean(event.target.closest("#actions")); });
  const keepFocus = () => {
    if (inActions && document.activeElement === document.body) {
      const button = [...document.querySelectorAll("#actions button")].find((b) => b.offsetParent);
      if (button && !button.disabled) button.focus();
    }
  };

  // The field that an error names is marked until it changes.
  let marked = null;
  const unmark = () => { marked?.removeAttribute("aria-invalid"); marked = null; };
  const mark = () => {
    const field = $("#status .status")?.dataset.field;
    const input = field && $(`#field-${field} :is(textarea, input)`);
    if (!input) { unmark(); return; }
    if (input === marked) return;
    unmark();
    marked = input;
    input.setAttribute("aria-invalid", "true");
  };
  document.addEventListener("input", (event) => { if (event.target === marked) unmark(); });

  // What gradio leaves out for screen readers and keyboards: explanations belong to their field, one group of choices
  // is one stop with arrow keys inside, and a fold says whether it is open.
  const set = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };
  const describe = () => {
    for (const info of document.querySelectorAll(".block[id] .info-text")) {
      const block = info.closest(".block[id]");
      if (!info.id) info.id = `${block.id}-info`;
      for (const input of block.querySelectorAll("textarea, input:not([type=radio])")) {
        set(input, "aria-describedby", info.id);
      }
      if (block.tagName === "FIELDSET") {
        set(block, "role", "radiogroup");
        set(block, "aria-label", block.querySelector("[data-testid=block-info]").textContent.trim());
        set(block, "aria-describedby", info.id);
        for (const radio of block.querySelectorAll("input[type=radio]")) set(radio, "name", block.id);
      }
    }
    const fold = $("#more > button"), content = $("#more [data-testid=accordion-content]");
    if (fold && content) set(fold, "aria-expanded", String(content.style.display !== "none"));
  };

  let heardAt = Date.now(), said = "";
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  let waiting = false;
  const observe = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; tidy(); }, 30);
  };
  const tidy = () => {
    const status = $("#status .status");
    if (status && status.textContent !== said) { said = status.textContent; heardAt = Date.now(); mark(); }
    const bar = $("#status .bar:not([hidden])"), percent = bar?.getAttribute("aria-valuenow");
    const title = percent ? `${percent}% · Tandem` : "Tandem";
    if (document.title !== title) document.title = title;
    // Who asked for less motion starts the video by hand.
    const video = $("#picture video[autoplay]");
    if (video && still.matches) { video.removeAttribute("autoplay"); video.pause(); }
    keepFocus();
    applyTheme();
    describe();
  };

  // The server is asked now and then. Without an answer the page says so instead of showing a job as if it ran on.
  let identity = null;
  const tell = (message) => {
    const line = $("#offline");
    if (line && line.textContent !== message) line.textContent = message;
    document.body.classList.toggle("offline", Boolean(message));
  };
  const look = async () => {
    let answer;
    try {
      answer = await fetch("gradio_api/app_id", { cache: "no-store" });
    } catch {
      tell("Tandem does not answer: it was stopped, or the connection is lost. "
        + "This page goes on by itself once it is back.");
      return;
    }
    if (!answer.ok) { tell(""); return; }
    const { app_id: now } = await answer.json();
    if (identity !== null && now !== identity) { location.reload(); return; }
    identity = now;
    tell("");
    const busy = ["queued", "running", "stopping"].includes($("#status .status")?.dataset.state);
    if (busy && Date.now() - heardAt > SILENCE_MS) { heardAt = Date.now(); $("#attach")?.click(); }
  };
  setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });

  const start = () => {
    document.title = "Tandem";
    new MutationObserver(observe).observe(document.body, {
      subtree: true, childList: true, characterData: true,
      attributes: true, attributeFilter: ["class", "style", "disabled"],
    });
    observe();
    look();
  };
  if (document.body) start(); else document.addEventListener("DOMContentLoaded", start);
})();
