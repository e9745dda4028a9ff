// The tab History: clips play under the pointer, more cards are loaded while scrolling, several clips are selected, the
// variations of a prompt are one card, which can be opened, one clip is shown in a dialog with arrows to its neighbors,
// and two clips are compared in another one.
(() => {
  "use strict";
  const { set } = window.tandem;
  const { view, request, raise, goTo } = window.tandem.panels;
  const REST_MS = 120;       // the pointer rests this long before a clip plays
  const TYPING_MS = 200;
  const MOST_JOINED = 50;    // as the server
  const AHEAD = "800px";     // cards are loaded this far below the window
  const $ = (selector) => document.querySelector(selector);
  const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
  const cards = () => [...document.querySelectorAll("#history-gallery .gallery > li")];
  const idsOf = (card) => card.dataset.job.split(" ");
  const cardOf = (id) => $(`#history-gallery li[data-job~="${CSS.escape(id)}"]`);
  const ask = (action, target = "") => request("history", action, target);

  // Playing under the pointer or the focus, without sound.
  let playing = null, resting = 0;
  // A removed video would keep its connection; browsers have only six for one server.
  const release = (video) => { video.pause(); video.removeAttribute("src"); video.load(); };
  const stop = () => {
    clearTimeout(resting);
    if (playing) { release(playing); playing.remove(); playing = null; }
  };
  const play = (poster) => {
    if (reducedMotion.matches || !poster.dataset.video || playing?.parentNode === poster) return;
    stop();
    playing = document.createElement("video");
    Object.assign(playing, { src: poster.dataset.video, muted: true, loop: true, playsInline: true, tabIndex: -1 });
    playing.setAttribute("aria-hidden", "true");
    poster.append(playing);
    playing.play().catch(() => {});
  };
  document.addEventListener("pointerover", (event) => {
    const poster = event.pointerType === "mouse" && event.target.closest?.("#history-gallery .frame")
      ?.querySelector(".poster");
    if (!poster) { if (!document.activeElement?.matches(".poster:focus-visible")) stop(); return; }
    clearTimeout(resting);
    resting = setTimeout(() => play(poster), REST_MS);
  });
  document.addEventListener("focusin", (event) => {
    if (event.target.matches("#history-gallery .poster:focus-visible")) play(event.target);
    else if (!event.target.contains(playing)) stop();
  });

  // More cards: while scrolling, or by the button.
  let loading = false;
  const more = () => {
    if (loading || !$("#history-gallery .more:not([hidden])")) return;
    loading = true;
    view.pages += 1;
    ask("more");
  };
  const end = new IntersectionObserver((seen) => { if (seen.at(-1).isIntersecting) more(); }, { rootMargin: AHEAD });
  let watched = null;
  const watchEnd = () => {
    if (watched) end.unobserve(watched);
    watched = $("#history-gallery .more");
    if (watched) end.observe(watched);
  };
  const append = ({ cards: html, more: further }) => {
    const template = document.createElement("template"), list = $("#history-gallery .gallery");
    template.innerHTML = html;
    list.append(...[...template.content.children].filter((card) => !cardOf(idsOf(card)[0])));
    $("#history-gallery .more").hidden = !further;
  };

  // The selection. Shift selects the cards in between.
  const selected = new Set();
  let anchor = "";
  const isSelected = (card) => idsOf(card).every((id) => selected.has(id));
  const select = (card, on, through = false) => {
    const all = cards();
    const [from, to] = [all.indexOf(cardOf(anchor)), all.indexOf(card)].sort((a, b) => a - b);
    for (const each of through && from >= 0 ? all.slice(from, to + 1) : [card]) {
      for (const id of idsOf(each)) selected[on ? "add" : "delete"](id);
    }
    [anchor] = idsOf(card);
    showSelection();
  };
  const clear = () => { selected.clear(); anchor = ""; showSelection(); };
  const showSelection = () => {
    const bar = $("#selection");
    if (!bar) return;
    const shown = cards();
    if (view.state !== "deleted" || shown.length) {
      const there = new Set(shown.flatMap(idsOf));
      for (const id of selected) if (!there.has(id)) selected.delete(id);
    }
    for (const card of shown) {
      const on = isSelected(card);
      card.classList.toggle("selected", on);
      card.querySelector("[data-select]").checked = on;
    }
    const playable = [...selected].filter((id) => "plays" in cardOf(id).dataset);
    const deleted = view.state === "deleted";
    bar.hidden = !selected.size;
    document.body.classList.toggle("selecting", Boolean(selected.size));
    const text = selected.size ? `${selected.size} selected` : "";
    if ($("#selected").textContent !== text) $("#selected").textContent = text;
    const both = selected.size === 2 && playable.length === 2;
    set(bar.querySelector("[data-action=compare]"), "aria-disabled", String(!both));
    bar.querySelector("[data-action=compare]").title = both ? "" : "Select two videos to compare them";
    const several = playable.length > 1 && playable.length <= MOST_JOINED && playable.length === selected.size;
    set(bar.querySelector("[data-action=join]"), "aria-disabled", String(!several));
    bar.querySelector("[data-action=join]").title = several ? "In the order in which they were selected" : `Select 2 to ${MOST_JOINED} videos to join them`;
    for (const name of ["compare", "join", "star-selected", "delete-selected"]) {
      bar.querySelector(`[data-action=${name}]`).hidden = deleted;
    }
    bar.querySelector("[data-action=restore-selected]").hidden = !deleted;
  };
  document.addEventListener("click", (event) => {
    const box = event.target.closest("#history-gallery [data-select]");
    if (box) select(box.closest("li"), box.checked, event.shiftKey);
    const title = event.target.closest("#history-gallery .title");
    if (title && getSelection().isCollapsed) { title.closest("li").querySelector(".poster").click(); return; }
    const poster = event.target.closest("#history-gallery .poster");
    if (poster && (event.shiftKey || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      event.stopImmediatePropagation();
      const card = poster.closest("li");
      select(card, event.shiftKey || !isSelected(card), event.shiftKey);
    }
  }, true);

  // Arrow keys move between the cards; with Shift they select.
  const beside = (from, key) => {
    const all = cards(), at = all.indexOf(from);
    const forwards = getComputedStyle(from.parentNode).direction === "rtl" ? "ArrowLeft" : "ArrowRight";
    if (["ArrowLeft", "ArrowRight"].includes(key)) return all[at + (key === forwards ? 1 : -1)];
    if (key === "Home" || key === "End") return all.at(key === "Home" ? 0 : -1);
    const down = key === "ArrowDown" ? 1 : -1;
    for (let n = at + down; all[n]; n += down) {
      if (all[n].offsetLeft === from.offsetLeft) return all[n];
    }
    return null;
  };
  document.addEventListener("keydown", (event) => {
    const control = event.target.closest?.("#history-gallery :is(.poster, [data-select])");
    if (!control || event.altKey) return;
    const card = control.closest("li");
    const command = event.ctrlKey || event.metaKey;
    if (["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key) && !command) {
      const next = beside(card, event.key);
      event.preventDefault();
      if (!next) return;
      if (event.shiftKey) {
        if (!isSelected(card)) select(card, true);
        select(next, true, true);
      }
      const other = next.querySelector(control.matches(".poster") ? ".poster" : "[data-select]");
      other.focus({ focusVisible: true });
      other.scrollIntoView({ block: "nearest" });
    } else if (event.key === "a" && command) {
      event.preventDefault();
      selectAll();
    } else if (event.key === "Delete") {
      event.preventDefault();
      if (!selected.size) select(card, true);
      removeSelected();
    } else if (event.key === "Escape" && selected.size) {
      clear();
    }
  });
  const selectAll = () => { for (const id of cards().flatMap(idsOf)) selected.add(id); showSelection(); };
  const ids = () => [...selected].join(" ");
  const removeSelected = () => {
    if (view.state === "deleted") return;
    // The focus goes to the first card that stays.
    const all = cards(), last = Math.max(...[...selected].map((id) => all.indexOf(cardOf(id))));
    const next = all[last + 1] ?? all.findLast((card) => !isSelected(card));
    ask("delete", ids());
    clear();
    (next?.querySelector(".poster") ?? $("#history-search")).focus();
  };

  // One clip in a dialog.
  const box = () => $("#lightbox");
  let opened = "", onward = 0, focusIds = "";
  const show = (id) => {
    $("#history-detail").querySelectorAll("video").forEach(release);
    view.open = id;
    ask("open", id);
  };
  // The clip after or before another one, also within a stack; empty without one.
  const neighbor = (id, by) => { const all = cards().flatMap(idsOf); return all[all.indexOf(id) + by] ?? ""; };
  const step = (by) => {
    const next = cardOf(view.open) && neighbor(view.open, by);
    if (next) { show(next); return; }
    if (by > 0 && $("#history-gallery .more:not([hidden])")) { onward = by; more(); }
  };
  const empty = (part) => {
    part.querySelectorAll("video").forEach(release);
    part.replaceChildren();
    delete part.dataset.digest;
  };
  const shown = () => {
    const dialog = box(), clip = dialog.querySelector("[data-detail]");
    // The answer for a clip may come after its dialog was closed.
    if (!clip || !view.open) { empty($("#history-detail")); if (dialog.open) dialog.close(); return; }
    const isNew = !dialog.open;
    if (isNew) { stop(); dialog.showModal(); raise(); }
    if (isNew || clip.dataset.detail !== opened) {
      const isStepping = dialog.contains(document.activeElement) && document.activeElement.closest("[data-action=previous], [data-action=next]");
      if (!isStepping) clip.querySelector(".about").focus({ preventScroll: true });
      dialog.scrollTop = 0;
      const video = clip.querySelector("video");
      if (video && !reducedMotion.matches) { video.muted = true; video.play().catch(() => {}); }
    }
    opened = clip.dataset.detail;
    for (const [name, by] of [["previous", -1], ["next", 1]]) {
      const further = neighbor(opened, by) || (by > 0 && $("#history-gallery .more:not([hidden])"));
      set(dialog.querySelector(`[data-action=${name}]`), "aria-disabled", String(!cardOf(opened) || !further));
    }
  };
  const comparison = () => $("#comparison");
  const compare = (pair) => { view.pair = pair; ask("compare"); };
  window.tandem.compare = compare;
  const closed = (event) => {
    if (event.target === box()) {
      empty($("#history-detail"));
      const card = cardOf(opened);
      view.open = opened = "";
      (card ?? cards()[0])?.querySelector(".poster").focus();
    } else if (event.target === comparison()) {
      view.pair = [];
      for (const part of comparison().querySelectorAll("[data-part]")) empty(part);
    } else return;
    raise();
  };
  document.addEventListener("close", closed, true);
  document.addEventListener("click", (event) => {
    if (event.target.matches("dialog.viewer:not(#mask-editor)")) event.target.close();  // the background
  });
  document.addEventListener("keydown", (event) => {
    if (!box()?.open || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
    if (!["ArrowLeft", "ArrowRight"].includes(event.key) || event.target.matches("input, select, textarea, video")) return;
    event.preventDefault();
    step(event.key === "ArrowLeft" ? -1 : 1);
  });

  const ACTIONS = {
    open: ({ target }) => show(target),
    unstack: ({ target }) => { view.stacks.push(...target.split(" ")); focusIds = target; request("history"); },
    stack: ({ target }) => {
      const ids = target.split(" ");
      view.stacks = view.stacks.filter((id) => !ids.includes(id));
      focusIds = target;
      request("history");
    },
    close: () => box().close(),
    previous: () => step(-1),
    next: () => step(1),
    more,
    "delete-open": ({ target }) => {
      view.open = neighbor(target, 1) || neighbor(target, -1);
      ask("delete", target);
    },
    compare: () => compare([...selected]),
    join: () => window.tandem.openExport($("#selection [data-action=join]"), [...selected]),
    "close-compare": () => comparison().close(),
    "star-selected": () => ask("star", ids()),
    "delete-selected": removeSelected,
    "restore-selected": () => { ask("restore", ids()); clear(); },
    "select-all": selectAll,
    "select-none": () => { clear(); cards()[0]?.querySelector("[data-select]").focus(); },
    "show-all": () => {
      $("#history-search").value = "";
      $("#history-state").value = "all";
      find({ search: "", state: "all" });
    },
    make: () => { goTo("Make"); setTimeout(() => $("#field-prompt textarea")?.focus(), 100); },
  };
  // Before the panels' own script, which sends the other actions to the server.
  document.addEventListener("click", (event) => {
    const button = event.target.closest('[data-panel="history"] [data-action]');
    if (!button || !(button.dataset.action in ACTIONS)) return;
    event.stopPropagation();
    if (button.getAttribute("aria-disabled") !== "true") ACTIONS[button.dataset.action](button.dataset);
  }, true);

  // Filters.
  const find = (changes) => {
    Object.assign(view, changes, { pages: 1, stacks: [] });
    clear();
    request("history");
  };
  document.addEventListener("change", (event) => {
    if (event.target.id === "history-state") find({ state: event.target.value });
  });
  let typing = 0;
  document.addEventListener("input", (event) => {
    if (event.target.id !== "history-search") return;
    clearTimeout(typing);
    typing = setTimeout(() => find({ search: event.target.value }), TYPING_MS);
  });

  document.addEventListener("tandem:reply", ({ detail: { panel, call, reply } }) => {
    if (panel !== "history") return;
    if (call.action === "more") {
      loading = false;
      if (reply.cards !== undefined) append(reply); else view.pages -= 1;
      if (onward && box()?.open) step(onward);
      onward = 0;
    }
    if (reply.error) view.open = opened;
    if (["star", "unstar"].includes(call.action) && !reply.error) {
      const on = call.action === "star";
      for (const id of call.target.split(" ")) {
        const card = cardOf(id), star = card?.querySelector(".frame > [data-action$=star]");
        if (card && !star) request("history");  // the count of a stack
        if (!star) continue;
        star.dataset.action = on ? "unstar" : "star";
        star.setAttribute("aria-pressed", String(on));
      }
    }
    // The card of a stack was replaced by those of its clips, or the other way round.
    if (focusIds && call.action === "refresh") {
      cardOf(focusIds.split(" ")[0])?.querySelector(".poster").focus({ preventScroll: true });
      focusIds = "";
    }
    if (call.action === "open" || box()?.open) shown();
    if (reply.compare) {
      comparison().showModal();
      raise();
      $("#history-comparison h2").focus();
      if (reply.measure) ask("measure");
    } else if (comparison().open && !$("#history-comparison section")) {
      comparison().close();
    }
    showSelection();
    watchEnd();
    // Measuring every file takes longer than the cards.
    if (call.action === "refresh") ask("measure-storage");
  });
})();
