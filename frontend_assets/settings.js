// Settings (Ctrl+,): opens the sheet, stores the default model and size, and leads to the tabs where space is freed.
(() => {
  "use strict";
  const tandem = window.tandem;
  const DEFAULTS = "tandem.defaults";
  const REFRESH_MS = 2000;   // how often an open sheet asks for the state of the share link
  const SIZE = /^(\d{1,4})x(\d{1,4})$/;
  const $ = (selector) => document.querySelector(selector);
  const sheet = () => $("#settings-sheet");
  const isOwners = () => "panel" in sheet().dataset;

  // The default model and size as fields of a request; empty without a default.
  tandem.defaults = () => {
    try {
      const { model, width, height } = JSON.parse(tandem.read("localStorage", DEFAULTS) || "{}");
      if (typeof model !== "string" || !model) return {};
      return Number.isInteger(width) && Number.isInteger(height) ? { model, width, height } : { model };
    } catch { return {}; }
  };
  // A choice that is no longer offered stays visible.
  const choose = (list, value, title) => {
    if (![...list.options].some((option) => option.value === value)) list.add(new Option(title, value));
    list.value = value;
  };
  const showDefaults = () => {
    const model = $("#default-model"), size = $("#default-size");
    if (!model) return;
    const { model: name = "", width, height } = tandem.defaults();
    choose(model, name, `${name} (not installed)`);
    const sizes = JSON.parse(model.selectedOptions[0].dataset.sizes ?? "[]");
    const offered = sizes.map(([value, title]) => new Option(title, value));
    size.replaceChildren(new Option("The model’s own", ""), ...offered);
    choose(size, width ? `${width}x${height}` : "", `${width} × ${height}`);
    size.disabled = !name;
  };
  document.addEventListener("change", ({ target }) => {
    if (target.id === "default-model" || target.id === "default-size") {
      // Another model has other sizes.
      const [, width, height] = (target.id === "default-size" && SIZE.exec(target.value)) || [];
      const size = width ? { width: Number(width), height: Number(height) } : {};
      tandem.write("localStorage", DEFAULTS, JSON.stringify({ model: $("#default-model").value, ...size }));
      showDefaults();
    } else if (target.id === "qr-login") {
      tandem.panels.view.login = target.checked;
      tandem.panels.request("settings");
    }
  });

  let refreshing = 0;
  const open = () => {
    showDefaults();
    tandem.showAlerts();
    sheet().showModal();
    tandem.panels.raise();
    if (!isOwners()) return;
    tandem.panels.request("settings", "open");
    refreshing = setInterval(() => { if (!document.hidden) tandem.panels.request("settings"); }, REFRESH_MS);
  };
  document.addEventListener("close", ({ target }) => {
    if (target !== sheet()) return;
    clearInterval(refreshing);
    tandem.panels.view.login = false;
    // The next one who opens it should not see the login in the code.
    for (const part of target.querySelectorAll("[data-part=sharing]")) {
      part.replaceChildren();
      delete part.dataset.digest;
    }
    tandem.panels.raise();
  }, true);
  document.addEventListener("tandem:reply", ({ detail: { panel } }) => { if (panel === "settings") showDefaults(); });

  // Opens what frees space on a tab.
  const goTo = (title) => {
    sheet().close();
    tandem.goTo(title);
    $("#tabs [role=tab][aria-selected=true]")?.focus();
    if (title === "History") unfold();
  };
  const unfold = (tries = 40) => {
    const storage = $("#history-storage details");
    if (storage) storage.open = true; else if (tries) setTimeout(() => unfold(tries - 1), 50);
  };

  document.addEventListener("click", ({ target }) => {
    if (target.closest("#open-settings")) open();
    if (target.closest("[data-close-settings]")) sheet().close();
    const tab = target.closest("#settings-sheet [data-go]");
    if (tab) goTo(tab.dataset.go);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "," || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey || !sheet()) return;
    event.preventDefault();
    if (sheet().open) sheet().close(); else if (!$("dialog[open]")) open();
  });
})();
