// The videos of a group on the stage: one is selected, which the row below is about; one can be enlarged. A group is
// on the stage while `#picture .cells` has entries.
(() => {
  "use strict";
  const tandem = window.tandem;
  const { set } = tandem;
  const REST_MS = 120;   // the selection rests this long before the server is asked about it
  const $ = (selector) => document.querySelector(selector);
  const picks = () => [...document.querySelectorAll("#picture [data-pick]")];
  const idOf = (pick) => pick?.dataset.pick ?? "";
  const pressed = () => picks().find((pick) => pick.getAttribute("aria-pressed") === "true");
  tandem.hasGroup = () => Boolean(picks().length);
  tandem.isTyping = (node) => Boolean(node.closest(
    "textarea, select, [contenteditable], input:not([type=range], [type=radio], [type=checkbox])"));

  // What was selected last, until the server's answer shows it.
  let selectedId = "", resting = 0;
  let isLarge = false;
  let visibleId = "";
  // Scrolls the cells only, not the page.
  const scrollTo = (pick) => {
    const cells = $("#picture .cells"), { top, bottom } = pick.getBoundingClientRect();
    const frame = cells.getBoundingClientRect();
    cells.scrollTop += Math.min(top - frame.top, 0) + Math.max(bottom - frame.bottom, 0);
    visibleId = idOf(pick);
  };
  const tidy = tandem.tidyGroup = () => {
    const all = picks(), shown = $("#status .status")?.dataset.job ?? "";
    if (selectedId === shown || !all.some((pick) => idOf(pick) === selectedId)) selectedId = "";
    if (!all.length) isLarge = false;
    const now = selectedId || shown;
    if (now !== visibleId && !isLarge && all.length) scrollTo(all.find((pick) => idOf(pick) === now) ?? all[0]);
    for (const pick of all) {
      const on = idOf(pick) === now, cell = pick.parentNode;
      set(pick, "aria-pressed", String(on));
      // One stop of the Tab key for the cells; the arrow keys move between them.
      for (const control of cell.querySelectorAll("button")) set(control, "tabindex", on ? "0" : "-1");
      const enlarge = cell.querySelector("[data-enlarge]"), text = isLarge ? "Show all" : "Enlarge";
      set(enlarge, "aria-pressed", String(isLarge));
      set(enlarge, "title", `${text} (Enter)`);
    }
    if (document.body.classList.contains("large") !== isLarge) document.body.classList.toggle("large", isLarge);
  };
  const select = (pick) => {
    if (!pick) return;
    const id = idOf(pick);
    if (pick === pressed()) return;
    selectedId = id;
    tandem.select(id);
    tidy();
    clearTimeout(resting);
    resting = setTimeout(() => { tandem.select(id); $("#show")?.click(); }, REST_MS);
  };
  const enlarge = (on = !isLarge) => {
    isLarge = on;
    tidy();
  };
  // Enter and the arrow keys go on from the selected one.
  const focus = () => pressed()?.focus({ preventScroll: true });
  const act = (pick, action) => pick?.parentNode.querySelector(`[data-action=${action}], [data-action=un${action}]`)?.click();

  document.addEventListener("click", ({ target, detail }) => {
    const button = target.closest("#picture [data-enlarge]");
    if (button) { select(button.closest("li").querySelector(".pick")); enlarge(); return; }
    const pick = target.closest("#picture .pick");
    if (!pick || ("done" in pick.dataset && tandem.compareWith(idOf(pick)))) return;
    if (isLarge && detail) tandem.togglePlay(); else select(pick);
  });
  document.addEventListener("dblclick", ({ target }) => { if (target.closest("#picture .pick")) enlarge(); });

  // The pick beside another one; in the first and last row there is none above and below.
  const beside = (pick, key) => {
    const all = picks(), at = all.indexOf(pick);
    const columns = isLarge ? 1 : Number(getComputedStyle($("#picture .cells")).getPropertyValue("--columns"));
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key];
    return all[at + by];
  };
  const onPicks = (event) => event.target === document.body || event.target.matches("#picture .pick");
  const KEYS = {
    k: () => act(pressed(), "star"),
    x: () => act(pressed(), "discard"),
    " ": (event) => onPicks(event) && (tandem.togglePlay(), true),
    enter: (event) => {
      if (!onPicks(event)) return false;
      if (tandem.isComparing()) event.target.click(); else { enlarge(); focus(); }
      return true;
    },
    escape: (event) => isLarge && !event.defaultPrevented && !$(":popover-open, details.menu[open]") && (enlarge(false), true),
  };
  const press = (event) => {
    const key = event.key, at = Number(key);
    if (key.startsWith("Arrow")) {
      if (!onPicks(event)) return false;
      if (tandem.isComparing()) beside(event.target, key)?.focus(); else { select(beside(pressed(), key)); focus(); }
      return true;
    }
    if (at >= 1 && at <= 9) {
      const pick = picks()[at - 1];
      if (!pick) return false;
      if (tandem.isComparing()) { pick.click(); return true; }
      if (isLarge && pick === pressed()) enlarge(false); else select(pick);
      focus();
      return true;
    }
    const run = KEYS[key.toLowerCase()];
    return Boolean(run) && (event.repeat || run(event) !== false);
  };
  // Before the keys of the player.
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey || $("dialog[open]")) return;
    if (tandem.isTyping(event.target) || !$("#picture .cells")?.checkVisibility() || !tandem.hasGroup()) return;
    if (!press(event)) return;
    event.preventDefault();
    event.stopImmediatePropagation();
  });
})();
