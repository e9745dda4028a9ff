// The tab Queue: waiting jobs are dragged by their numbers, or moved with Alt and an arrow key.
(() => {
  "use strict";
  const { request } = window.tandem.panels;
  const EDGE = 60, SPEED = 12;  // pixels: near the edge of the window, it scrolls
  const MOVES = { ArrowUp: "up", ArrowDown: "down", Home: "front" };
  const rows = () => [...document.querySelectorAll("#queue-list li[data-place]")];

  document.addEventListener("keydown", (event) => {
    const row = event.target.closest?.("#queue-list li[data-place]");
    if (!row || !event.altKey || event.ctrlKey || event.metaKey || !(event.key in MOVES)) return;
    event.preventDefault();
    request("queue", MOVES[event.key], row.dataset.key);
  });

  let drag = null;
  // Marks the gap that the pointer is in; `place` counts from 1 among the waiting jobs.
  const mark = () => {
    const targets = rows().filter((row) => row.dataset.key !== drag.id);
    const below = targets.filter((row) => {
      const { top, height } = row.getBoundingClientRect();
      return top + height / 2 < drag.y;
    });
    drag.place = below.length + 1;
    for (const row of targets) {
      row.classList.toggle("drop-before", row === targets[below.length]);
      row.classList.toggle("drop-after", below.length === targets.length && row === targets.at(-1));
    }
  };
  const scroll = () => {
    if (!drag) return;
    const by = drag.y < EDGE ? -SPEED : drag.y > innerHeight - EDGE ? SPEED : 0;
    if (by) { scrollBy(0, by); mark(); }
    requestAnimationFrame(scroll);
  };
  const finish = (moved) => {
    if (!drag) return;
    const { id, place } = drag;
    drag = null;
    for (const row of rows()) row.classList.remove("drop-before", "drop-after", "dragged");
    if (moved && place) request("queue", "move", id, { place });
  };
  document.addEventListener("pointerdown", (event) => {
    const grip = event.button === 0 && event.target.closest?.("#queue-list [data-grip]");
    if (!grip) return;
    event.preventDefault();
    const row = grip.closest("li");
    drag = { id: row.dataset.key, y: event.clientY, place: 0 };
    row.classList.add("dragged");
    requestAnimationFrame(scroll);
  });
  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    drag.y = event.clientY;
    mark();
  });
  document.addEventListener("pointerup", () => finish(true));
  document.addEventListener("pointercancel", () => finish(false));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") finish(false); });
})();
