// Times of the past relative to now, "2 min ago" or "yesterday 14:05", with the whole date as the title. They are
// refreshed without new HTML from the server.
(() => {
  "use strict";
  const tandem = window.tandem;
  const REFRESH_MS = 20000, MINUTE_MS = 60000, HOUR_MINUTES = 60;
  const two = (number) => String(number).padStart(2, "0");
  const clock = (time) => `${two(time.getHours())}:${two(time.getMinutes())}`;
  const date = (time) => `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  const isDay = (time, now, before) => date(time) === date(new Date(now.getFullYear(), now.getMonth(), now.getDate() - before));

  // A clock that is ahead of this browser's is taken for the same.
  const relative = tandem.relativeTime = (time, now) => {
    const minutes = Math.floor((now - time) / MINUTE_MS);
    if (minutes < 1) return "just now";
    if (minutes < HOUR_MINUTES) return `${minutes} min ago`;
    if (isDay(time, now, 0)) return `today ${clock(time)}`;
    if (isDay(time, now, 1)) return `yesterday ${clock(time)}`;
    return `${date(time)} ${clock(time)}`;
  };
  const show = tandem.showTimes = () => {
    const now = new Date();
    for (const node of document.querySelectorAll("time[datetime]")) {
      const time = new Date(node.dateTime), text = relative(time, now), title = `${date(time)} ${clock(time)}`;
      if (node.textContent !== text) node.textContent = text;
      if (node.title !== title) node.title = title;
    }
  };
  setInterval(() => { if (!document.hidden) show(); }, REFRESH_MS);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) show(); });
})();
