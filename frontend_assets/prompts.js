// Prompts of earlier videos, and videos one after the other until that is turned off.
(() => {
  "use strict";
  const tandem = window.tandem;
  const TYPING_MS = 150, CHECK_MS = 250;
  const OPEN = ["queued", "waiting", "running", "pausing", "stopping", "paused"];
  const $ = (selector) => document.querySelector(selector);
  const list = () => $("#pop-prompts .earlier");

  let asked = 0;
  const search = async () => {
    const number = ++asked, text = $("#prompt-search").value;
    const call = { action: "prompts", target: "", values: { search: text }, view: {}, form: [], drawn: {} };
    const answer = await fetch("tandem/panels/results", {
      method: "POST", headers: { "Content-Type": "application/json" }, cache: "no-store", body: JSON.stringify(call),
    }).catch(() => null);
    const prompts = answer?.ok ? (await answer.json()).prompts : null;
    if (number !== asked) return;
    list().replaceChildren(...(prompts ?? []).map((prompt) => {
      const item = document.createElement("li"), use = document.createElement("button");
      Object.assign(use, { type: "button", textContent: prompt, dir: "auto" });
      use.dataset.prompt = prompt;
      item.append(use);
      return item;
    }));
    const found = text ? "No prompt has these words." : "There are no earlier prompts.";
    $("#pop-prompts .aside").textContent = prompts?.length ? "" : prompts ? found : "Tandem did not answer. Try again.";
  };
  // Events of popovers do not bubble.
  document.addEventListener("toggle", ({ target, newState }) => {
    if (target.id === "pop-prompts" && newState === "open") { $("#prompt-search").focus(); search(); }
  }, true);
  let typing = 0;
  document.addEventListener("input", ({ target }) => {
    if (target.id !== "prompt-search") return;
    clearTimeout(typing);
    typing = setTimeout(search, TYPING_MS);
  });
  document.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!move || !event.target.closest?.("#pop-prompts")) return;
    const stops = [$("#prompt-search"), ...list().querySelectorAll("button")];
    event.preventDefault();
    stops[Math.min(Math.max(stops.indexOf(event.target) + move, 0), stops.length - 1)].focus();
  });
  document.addEventListener("click", ({ target }) => {
    const use = target.closest("#pop-prompts [data-prompt]");
    if (use) {
      tandem.apply({ prompt: use.dataset.prompt, original_prompt: "" });
      $("#pop-prompts").hidePopover();
      $("#field-prompt textarea").focus();
    }
    if (target.id === "endless") turn(!isOn());
  });

  // Endless: when the job that runs is done, the next one is requested.
  let timer = 0, running = "", before = null;
  const isOn = () => $("#endless").getAttribute("aria-pressed") === "true";
  const status = () => $("#status .status");
  const turn = (on) => {
    $("#endless").setAttribute("aria-pressed", String(on));
    clearInterval(timer);
    running = "";
    if (!on) return;
    if (!OPEN.includes(status().dataset.state)) next();
    timer = setInterval(check, CHECK_MS);
  };
  const next = () => {
    before = status();
    tandem.apply({ seed: "" });
    const press = () => {
      if (!isOn()) return;
      if (tandem.values[tandem.names().indexOf("seed")] === "") $("#generate").click(); else setTimeout(press, CHECK_MS);
    };
    setTimeout(press, CHECK_MS);
  };
  const check = () => {
    const { state, job } = status().dataset;
    if (OPEN.includes(state)) running = job;
    else if (job && job === running) {
      running = "";
      if (state === "done") next(); else turn(false);
    } else if (state === "failed" && !job && status() !== before) turn(false);  // the request was refused
  };
})();
