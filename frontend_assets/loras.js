// The list of LoRA files: a selected file is a line "name:strength" of the text field below the list, which the request
// is read from. Lines for other files stay as they are.
(() => {
  "use strict";
  const $ = (selector) => document.querySelector(selector);
  const SYNC_MS = 400;
  const field = () => $("#field-loras textarea");
  const rows = () => [...document.querySelectorAll("[data-lora]")];
  // The line's prefix, name and strength, as `parse_lora` reads it.
  const parse = (line) => {
    const [, expert, rest] = /^((?:both|high|low)=)?(.*)$/.exec(line.trim());
    const parts = /^(.*):\s*(-?[0-9.]+(?:e-?[0-9]+)?)$/i.exec(rest);
    return { expert: expert ?? "", name: parts ? parts[1] : rest, strength: parts ? Number(parts[2]) : 1 };
  };

  let shown = null, searched = "";
  const write = (text) => {
    const area = field();
    if (area.value === text) return;
    area.value = text;
    shown = text;
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  // Changes the line of one file; `null` removes it.
  const change = (name, strength) => {
    const lines = field().value.split("\n").filter((line) => line.trim());
    const at = lines.findIndex((line) => parse(line).name === name);
    const line = strength === null ? [] : [`${at < 0 ? "" : parse(lines[at]).expert}${name}:${strength}`];
    if (at < 0) lines.push(...line); else lines.splice(at, 1, ...line);
    write(lines.join("\n"));
  };

  const sync = () => {
    const area = field();
    if (!area || !rows().length) return;
    const strengths = new Map(area.value.split("\n").map((line) => parse(line)).map((entry) => [entry.name, entry.strength]));
    const words = searched.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows()) {
      const name = row.dataset.lora, chosen = strengths.has(name);
      const box = row.querySelector("input[type=checkbox]"), strength = row.querySelector(".strength");
      box.checked = chosen;
      box.disabled = "problem" in row.dataset && !chosen;   // one that no longer fits can be removed
      strength.hidden = !chosen;
      for (const input of strength.querySelectorAll("input")) {
        if (chosen && input !== document.activeElement) input.value = strengths.get(name);
      }
      row.hidden = !chosen && !words.every((word) => name.toLowerCase().includes(word));
    }
    shown = area.value;
  };

  document.addEventListener("input", (event) => {
    if (event.target.id === "lora-search") { searched = event.target.value; sync(); }
    const row = event.target.closest("[data-lora]");
    if (!row) { if (event.target === field()) sync(); return; }
    const name = row.dataset.lora;
    if (event.target.type === "checkbox") change(name, event.target.checked ? 1 : null);
    else if (event.target.value) change(name, Number(event.target.value));  // also one that will be refused
    sync();
  });
  // An empty number becomes the strength that the line has.
  document.addEventListener("focusout", ({ target }) => { if (target.closest("[data-lora]")) setTimeout(sync, 0); });
  // The form is filled without an event, and the list is drawn again when files change.
  setInterval(() => {
    const list = $("#loras-list");
    if (list && !document.hidden && list.offsetParent && field()) {
      if (field().value !== shown || rows().some((row) => row.querySelector(".strength").hidden === row.querySelector("input").checked)) sync();
      else if (rows().some((row) => "problem" in row.dataset && !row.querySelector("input").disabled)) sync();
    }
  }, SYNC_MS);
})();
