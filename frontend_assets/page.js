// What the page does without the server: stores the form and this tab's job, is light or dark, and reports a lost
// connection. Requests only this server's own pages.
(() => {
  "use strict";
  const WORDS = ["prompt", "original_prompt", "negative_prompt", "seed"];   // fields that do not affect the plan
  const FORM = "tandem.form", JOB = "tandem.job", THEME = "tandem.theme";
  const FORM_PARTS = "#compose, #settings";
  const FOCUS_MS = 2000;     // how long a field that got the focus is kept in view
  const CHECK_MS = 4000;     // how often the connection is checked where no answer is waited for
  const PAUSE_MS = 300;      // between an answer and the next question
  const LATE = "late", LATE_MS = 25_000;    // an answer comes within 15 s; longer is a lost connection
  const REST_MS = 30;        // delay from a change of the form to the plan preview
  const SILENCE_MS = 6000;   // a running job sends something every second; longer is a lost connection

  // Storage may be forbidden (private windows); then nothing is stored.
  const read = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const write = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not stored */ } };
  const $ = (selector) => document.querySelector(selector);

  // Gradio removes its notice "Loading" but not the timer in it, which then has the browser draw 60 frames a second for
  // as long as the page is open. Gradio's modules keep this function from when they are loaded; the page itself is given
  // the browser's again (`startKeeping`). It shows no timer of Gradio's, so none has to run from then on.
  const requestFrame = window.requestAnimationFrame;
  const isTimer = (draw) => String(draw).includes("performance.now()");
  window.requestAnimationFrame = (draw) => tandem.restored && isTimer(draw) ? 0 : requestFrame.call(window, draw);

  let previewed = "", resting = 0, saving = 0, selected = "";
  // Observers of the page are not woken by an attribute that stays the same.
  const set = (node, name, value) => { if (node.getAttribute(name) !== value) node.setAttribute(name, value); };
  const tandem = window.tandem = {
    read, write, set,
    used: {},
    values: [],   // of the form, in the order of the server's form
    names: () => $("#top header").dataset.fields.split(" "),   // of the form's fields, in the same order
    value: (name) => tandem.values[tandem.names().indexOf(name)],
    restored: false,
    job: () => read("sessionStorage", JOB) || "",
    remember: (id) => { if (id) write("sessionStorage", JOB, id); },
    // The job to show next. A late answer about another one may be remembered before the button is followed.
    select: (id) => { selected = id; write("sessionStorage", JOB, id); },
    selected: () => selected,
    // A field has changed. A model changes many at once; then the form is read and saved once.
    changed: () => { saving ||= setTimeout(() => { saving = 0; $("#keep-form")?.click(); }); },
    // Until the stored form is filled in, the page's defaults must not overwrite it.
    save: (values) => {
      tandem.values = values;
      tandem.showForm();
      if (!tandem.restored) return;
      const names = tandem.names();
      const form = Object.fromEntries(names.map((name, i) => [name, values[i]]));
      // Launch flags override backends that were stored under other flags.
      write("localStorage", FORM, JSON.stringify({ ...form, preset: $("#top header").dataset.preset }));
      const settings = JSON.stringify(values.filter((_, i) => !WORDS.includes(names[i])));
      if (settings !== previewed) { previewed = settings; previewSoon(); }
    },
    // What the form starts with: the last form of this browser, else the defaults of Settings.
    stored: () => read("localStorage", FORM) || (tandem.defaults().model ? JSON.stringify(tandem.defaults()) : ""),
    startKeeping: (values) => {
      tandem.values = values;
      tandem.restored = true;
      window.requestAnimationFrame = requestFrame;
      tandem.showForm();
      previewSoon();
    },
    use: (request) => { tandem.used = JSON.parse(request); tandem.uncustomized(); },
    // The text of a refused request: plain, or Gradio's JSON.
    refusal: async (answer) => {
      const text = await answer?.text().catch(() => "") ?? "";
      try { return JSON.parse(text).detail ?? text; } catch { return text; }
    },
    notice: null,   // shown in the browser tab's title until the page is visible
    percent: null,  // of a job that Make does not show
    tidy: () => observe(),
  };

  const previewSoon = () => {
    clearTimeout(resting);
    resting = setTimeout(() => tandem.preview?.(), REST_MS);
  };

  // Light and dark: the system's choice unless Settings has another one.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => ["light", "dark"].find((name) => name === read("localStorage", THEME)) ?? "system";
  const dark = () => (theme() === "system" ? system.matches : theme() === "dark");
  const applyTheme = () => {
    document.documentElement.dataset.theme = dark() ? "dark" : "light";
    document.documentElement.style.colorScheme = dark() ? "dark" : "light";
    if (!document.body) return;
    if (document.body.classList.contains("dark") !== dark()) document.body.classList.toggle("dark", dark());
    const choice = $(`input[name=theme][value=${theme()}]`);
    if (choice && !choice.checked) choice.checked = true;
  };
  system.addEventListener("change", applyTheme);
  applyTheme();

  document.addEventListener("change", ({ target }) => {
    if (target.name !== "theme") return;
    write("localStorage", THEME, target.value);
    applyTheme();
  });

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    // While a video is made, the next one is queued.
    const button = [...document.querySelectorAll("#generate, #queue-next button")].find((main) => main.offsetParent);
    if (button) { event.preventDefault(); button.click(); }
  });

  // Strategies, if memory is short: each sets two choices of the form.
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".strategies button");
    if (!button || button.disabled) return;
    tandem.apply({ offload: button.dataset.offload, quantization: button.dataset.quantization });
  });

  // Generate and Cancel have the same place, and the focus stays there. If a button of a panel disappears with its item,
  // the panel's heading gets the focus.
  const purpose = (button) => button && `${button.dataset.action.replace(/^un/, "")} ${button.dataset.target}`;
  let inActions = false, pressed = null;
  document.addEventListener("focusin", (event) => {
    inActions = Boolean(event.target.closest("#actions"));
    if (!event.target.closest("dialog")) pressed = purpose(event.target.closest("[data-action]"));
  });
  // A press elsewhere leaves the panel's buttons, even if nothing there takes the focus.
  document.addEventListener("pointerdown", (event) => {
    if (!event.target.closest("[data-action], dialog")) pressed = null;
  });
  const keepFocus = () => {
    // A moved or rewritten row may have lost the focus, or its button may now belong to another item.
    const now = document.activeElement;
    if (pressed && (now === document.body || (now.dataset.action && purpose(now) !== pressed))) {
      const same = [...document.querySelectorAll("[data-action]")].find((b) => b.offsetParent && purpose(b) === pressed);
      const heading = [...document.querySelectorAll("[data-heading]")].find((h) => h.offsetParent);
      (same ?? heading)?.focus({ preventScroll: true });
    }
    if (inActions && document.activeElement === document.body) {
      const button = [...document.querySelectorAll("#generate, #cancel")].find((b) => b.offsetParent);
      if (button && !button.disabled) button.focus({ preventScroll: true });
    }
  };

  // Attributes for screen readers that Gradio leaves out: descriptions of fields, and whether an accordion is open.
  const describe = () => {
    for (const info of document.querySelectorAll(".block[id] .info-text")) {
      const block = info.closest(".block[id]");
      if (!info.id) info.id = `${block.id}-info`;
      for (const input of block.querySelectorAll("textarea, input")) {
        set(input, "aria-describedby", info.id + tandem.marked(input));
      }
    }
    for (const fold of document.querySelectorAll(".fold:not(details)")) {
      const button = fold.querySelector(":scope > button");
      const content = fold.querySelector("[data-testid=accordion-content]");
      if (button) set(button, "aria-expanded", String(Boolean(content) && content.style.display !== "none"));
    }
  };

  // Messages are above the bar.
  const bars = new ResizeObserver(([{ target }]) => {
    document.body.style.setProperty("--bar-height", `${target.offsetHeight}px`);
  });
  // A field that just got the focus stays in view when the server's answers change the parts around it, unless the user
  // scrolls.
  let focusedAt = 0;
  document.addEventListener("focusin", () => { focusedAt = Date.now(); });
  for (const scrolled of ["wheel", "touchmove"]) addEventListener(scrolled, () => { focusedAt = 0; }, { passive: true });
  const around = new ResizeObserver(() => {
    const field = document.activeElement;
    if (Date.now() - focusedAt < FOCUS_MS && field.closest(FORM_PARTS)) field.scrollIntoView({ block: "nearest" });
  });
  // What is between the header and the columns, such as the bar of a share link, takes a part of the window's height.
  const above = new ResizeObserver(() => {
    const high = [...document.querySelectorAll("#sharing, #limits")].reduce((sum, bar) => sum + bar.offsetHeight + 18, 0);
    document.body.style.setProperty("--more-head", `${high}px`);
  });
  let stage = null;

  const mark = () => {
    const status = $("#status .status"), name = status.dataset.field;
    tandem.mark(name, name ? $("#status .alert").textContent.trim() : "");
  };

  let changedAt = Date.now(), shownStatus = "", endedState = "";
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  let waiting = false;
  const observe = () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; tidy(); }, 30);
  };
  const tidy = () => {
    guardLogin();
    if (!isListening && $("#offline")) { isListening = true; listen(); lead(); }
    const status = $("#status .status");
    if (status && status.textContent !== shownStatus) { shownStatus = status.textContent; changedAt = Date.now(); mark(); }
    // A job may have built engines.
    const state = status?.dataset.state;
    if (state !== endedState && ["done", "failed", "cancelled"].includes(state) && tandem.restored) previewSoon();
    endedState = state;
    const busy = ["queued", "running", "stopping"].includes(state);
    if (document.body.classList.contains("busy") !== busy) {
      document.body.classList.toggle("busy", busy);
      // The form folds away or unfolds on phones, or Advanced is open: the picture is brought into view.
      if (tandem.restored) $("#picture").scrollIntoView({ block: "nearest" });
    }
    const bar = $("#status .bar:not([hidden])"), percent = bar?.getAttribute("aria-valuenow") ?? tandem.percent;
    const title = tandem.notice ?? (percent ? `${percent}% · Tandem` : "Tandem");
    if (document.title !== title) document.title = title;
    // With reduced motion, the video is started by hand.
    for (const video of reducedMotion.matches ? document.querySelectorAll("#picture video[autoplay]") : []) {
      video.removeAttribute("autoplay");
      video.pause();
    }
    if (!stage && $("#stage")) {
      stage = $("#stage");
      bars.observe($("#bar"));
      for (const part of document.querySelectorAll(FORM_PARTS)) around.observe(part);
      for (const bar of document.querySelectorAll("#sharing, #limits")) above.observe(bar);
    }
    keepFocus();
    applyTheme();
    tandem.tidyForm();
    describe();
    tandem.tidyStage();
  };

  // The QR code of a share link may have the login, which the address then no longer shows: it is filled in.
  const login = /^#login=([^:]*):(.*)$/.exec(location.hash)?.slice(1);
  if (login) history.replaceState(history.state, "", location.pathname + location.search);
  // Gradio empties both fields of a refused login without an event: the user is written back.
  const LOGIN_MS = 200;
  const loginFields = () => [...document.querySelectorAll(".wrap.min-h-screen input")];
  const type = (field, text) => { field.value = text; field.dispatchEvent(new Event("input", { bubbles: true })); };
  let user = "", guarded = false;
  document.addEventListener("input", ({ target }) => { if (target === loginFields()[0]) user = target.value; });
  // Gradio's texts are in the browser's language, and the page is in English.
  const LOGIN_TEXTS = [
    ["h2", "Log in to Tandem"], [".creds", "Wrong username or password. Check both and try again."], ["button.lg", "Log in"],
    ["label:has(input:not([type=password])) [data-testid=block-info]", "Username"],
    ["label:has([type=password]) [data-testid=block-info]", "Password"],
  ];
  const guardLogin = () => {
    const [name, password] = loginFields();
    if (!password) return;
    for (const [part, text] of LOGIN_TEXTS) {
      const node = $(`.wrap.min-h-screen ${part}`);
      if (node && node.textContent.trim() !== text) node.textContent = text;
      if (part === ".creds" && node) set(node, "role", "alert");
    }
    set(name, "autocomplete", "username");
    set(password, "autocomplete", "current-password");
    if (guarded) return;
    guarded = true;
    if (login) loginFields().forEach((field, at) => type(field, login[at]));
    setInterval(() => {
      const [name, password] = loginFields();
      if (!user || !name || name.value || password.value) return;
      type(name, user);
      password.focus();
    }, LOGIN_MS);
  };

  // Without a connection, the page reports that and hides the progress.
  let identity = null, isListening = false;
  const showOffline = (message) => {
    const line = $("#offline");
    if (line && line.textContent !== message) line.textContent = message;
    document.body.classList.toggle("offline", Boolean(message));
  };
  // The owner's page asks Tandem what changes, and is answered at a change or after some seconds; visitors' pages ask
  // whether Tandem answers. Hidden pages do not wait for answers: browsers open only six connections to one server. Of
  // the visible pages of a browser, one asks and tells the others; where the browser has no locks, as on plain HTTP from
  // another machine, each page asks.
  const PAGES = `tandem${location.pathname}`;
  const channel = navigator.locks && "BroadcastChannel" in window ? new BroadcastChannel(PAGES) : null;
  let version, question = null, next = 0, failures = 0;
  let isAsking = !channel, isWaitingToAsk = false, stopAsking = null;
  const tell = (now) => { if (stopAsking) channel.postMessage(now); };
  const take = (now) => {
    const current = now.app ?? now.app_id;
    if (identity !== null && current !== identity) { location.reload(); return; }
    identity = current;
    showOffline("");
    if (now.version > (version ?? -1)) { version = now.version; tandem.states(now); }
  };
  const ask = async (signal) => {
    let answer, now;
    try {
      const after = document.hidden || !isAsking || version === undefined ? "" : `/${version}`;
      answer = await fetch($("#top header").dataset.connection + after, { cache: "no-store", signal });
      if (answer.ok) now = await answer.json();
    } catch {
      if (signal.aborted && signal.reason !== LATE) return PAUSE_MS;
      failures += signal.reason === LATE ? 2 : 1;
      // A proxy may close one that waits, and a browser does when it leaves the page.
      if (failures < 2) return PAUSE_MS;
      tell(null);
      showOffline("Tandem does not answer: it was stopped, or the connection is lost. "
        + "This page reconnects by itself.");
      return CHECK_MS;
    }
    failures = 0;
    if (answer.status === 401) { location.reload(); return CHECK_MS; }  // the login has ended
    if (!answer.ok) {
      tell(null);
      // The share server answers for a link that was closed.
      showOffline([403, 404, 502, 503].includes(answer.status) ? "Tandem was stopped, or is no longer shared." : "");
      return CHECK_MS;
    }
    tell(now);
    take(now);
    if (now.version === undefined || document.hidden) return CHECK_MS;
    return isAsking ? PAUSE_MS : LATE_MS;
  };
  const listen = async () => {
    const controller = question = new AbortController();
    const late = setTimeout(() => controller.abort(LATE), LATE_MS);
    const delay = await ask(controller.signal);
    clearTimeout(late);
    if (question === controller) listenIn(delay);
  };
  const listenIn = (delay) => {
    clearTimeout(next);
    next = setTimeout(listen, delay);
  };
  const listenAgain = () => {
    question?.abort();
    if (question) listenIn(PAUSE_MS);
    question = null;
  };
  // Waits for the lock of the page that asks, and keeps it while it is visible.
  const lead = () => {
    if (!channel || isWaitingToAsk || stopAsking || document.hidden) return;
    isWaitingToAsk = true;
    navigator.locks.request(PAGES, () => new Promise((release) => {
      isWaitingToAsk = false;
      if (document.hidden) { release(); return; }
      stopAsking = () => { tell(null); release(); stopAsking = null; isAsking = false; };
      isAsking = true;
      listenIn(0);
    })).catch(() => { isAsking = true; });  // the browser stores nothing for this page
  };
  // Without an answer, the other one is gone or has lost the connection: this page looks itself.
  channel?.addEventListener("message", ({ data }) => {
    if (isAsking || !isListening) return;
    if (data) take(data);
    listenIn(data ? LATE_MS : 0);
  });
  // A page that becomes visible does not wait for an answer that may never come. What a press asks the server goes before
  // the question, which may have the last connection: videos have others.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { stopAsking?.(); return; }
    listenAgain();
    lead();
  });
  for (const press of ["click", "submit"]) {
    document.addEventListener(press, ({ isTrusted }) => { if (isTrusted && isAsking) listenAgain(); }, true);
  }

  // Gradio has one stream of answers. If it ends during a request, that answer only arrives with the next request.
  setInterval(() => {
    if (document.hidden || document.body.classList.contains("offline")) return;
    const { state, job } = $("#status .status")?.dataset ?? {};
    const isSilent = ["running", "stopping"].includes(state) || !tandem.restored
      || (state === "queued" && !tandem.isQueued(job));
    if (isSilent && Date.now() - changedAt > SILENCE_MS) { changedAt = Date.now(); $("#attach")?.click(); }
  }, CHECK_MS);

  const start = () => {
    document.title = "Tandem";
    new MutationObserver(observe).observe(document.body, {
      subtree: true, childList: true, characterData: true,
      attributes: true, attributeFilter: ["class", "style", "disabled"],
    });
    observe();
  };
  if (document.body) start(); else document.addEventListener("DOMContentLoaded", start);
})();
