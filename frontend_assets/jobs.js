// The tabs Queue and History, what is told at the foot of the page, the sound and the title when a job ends. Draws
// nothing of the jobs itself: it asks the server, one question after the other, and puts its answers in place.
(() => {
  "use strict";
  const tandem = window.tandem;
  const PICKS = "tandem.picks", SOUND = "tandem.sound";
  const LOOK_MS = 1000;      // how often an open queue is looked at
  const STAND_MS = 2000;     // how often it is asked how the jobs stand
  const PATIENCE_MS = 10000; // a question without an answer for so long is lost
  const TOLD_MS = 8000;      // for so long a message stays that offers nothing
  const OPEN = ["queued", "running"];
  const $ = (selector) => document.querySelector(selector);
  const recall = (store, key) => { try { return window[store].getItem(key); } catch { return null; } };
  const keep = (store, key, value) => { try { window[store].setItem(key, value); } catch { /* not remembered */ } };
  const json = (text, otherwise) => { try { return JSON.parse(text) ?? otherwise; } catch { return otherwise; } };

  const view = { search: "", state: "all", page: 0, open: "", pair: [] };
  const line = [];
  let marks = {}, number = 0, sent = null, sentAt = 0;
  let picks = json(recall("sessionStorage", PICKS), []);

  const TABS = { Make: "make", Queue: "queue", History: "history" };
  const tab = () => TABS[$("#tabs [role=tab][aria-selected=true]")?.textContent.trim()] ?? "make";
  const goTo = (title) => {
    [...document.querySelectorAll("#tabs [role=tab]")].find((one) => one.textContent.trim() === title)?.click();
  };

  const pump = () => {
    if (sentAt && Date.now() - sentAt < PATIENCE_MS) return;
    sent = line.shift() ?? null;
    if (!sent) return;
    sentAt = Date.now();
    $("#jobs-act")?.click();
  };
  const send = (act, of = "", values = {}) => { line.push({ act, of, values }); pump(); };
  const look = () => { if (!line.length) send("look"); };

  const valuesOf = (button) => {
    const form = button?.closest("form");
    return form ? Object.fromEntries(new FormData(form)) : {};
  };

  const jobs = tandem.jobs = {
    press: (act, of, button) => {
      if (act === "dismiss") { tell(""); return; }
      if (act === "leave") { leave(); return; }
      if (act === "page") view.page = Number(of);
      if (act === "close") { view.open = ""; }
      if (act === "compare") view.pair = [...picks];
      if (act === "close-compare") { view.pair = []; }
      send(act, of, valuesOf(button));
    },
    message: () => JSON.stringify({ ...(sent ?? { act: "look", of: "", values: {} }), ...view, marks, tab: tab(),
      number: ++number }),
    hear: (answer) => {
      const says = json(answer, null);
      if (!says || says.number !== number) return;
      sentAt = 0;
      marks = { ...marks, ...says.marks };
      if ("open" in says) { view.open = says.open; if (says.open) show("[data-detail] h2"); }
      if (says.said) tell(says.said, says.undo, says.wrong);
      if (says.edit) edit(says.edit);
      if (says.saved) leave();
      if (says.watch) watch(says.watch);
      if (says.added) { $("#jobs-several form")?.reset(); watch(says.added[0]); }
      if (says.compare) { show("[data-compare] h2"); send("measure"); }
      tick();
      setTimeout(mark, 60);
      pump();
    },
  };

  // Once it is drawn, what was asked for is brought into view, and the focus with it.
  const show = (selector, tries = 20) => {
    const heading = $(selector);
    if (!heading) { if (tries) setTimeout(() => show(selector, tries - 1), 50); return; }
    heading.scrollIntoView({ block: "start" });
    heading.focus({ preventScroll: true });
  };

  // A job that was taken up is shown on the stage, unless that shows another one that is not over yet.
  const busy = () => OPEN.concat("stopping").includes($("#status .status")?.dataset.state);
  const watch = (id) => {
    if (busy()) return;
    tandem.remember(id);
    $("#attach")?.click();
  };

  // A form is brought back the way that the facts beside a video do it.
  const fill = tandem.fill = (request) => {
    const carrier = document.createElement("button");
    carrier.dataset.use = "all";
    carrier.dataset.request = JSON.stringify(request);
    carrier.hidden = true;
    $("#facts .prose").append(carrier);
    carrier.click();
    carrier.remove();
  };

  // What is told, at the foot of the page.
  const foot = document.createElement("div");
  foot.id = "foot";
  foot.dataset.desk = "";
  foot.innerHTML = '<div id="editing" hidden><p></p><span class="acts"></span></div>'
    + '<div id="told" hidden><p role="status" aria-live="polite"></p><span class="acts"></span></div>';
  const button = (title, act, of = "", strong = false) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = `button${strong ? " strong" : ""}`;
    made.textContent = title;
    Object.assign(made.dataset, { act, of, confirm: "" });
    return made;
  };
  let leaving = 0;
  const tell = (message, undo = null, wrong = false) => {
    const told = foot.querySelector("#told");
    clearTimeout(leaving);
    told.hidden = !message;
    told.classList.toggle("wrong", Boolean(wrong));
    told.querySelector("p").textContent = message;
    const acts = undo ? [button("Undo", "undelete", undo.join(" "), true)] : [];
    told.querySelector(".acts").replaceChildren(...acts, button("Dismiss", "dismiss"));
    if (message && !undo && !wrong) leaving = setTimeout(() => tell(""), TOLD_MS);
  };
  const edit = ({ id, title, request }) => {
    const bar = foot.querySelector("#editing");
    bar.hidden = false;
    bar.querySelector("p").textContent = `Changing ${title}, which waits in the queue.`;
    bar.querySelector(".acts").replaceChildren(button("Save", "save", id, true), button("Leave it", "leave"));
    fill(request);
    goTo("Make");
    setTimeout(() => $("#field-prompt textarea")?.focus(), 100);
  };
  const leave = () => { foot.querySelector("#editing").hidden = true; };

  // Picking two clips.
  const mark = () => {
    for (const box of document.querySelectorAll("[data-pick]")) box.checked = picks.includes(box.dataset.pick);
    const compare = $("#jobs-finder [data-act=compare]"), said = $("#picked");
    if (!compare) return;
    compare.setAttribute("aria-disabled", String(picks.length !== 2));
    const words = ["Pick two clips to compare them.", "One clip is picked: pick another.", "Two clips are picked."];
    if (said.textContent !== words[picks.length]) said.textContent = words[picks.length];
  };
  document.addEventListener("change", (event) => {
    const box = event.target.closest("[data-pick]");
    if (box) {
      picks = picks.filter((id) => id !== box.dataset.pick);
      if (box.checked) picks = [...picks, box.dataset.pick].slice(-2);
      keep("sessionStorage", PICKS, JSON.stringify(picks));
      mark();
    }
    if (event.target.id === "history-state") { Object.assign(view, { state: event.target.value, page: 0 }); look(); }
  });
  let typing = 0;
  document.addEventListener("input", (event) => {
    if (event.target.id !== "history-search") return;
    clearTimeout(typing);
    typing = setTimeout(() => { Object.assign(view, { search: event.target.value, page: 0 }); look(); }, 200);
  });
  document.addEventListener("submit", (event) => { if (event.target.closest("[data-desk]")) event.preventDefault(); });

  document.addEventListener("click", (event) => {
    const reuse = event.target.closest("[data-reuse]");
    if (reuse) { fill(json(reuse.dataset.reuse, {})); goTo("Make"); }
    const report = event.target.closest("[data-report]");
    if (report) copyReport(report.dataset.report, report.closest(".report").querySelector(".with-prompts").checked);
    if (event.target.closest("#tabs [role=tab]")) setTimeout(look, 60);
  });

  const copyReport = async (id, prompts) => {
    try {
      const answer = await fetch(`tandem/report/${prompts ? "whole/" : ""}${id}.json`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      try {
        await navigator.clipboard.writeText(text);
        tell(`The report is copied${prompts ? "" : ", without prompts and paths"}.`);
      } catch { // no clipboard here: it is saved instead
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
        link.download = `tandem-${id}.json`;
        link.click();
        URL.revokeObjectURL(link.href);
        tell("The report is saved as a file: this page may not copy.");
      }
    } catch {
      tell("There is no report: Tandem does not answer, or the job is gone.", null, true);
    }
  };

  // How the jobs stand: for the tabs, the title and the sound, whatever the page shows.
  let standing = null;
  const stand = async () => {
    if (!$("#jobs-act")) return;
    let now;
    try {
      const answer = await fetch("tandem/now", { cache: "no-store" });
      if (!answer.ok) return;
      now = await answer.json();
    } catch { return; }
    const before = standing ?? now;
    standing = now;
    const ended = Object.entries(now.jobs).filter(([id, state]) => OPEN.includes(before.jobs[id])
      && !OPEN.includes(state));
    const count = [...document.querySelectorAll("#tabs [role=tab]")].find((one) => one.textContent.trim() === "Queue");
    if (count) { if (now.queue) count.dataset.count = now.queue; else delete count.dataset.count; }
    tandem.percent = now.percent === null ? null : String(now.percent);
    const last = ended.map(([, state]) => state).find((state) => ["done", "failed", "interrupted"].includes(state));
    if (last) {
      chime(last === "done");
      if (document.hidden) tandem.notice = last === "done" ? "✓ Done · Tandem" : "✗ Failed · Tandem";
    }
    if (ended.length && tab() !== "make") look();
    tandem.retitle();
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) { tandem.notice = null; tandem.retitle(); }
  });
  const tick = () => { setTimeout(stand, 0); };

  // A soft sound, off until somebody turns it on. Browsers let a page sound only once it was touched.
  let audio = null;
  const sounding = () => recall("localStorage", SOUND) === "on";
  const wake = () => {
    if (!sounding()) return;
    audio ??= new AudioContext();
    audio.resume();
  };
  const chime = (good) => {
    if (!sounding()) return;
    wake();
    (good ? [523.25, 783.99] : [392, 311.13]).forEach((pitch, place) => {
      const tone = audio.createOscillator(), loud = audio.createGain();
      const at = audio.currentTime + 0.16 * place;
      tone.frequency.value = pitch;
      loud.gain.setValueAtTime(0, at);
      loud.gain.linearRampToValueAtTime(0.08, at + 0.03);
      loud.gain.exponentialRampToValueAtTime(0.0001, at + 0.7);
      tone.connect(loud).connect(audio.destination);
      tone.start(at);
      tone.stop(at + 0.75);
    });
    tandem.chimes = (tandem.chimes ?? 0) + 1;
  };
  for (const touch of ["pointerdown", "keydown"]) document.addEventListener(touch, wake, { once: true });
  const sound = () => {
    const theme = $("#theme");
    if (!theme) return;
    let made = $("#sound");
    if (!made) {
      made = document.createElement("button");
      made.type = "button";
      made.id = "sound";
      made.className = "button";
      made.title = "A soft sound when a video is done";
      made.addEventListener("click", () => {
        keep("localStorage", SOUND, sounding() ? "off" : "on");
        if (sounding()) chime(true);
        sound();
      });
      theme.before(made);
    }
    made.textContent = sounding() ? "Sound on" : "Sound off";
  };

  const begin = () => {
    document.body.append(foot);
    const ready = setInterval(() => {
      if (!$("#theme") || !$("#tabs, #generate")) return;
      clearInterval(ready);
      sound();
      mark();
      stand();
    }, 100);
    setInterval(() => { if (!document.hidden && tab() === "queue") look(); pump(); }, LOOK_MS);
    setInterval(stand, STAND_MS);
  };
  if (document.body) begin(); else document.addEventListener("DOMContentLoaded", begin);
})();
