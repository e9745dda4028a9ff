// Menus of further actions: one is open at a time; Escape, an action or a press elsewhere closes it; the arrow keys move.
(() => {
  "use strict";
  const open = () => document.querySelector("details.menu[open]");
  const close = (menu) => {
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus({ preventScroll: true });
  };
  // Before the action: its confirmation returns the focus to the menu.
  document.addEventListener("click", (event) => {
    const menu = open(), inside = event.target.closest("details.menu");
    // The panels' script presses hidden buttons.
    if (!menu || !event.isTrusted) return;
    if (menu !== inside) menu.open = false;
    else if (event.target.closest(".menu-items [data-action]:not([aria-disabled=true])")) close(menu);
  }, true);
  document.addEventListener("keydown", (event) => {
    const menu = event.target.closest?.("details.menu");
    if (!menu) return;
    if (event.key === "Escape" && menu.open) { event.preventDefault(); close(menu); }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    menu.open = true;
    const items = [...menu.querySelectorAll(".menu-items button")];
    const place = items.indexOf(document.activeElement);
    items[(place < 0 && step < 0 ? items.length - 1 : (place + step + items.length) % items.length)]?.focus();
  });
  document.addEventListener("toggle", ({ target }) => {
    if (target.matches("details.menu[open]")) target.querySelector(".menu-items").scrollIntoView({ block: "nearest" });
  }, true);
  // A menu that the focus leaves is closed.
  document.addEventListener("focusout", (event) => {
    const menu = event.target.closest?.("details.menu[open]");
    if (menu && event.relatedTarget && !menu.contains(event.relatedTarget)) menu.open = false;
  });
})();
