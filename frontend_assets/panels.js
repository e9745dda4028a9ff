// The panels Queue, History, Engines, Models, Cluster and the plan preview: requests to the server, and the HTML of its answers;
// messages at the foot of the page; the title when a job ends. `gallery.js` and `queue.js` use it.
(() => {
  "use strict";
  const tandem = window.tandem;
  const POLL_MS = 1000;       // visible panels with data-poll, and while a video runs those with data-follow
  const AGAIN_MS = 700;       // until the preview is asked for again while engines are not known
  const MESSAGE_MS = 8000;    // how long messages stay that need no answer
  const FORM_MS = 2000;       // Gradio gives the form's values within this time
  const PRESS_MS = 5000;      // how long answers wait for a pressed button
  const OPEN = ["queued", "running"];
  const $ = (selector) => document.querySelector(selector);
  const parse = (text, otherwise) => { try { return JSON.parse(text) ?? otherwise; } catch { return otherwise; } };

  // Of the history, `stacks` are ids of clips whose stacks are open; whether Cluster shows the key and Settings the login
  // in its QR code; and how many parts of the queue are shown.
  const view = { search: "", state: "all", pages: 1, stacks: [], open: "", pair: [], key: false, login: false, rows: 1 };

  // The form's values, in the order of the server's form. Only Gradio has them: a hidden button hands them over.
  let readers = [];
  tandem.formRead = (values) => { for (const resolve of readers.splice(0)) resolve(values); };
  const formValues = () => new Promise((resolve) => {
    readers.push(resolve);
    setTimeout(() => resolve(tandem.values), FORM_MS);
    $("#read-form")?.click();  // not there yet while the page loads
  });

  const needsForm = (panel, action) => panel === "queue" ? ["add", "save"].includes(action)
    : !["history", "results", "cluster", "settings"].includes(panel);

  // Requests: one at a time for each panel. A request for changes is dropped if another one waits.
  const queues = {};
  const request = (panel, action = "refresh", target = "", values = {}) => {
    const queue = queues[panel] ??= { calls: [], busy: false };
    if (action === "refresh" && queue.calls.some((call) => call.action === "refresh")) return;
    queue.calls.push({ action, target, values });
    run(panel, queue);
  };
  const run = async (panel, queue) => {
    if (queue.busy || !queue.calls.length) return;
    queue.busy = true;
    const call = queue.calls.shift();
    try {
      const form = needsForm(panel, call.action) ? await formValues() : [];
      const answer = await fetch(`tandem/panels/${panel}`, {
        method: "POST", headers: { "Content-Type": "application/json" }, cache: "no-store",
        body: JSON.stringify({ ...call, view, form, drawn: drawnParts(panel) }),
      }).catch(() => null);
      if (answer?.ok) {
        const reply = await answer.json();
        await released();
        receive(panel, call, reply);
      }
      else if (call.action !== "refresh") {
        notify(answer ? await tandem.refusal(answer) : "Tandem did not answer. Try again.", { error: true, panel });
      }
    } catch (error) { console.error(error); }
    queue.busy = false;
    run(panel, queue);
  };

  // A button that is moved or replaced while it is pressed gets no click: answers wait until it is released.
  let isPressed = false;
  document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; }, true);
  for (const name of ["pointerup", "pointercancel"]) {
    document.addEventListener(name, () => setTimeout(() => {  // after the click
      isPressed = false;
      document.dispatchEvent(new Event("tandem:released"));
    }), true);
  }
  const released = () => isPressed && new Promise((resolve) => {
    document.addEventListener("tandem:released", resolve, { once: true });
    setTimeout(resolve, PRESS_MS);
  });

  const parts = (panel) => [...document.querySelectorAll(
    `[data-panel="${panel}"] [data-part], [data-panel="${panel}"][data-part]`)];
  const drawnParts = (panel) => Object.fromEntries(
    parts(panel).filter((part) => part.dataset.digest).map((part) => [part.dataset.part, part.dataset.digest]));

  const receive = (panel, call, reply) => {
    for (const part of parts(panel)) {
      const name = part.dataset.part;
      if (!(name in reply.parts)) continue;
      const template = document.createElement("template");
      template.innerHTML = reply.parts[name];
      patch(part, template.content);
      part.dataset.digest = reply.digests[name];
    }
    if (panel === "preview") preview(reply);
    if (reply.message) notify(reply.message, { undo: reply.undo, error: reply.error, panel });
    if (reply.announce) announce(reply.announce);
    if (reply.edit) edit(reply.edit);
    if (reply.saved) leave();
    if (reply.watch) watch(reply.watch);
    if ("show" in reply) tandem.show(reply.show);
    if (reply.added) { $("#queue-add form")?.reset(); watch(reply.added[0]); }
    if (reply.models) tandem.modelsChanged(reply);
    document.dispatchEvent(new CustomEvent("tandem:reply", { detail: { panel, call, reply } }));
    tandem.showTimes();
    tandem.tidy();
  };

  // Patches new HTML into an element: nodes with the same data-key or place stay the same nodes, so that focus, typed
  // text, open details and scroll positions stay as they are.
  const keyOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.dataset.key : undefined;
  // A node that is moved loses the focus; the next key must not go to the page.
  const move = (node, parent, before) => {
    const focused = node.contains(document.activeElement) ? document.activeElement : null;
    parent.insertBefore(node, before);
    focused?.focus({ preventScroll: true });
  };
  const patch = (old, fresh) => {
    const keyed = new Map([...old.children].filter(keyOf).map((node) => [keyOf(node), node]));
    // A node that is moved while the pointer is down on it gets no click: as few as possible are moved.
    const keys = new Set([...fresh.children].map(keyOf)), isList = keys.size > 0 && !keys.has(undefined);
    for (const [key, node] of keyed) if (!keys.has(key)) node.remove();
    const isSpace = (node) => isList && node.nodeType === Node.TEXT_NODE && !node.data.trim();
    for (const node of [...old.childNodes].filter(isSpace)) node.remove();
    let place = old.firstChild;
    for (const next of [...fresh.childNodes].filter((node) => !isSpace(node))) {
      const key = keyOf(next);
      let same = key ? keyed.get(key) : place;
      if (same && (same.nodeName !== next.nodeName || keyOf(same) !== key)) same = null;
      if (!same) { old.insertBefore(next, place); continue; }
      // The node before it has moved down: it is moved when its turn comes.
      if (place && keyed.get(keyOf(place)) === place && same === place.nextSibling) place = same;
      if (same === place) place = place.nextSibling; else move(same, old, place);
      if (same.nodeType !== Node.ELEMENT_NODE) {
        if (same.nodeValue !== next.nodeValue) same.nodeValue = next.nodeValue;
        continue;
      }
      // times.js shows it relative to now.
      if (same.nodeName === "TIME" && same.dateTime === next.dateTime) continue;
      // What is open, and the clip that is on the stage, only the page knows.
      const isOfPage = (name) => name === "aria-current" || (name === "open" && same.nodeName === "DETAILS");
      for (const { name } of [...same.attributes]) if (!next.hasAttribute(name) && !isOfPage(name)) same.removeAttribute(name);
      for (const { name, value } of next.attributes) if (same.getAttribute(name) !== value) same.setAttribute(name, value);
      if (!same.matches("[data-export-place]")) patch(same, next);  // export.js fills it
    }
    while (place) { const removed = place; place = place.nextSibling; removed.remove(); }
  };

  const preview = (reply) => {
    tandem.planned(reply);
    if (reply.complete === false) setTimeout(() => request("preview"), AGAIN_MS);
  };
  tandem.preview = () => { if (tandem.restored && $("[data-panel=preview]")) request("preview"); };

  // Buttons. Actions that cannot be undone are confirmed first; Escape or Cancel cancels them.
  const LOCAL = {
    menu: () => {},
    use: (target) => { tandem.useModel(target); goTo(TITLES.make); },
    dismiss: () => notify(""),
    leave: () => leave(),
    "more-rows": () => { view.rows += 1; request("queue"); },
    key: () => { view.key = !view.key; request("cluster"); },
  };
  const ask = (question, title, noTitle, then) => {
    const dialog = document.createElement("dialog");
    dialog.className = "ask";
    dialog.setAttribute("aria-labelledby", "ask-question");
    dialog.innerHTML = '<p id="ask-question"></p><div><button type="button" class="button"></button>'
      + '<button type="button" class="button strong"></button></div>';
    dialog.querySelector("p").textContent = question;
    const [no, yes] = dialog.querySelectorAll("button");
    yes.textContent = title;
    no.textContent = noTitle;
    no.addEventListener("click", () => dialog.close());
    yes.addEventListener("click", () => { dialog.close(); then(); });
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
    no.focus();
  };
  // In a form, a list with data-target has the target, and its options have the questions.
  const press = (button) => {
    const panel = button.closest("[data-panel]").dataset.panel, form = button.closest("form");
    const list = form?.querySelector("select[data-target]");
    const { action, target, confirm } = list
      ? { ...button.dataset, target: list.value, confirm: list.selectedOptions[0].dataset.confirm } : button.dataset;
    const values = form ? Object.fromEntries(new FormData(form)) : {};
    const act = () => {
      if (action in LOCAL) { LOCAL[action](target); return; }
      request(panel, action, target, values);
    };
    // Next to "Cancel all", "Cancel" would be ambiguous.
    if (confirm) ask(confirm, button.textContent, action.startsWith("cancel") ? "Back" : "Cancel", act); else act();
  };
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-action]");
    if (button && button.getAttribute("aria-disabled") !== "true") press(button);
    const reuse = event.target.closest("[data-reuse]");
    if (reuse) {
      $("#lightbox")?.close();
      goTo(TITLES.make);
      fill(parse(reuse.dataset.reuse, {}), reuse.dataset.only);
    }
    const report = event.target.closest("[data-report]");
    if (report) copyReport(report.dataset.report, report.closest(".report").querySelector(".with-prompts").checked);
    const copied = event.target.closest("[data-copy]");
    if (copied) copy(copied.dataset.copy);
    if (event.target.closest(".fold > button")) setTimeout(() => refresh(), 60);
    const tab = event.target.closest("#tabs [role=tab]");
    if (tab) setTimeout(() => { refresh(ALL); if (tab.textContent.trim() === "Make") tandem.preview(); }, 60);
  });
  // Enter in a form presses its first button.
  document.addEventListener("submit", (event) => {
    if (!event.target.closest("[data-panel]")) return;
    event.preventDefault();
    const button = event.target.querySelector("[data-action]");
    if (button) press(button);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.matches("[data-panel] form input:not([type=checkbox])")) {
      event.preventDefault();
      event.target.form.requestSubmit();
    }
  });

  const TITLES = { make: "Make", queue: "Queue", history: "History", models: "Models", engines: "Engines" };
  const tab = () => $("#tabs [role=tab][aria-selected=true]")?.textContent.trim() ?? TITLES.make;
  const goTo = tandem.goTo = (title) => {
    [...document.querySelectorAll("#tabs [role=tab]")].find((entry) => entry.textContent.trim() === title)?.click();
  };
  const isVisible = (element) => element.offsetParent !== null;
  // Asks visible panels for changes: those that show files or other processes (data-poll) and those that follow the jobs
  // (data-follow); the history only when it is opened or a job has ended.
  const refresh = (kinds = "[data-poll], [data-follow]") => {
    // A part that Gradio has replaced is empty.
    if ($('[data-panel="preview"][data-part]:not([data-digest])')) tandem.preview();
    for (const panel of document.querySelectorAll(".gradio-container [data-panel]:not([data-part])")) {
      const isEmpty = "follow" in panel.dataset && panel.querySelector("[data-part]:not([data-digest])");
      if ((panel.matches(kinds) || isEmpty) && isVisible(panel)) request(panel.dataset.panel);
    }
  };
  const ALL = "[data-poll], [data-follow], [data-panel=history]";

  // A resumed or added job is shown in Make, unless another one runs there.
  const watch = (id) => {
    if (OPEN.concat("stopping").includes($("#status .status")?.dataset.state)) return;
    tandem.remember(id);
    $("#attach")?.click();
  };

  // Fills the form as the buttons below a video do. `source` is shown with what was not filled in.
  const fill = tandem.fill = (request, what = "all", source = "") => {
    const carrier = document.createElement("button");
    carrier.dataset.use = what;
    carrier.dataset.source = source;
    carrier.dataset.request = JSON.stringify(request);
    carrier.hidden = true;
    $("#facts .prose").append(carrier);
    carrier.click();
    carrier.remove();
  };

  // Messages at the foot of the page.
  const foot = document.createElement("div");
  foot.id = "foot";
  foot.dataset.panel = "queue";
  foot.innerHTML = '<p class="unseen" role="status" aria-live="polite"></p>'
    + '<div id="editing" hidden><p></p><span class="acts"></span></div>'
    + '<div id="message" hidden><p role="status" aria-live="polite"></p><span class="acts"></span></div>';
  const button = (title, action, target = "", strong = false) => {
    const made = document.createElement("button");
    made.type = "button";
    made.className = `button${strong ? " strong" : ""}`;
    made.textContent = title;
    Object.assign(made.dataset, { action, target, confirm: "" });
    return made;
  };
  // Outside a modal dialog, messages could be neither pressed nor heard.
  const raise = () => ([...document.querySelectorAll("dialog.viewer[open]")].at(-1) ?? document.body).append(foot);
  let hiding = 0;
  const notify = (text, { undo = null, error = false, panel = "queue" } = {}) => {
    const message = foot.querySelector("#message");
    clearTimeout(hiding);
    raise();
    foot.dataset.panel = panel;
    message.hidden = !text;
    message.classList.toggle("error", Boolean(error));
    message.querySelector("p").textContent = text;
    const acts = undo ? [button("Undo", "restore", undo.join(" "), true)] : [];
    message.querySelector(".acts").replaceChildren(...acts, button("Dismiss", "dismiss"));
    if (text && !undo && !error) hiding = setTimeout(() => notify(""), MESSAGE_MS);
  };
  // Says something to screen readers only.
  let forgetting = 0;
  const announce = (text) => {
    raise();
    const line = foot.querySelector(".unseen");
    line.textContent = text;
    // It must not be read when it is no longer true, and must be announced again if it happens again.
    clearTimeout(forgetting);
    forgetting = setTimeout(() => { line.textContent = ""; }, MESSAGE_MS);
  };
  const edit = ({ id, title, request }) => {
    const bar = foot.querySelector("#editing");
    bar.hidden = false;
    bar.querySelector("p").textContent = `Editing ${title} in the queue.`;
    bar.querySelector(".acts").replaceChildren(button("Save", "save", id, true), button("Discard", "leave"));
    fill(request);
    goTo(TITLES.make);
    setTimeout(() => $("#field-prompt textarea")?.focus(), 100);
  };
  const leave = () => { foot.querySelector("#editing").hidden = true; };

  document.addEventListener("input", (event) => {
    // The confirmation is for one file only.
    if (event.target.id === "import-file") $("#import-trusted").checked = false;
  });

  const copy = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      notify("Copied.");
    } catch {
      notify("This page cannot access the clipboard. Select the text and copy it.", { error: true });
    }
  };
  const copyReport = async (id, prompts) => {
    try {
      const answer = await fetch(`tandem/report/${prompts ? "whole/" : ""}${id}.json`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      try {
        await navigator.clipboard.writeText(text);
        notify(`The report is copied${prompts ? "" : ", without prompts and paths"}.`);
      } catch { // no access to the clipboard: save a file instead
        const link = document.createElement("a");
        link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
        link.download = `tandem-${id}.json`;
        link.click();
        URL.revokeObjectURL(link.href);
        notify("The report is saved as a file because this page cannot access the clipboard.");
      }
    } catch {
      notify("There is no report: Tandem does not answer, or the job does not exist any more.", { error: true });
    }
  };

  // States of the jobs, for the panels, the count at the tab, the title and the sound.
  let lastStates = null;
  // Whether a job waits, as far as is known: those behind the first are not listed.
  tandem.isQueued = (id) => lastStates !== null && ["queued", undefined].includes(lastStates.jobs[id]);
  tandem.states = (now) => {
    if (!now.jobs) { refresh(); return; }  // the panels say what is wrong with the store
    const before = lastStates ?? now;
    lastStates = now;
    const ended = Object.entries(now.jobs).filter(([id, state]) => OPEN.includes(before.jobs[id])
      && !OPEN.includes(state));
    showCount();
    tandem.percent = now.percent === null ? null : String(now.percent);
    // The end of a batch is marked once.
    const last = ended.filter(([id]) => !now.unfinished.includes(id)).map(([, state]) => state)
      .find((state) => ["done", "failed", "interrupted"].includes(state));
    if (last) {
      tandem.alertEnd(last === "done");
      if (document.hidden) tandem.notice = last === "done" ? "✓ Done · Tandem" : "✗ Failed · Tandem";
    }
    // The progress of what runs is drawn each second.
    const isProgress = isRunning() && JSON.stringify([now.jobs, now.queue]) === JSON.stringify([before.jobs, before.queue]);
    if (!document.hidden && !isProgress) refresh(ended.length && tab() !== TITLES.make ? ALL : undefined);
    tandem.tidy();
  };
  const isRunning = () => Object.values(lastStates?.jobs ?? {}).includes("running");
  const showCount = () => {
    const queue = [...document.querySelectorAll("#tabs [role=tab]")].find((entry) => entry.textContent.trim() === TITLES.queue);
    if (!queue || !lastStates) return;
    if (lastStates.queue) tandem.set(queue, "data-count", String(lastStates.queue)); else queue.removeAttribute("data-count");
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) { tandem.notice = null; refresh(); tandem.tidy(); }
  });

  tandem.panels = { view, formValues, request, notify, announce, raise, goTo, tab };

  const begin = () => {
    document.body.append(foot);
    setInterval(() => {
      showCount();
      if (!document.hidden) refresh(isRunning() ? undefined : "[data-poll]");
    }, POLL_MS);
  };
  if (document.body) begin(); else document.addEventListener("DOMContentLoaded", begin);
})();
