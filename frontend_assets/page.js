// What the page does in the browser alone: it remembers the form and this tab's job, keeps size and length in step,
// switches light and dark, and notices when the server is gone. Fetches nothing but this server's own pages.
(() => {
  "use strict";
  const WORDS = ["prompt", "negative_prompt", "seed"];   // which change nothing in what runs where
  const PARTS = ["text_encoder", "transformer", "transformer_2", "vae"];
  const FORM = "tandem.form", JOB = "tandem.job", THEME = "tandem.theme";
  const LOOK_MS = 4000;      // how often the server is asked whether it is there
  const REST_MS = 30;        // for so long the form rests before it is asked what Generate would do
  const AGAIN_MS = 700;      // until that is asked again where engines were not known yet
  const PATIENCE_MS = 8000;  // a question without an answer for so long is lost
  const SILENCE_MS = 6000;   // a running job says something every second or so; longer is a lost connection

  // Storage may be forbidden (private windows): then nothing is remembered, and that is all.
  const recall = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const keep = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not remembered */ } };
  const $ = (selector) => document.querySelector(selector);

  let lookedAt = "", resting = 0, question = 0, askedAt = 0, wanted = {};
  const tandem = window.tandem = {
    used: {},
    way: ["auto", "auto"],
    restored: false,
    job: () => recall("sessionStorage", JOB) || "",
    remember: (id) => { if (id) keep("sessionStorage", JOB, id); },
    // Before the stored form is back in place, the page's defaults must not overwrite it.
    save: (values) => {
      if (!tandem.restored) return;
      const names = $("#top header").dataset.fields.split(" ");
      const form = Object.fromEntries(names.map((name, i) => [name, values[i]]));
      // What the app was started with: under other flags, kept backends give way to those.
      keep("localStorage", FORM, JSON.stringify({ ...form, preset: $("#top header").dataset.preset }));
      const settings = JSON.stringify(values.filter((_, i) => !WORDS.includes(names[i])));
      if (settings !== lookedAt) { lookedAt = settings; tandem.lookAhead(); }
    },
    // One question at a time: the next is asked once the last is answered, so an answer never overwrites a newer one.
    lookAhead: (rest = REST_MS) => {
      clearTimeout(resting);
      resting = setTimeout(() => {
        if (!$("#look-ahead")) return;   // visitors choose nothing of what runs where
        if (askedAt && Date.now() - askedAt < PATIENCE_MS) { tandem.lookAhead(); return; }
        askedAt = Date.now();
        $("#look-ahead").click();
      }, rest);
    },
    question: () => String(++question),
    answered: (answer) => {
      const [number, more] = answer.split(" ");
      if (Number(number) !== question) { tandem.lookAhead(); return; }
      askedAt = 0;
      if (more) tandem.lookAhead(AGAIN_MS);
    },
    asked: () => JSON.stringify(wanted),
    stored: () => recall("localStorage", FORM) || "",
    startKeeping: () => { tandem.restored = true; tandem.lookAhead(); },
    use: (request) => { tandem.used = JSON.parse(request); },
    notice: null,   // stands in the tab's title until somebody looks
    percent: null,  // of a job that the stage does not show
    retitle: () => observe(),
    ask: (question, title, then) => ask(question, title, then),
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

  // The library's buttons. What cannot be taken back is asked for first, and Escape or Keep leaves all as it is.
  const ask = (question, title, then) => {
    const dialog = document.createElement("dialog");
    dialog.className = "ask";
    dialog.setAttribute("aria-labelledby", "ask-question");
    dialog.innerHTML = '<p id="ask-question"></p><div><button type="button" class="button">Keep</button>'
      + '<button type="button" class="button strong"></button></div>';
    dialog.querySelector("p").textContent = question;
    const [no, yes] = dialog.querySelectorAll("button");
    yes.textContent = title;
    no.addEventListener("click", () => dialog.close());
    yes.addEventListener("click", () => { dialog.close(); then(); });
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    no.focus();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-act]");
    if (!button || button.disabled || button.getAttribute("aria-disabled") === "true") return;
    const { act, of, confirm } = button.dataset;
    const go = () => {
      if (button.closest("[data-desk]")) { tandem.jobs.press(act, of, button); return; }
      wanted = { act, of };
      $(button.closest("[data-models]") ? "#models-act" : "#act")?.click();
    };
    if (confirm) ask(confirm, button.textContent, go); else go();
  });

  // The ways to hold the weights, where memory is short: each sets two choices of the form.
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".ways button");
    if (!button || button.disabled) return;
    tandem.way = [button.dataset.offload, button.dataset.quantization];
    $("#choose-way")?.click();
  });

  // Generate and Cancel stand in one place: the focus stays there when one makes way for the other. A button of the
  // library that is gone with its engine leaves the focus at the library's heading.
  const purpose = (button) => button && `${button.dataset.act.replace("unpin", "pin")} ${button.dataset.of}`;
  let inActions = false, pressed = null;
  document.addEventListener("focusin", (event) => {
    inActions = Boolean(event.target.closest("#actions"));
    if (!event.target.closest("dialog")) pressed = purpose(event.target.closest("[data-act]"));
  });
  // Who presses elsewhere has left the library's buttons, though nothing there takes the focus.
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("[data-act], dialog")) pressed = null;
  });
  const keepFocus = () => {
    // gradio fills rows anew from the top: the focused button may have become another engine's.
    const now = document.activeElement;
    if (pressed && (now === document.body || (now.dataset.act && purpose(now) !== pressed))) {
      const same = [...document.querySelectorAll("[data-act]")].find((b) => !b.disabled && purpose(b) === pressed);
      const heading = [...document.querySelectorAll("#library-heading, [data-heading]")].find((h) => h.offsetParent);
      (same ?? heading)?.focus({ preventScroll: true });
    }
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
    for (const fold of document.querySelectorAll(".fold")) {
      const button = fold.querySelector(":scope > button");
      const content = fold.querySelector("[data-testid=accordion-content]");
      if (button) set(button, "aria-expanded", String(Boolean(content) && content.style.display !== "none"));
    }
    for (const part of PARTS) {
      const title = $(`#field-backend_${part} [data-testid=block-info]`)?.textContent.trim();
      const choice = $(`#field-backend_${part} input`), toggle = $(`#tensorrt-${part} input`);
      if (choice) set(choice, "aria-describedby", `why-${part}`);
      if (toggle) {
        set(toggle, "aria-label", `TensorRT for the ${title}`);
        set(toggle, "aria-describedby", toggle.disabled ? "no-tensorrt" : `why-${part}`);
      }
    }
    const trusted = $("#import-trusted input");
    if (trusted) set(trusted, "aria-describedby", "import-warning");
  };

  let heardAt = Date.now(), said = "", ended = "";
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
    // A job may have built engines.
    const state = status?.dataset.state;
    if (state !== ended && ["done", "failed", "cancelled"].includes(state) && tandem.restored) tandem.lookAhead();
    ended = state;
    const bar = $("#status .bar:not([hidden])"), percent = bar?.getAttribute("aria-valuenow") ?? tandem.percent;
    const title = tandem.notice ?? (percent ? `${percent}% · Tandem` : "Tandem");
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
    if (!answer.ok) {
      // A share link that was taken back is answered too, by the server in between.
      tell([403, 404, 502, 503].includes(answer.status) ? "Tandem is not here any more, or no longer shared." : "");
      return;
    }
    const { app_id: now } = await answer.json();
    if (identity !== null && now !== identity) { location.reload(); return; }
    identity = now;
    tell("");
    const busy = ["queued", "running", "stopping"].includes($("#status .status")?.dataset.state);
    // Gradio has one stream of answers. Where it ends just as something is asked, that is answered with the next one.
    const waits = busy || !tandem.restored;
    if (waits && Date.now() - heardAt > SILENCE_MS) { heardAt = Date.now(); $("#attach")?.click(); }
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
