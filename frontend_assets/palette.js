// Ctrl+K: a list of what the page can do now. It has the page's own buttons, and presses the one that is chosen.
(() => {
  "use strict";
  const tandem = window.tandem;
  const $ = (selector) => document.querySelector(selector);
  const name = (button) => button.getAttribute("aria-label") || button.textContent.trim();
  const usable = (button) => !button.disabled && !button.hidden && button.getAttribute("aria-disabled") !== "true";
  const shown = (button) => button.checkVisibility();
  // Buttons of Make can be chosen on every tab: Make is opened first.
  const GROUPS = [
    ["#generate, #cancel, #queue-next [data-action=add]", shown],
    ["[role=tab]", shown, (button) => `Open ${name(button)}`],
    ["#chips [data-chip], #advanced", (button) => !button.hidden],
    ["#presets input", () => true, (input) => `Preset: ${input.parentNode.querySelector("span").textContent}`],
    ["#picture .pick", shown, (pick) => `Select ${name(pick).toLowerCase()}`],
    ["#picture [aria-pressed=true] ~ .acts button", shown],
    ["#facts .actions :is(button, a)[aria-label], #facts .menu-items button", () => Boolean($("#picture video"))],
    ["#open-settings", shown],
    ["#settings-sheet [data-command]", () => true, (input) => input.dataset.command],
  ];
  const commands = () => GROUPS.flatMap(([selector, isThere, title = name]) => [...document.querySelectorAll(selector)]
    .filter((button) => usable(button) && isThere(button)).map((button) => ({ button, title: title(button) })));

  // A tab that is opened shows its parts a moment later.
  const press = (node, act, tries = 40) => {
    if (!node.checkVisibility() && tries) { setTimeout(() => press(node, act, tries - 1), 25); return; }
    node.focus();
    act?.();
  };

  let offered = [], chosen = 0;
  const choose = (at) => {
    const rows = $("#palette ul").children;
    chosen = rows.length ? (at + rows.length) % rows.length : 0;
    [...rows].forEach((row, n) => row.setAttribute("aria-selected", String(n === chosen)));
    rows[chosen]?.scrollIntoView({ block: "nearest" });
    $("#palette input").setAttribute("aria-activedescendant", rows[chosen]?.id ?? "");
  };
  const search = () => {
    const text = $("#palette input").value.trim().toLowerCase(), words = text.split(/\s+/);
    const rank = ({ title }) => title.toLowerCase() === text ? 0 : title.toLowerCase().startsWith(text) ? 1 : 2;
    offered = commands().filter(({ title }) => words.every((word) => title.toLowerCase().includes(word)))
      .sort((first, second) => rank(first) - rank(second));
    $("#palette ul").replaceChildren(...offered.map(({ title }, n) => {
      const row = document.createElement("li");
      Object.assign(row, { id: `command-${n}`, textContent: title });
      row.setAttribute("role", "option");
      return row;
    }));
    $("#palette p").textContent = offered.length ? "" : "Nothing has these words.";
    choose(0);
  };
  const run = () => {
    const button = offered[chosen]?.button;
    if (!button) return;
    $("#palette").hidePopover();
    if (button.closest("#columns")) tandem.goTo("Make");
    if (button.closest(".popover, .menu-items, #settings-sheet")) button.click(); else press(button, () => button.click());
  };

  document.addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey) return;
    if (!$("#palette") || $("dialog[open]")) return;
    event.preventDefault();
    $("#palette").togglePopover();
  });
  document.addEventListener("beforetoggle", ({ target, newState }) => {
    if (target.id !== "palette" || newState !== "open") return;
    $("#palette input").value = "";
    search();
  }, true);
  document.addEventListener("input", ({ target }) => { if (target.closest("#palette")) search(); });
  document.addEventListener("keydown", (event) => {
    if (!event.target.closest("#palette")) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) choose(chosen + step);
    else if (event.key === "Enter") run();
    else return;
    event.preventDefault();
  });
  document.addEventListener("click", ({ target }) => {
    const row = target.closest("#palette li");
    if (row) { choose([...row.parentNode.children].indexOf(row)); run(); }
    if (target.closest(".skip")) { tandem.goTo("Make"); press($("#field-prompt textarea")); }
  });
})();
