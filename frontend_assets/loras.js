// The list of LoRA files: a selected file is a line "name:strength" of the text field below the list, which the request
// is read from; "@0-0.5" after it is the part of the steps. Lines for other files, and further lines for the same file,
// stay as they are.
(() => {
  "use strict";
  const $ = (selector) => document.querySelector(selector);
  const SYNC_MS = 400;
  const field = () => $("#field-loras textarea");
  const rows = () => [...document.querySelectorAll("[data-lora]")];
  // The line's prefix, name, strength and part of the steps in percent, as `parse_lora` reads it.
  const parse = (line) => {
    const [, expert, all, start, end] = /^((?:both|high|low)=)?(.*?)(?:@([0-9.]+)-([0-9.]+))?$/.exec(line.trim());
    const parts = /^(.*):\s*(-?[0-9.]+(?:e-?[0-9]+)?)$/i.exec(all);
    return {
      expert: expert ?? "", name: parts ? parts[1] : all, strength: parts ? Number(parts[2]) : 1,
      start: percent(start ?? 0), end: percent(end ?? 1),
    };
  };
  const percent = (share) => Math.round(1e4 * share) / 100;
  const written = ({ expert, name, strength, start, end }) =>
    `${expert}${name}:${strength}${start === 0 && end === 100 ? "" : `@${start / 100}-${end / 100}`}`;

  let shown = null, searched = "";
  const write = (text) => {
    const area = field();
    if (area.value === text) return;
    area.value = text;
    shown = text;
    area.dispatchEvent(new Event("input", { bubbles: true }));
  };
  // Changes values of the first line of one file; `null` removes its lines.
  const change = (name, values) => {
    const lines = field().value.split("\n").filter((line) => line.trim());
    const at = lines.findIndex((line) => parse(line).name === name);
    if (values === null) { write(lines.filter((line) => parse(line).name !== name).join("\n")); return; }
    const line = written({ ...parse(at < 0 ? name : lines[at]), ...values });
    if (at < 0) lines.push(line); else lines.splice(at, 1, line);
    write(lines.join("\n"));
  };

  const sync = () => {
    const area = field();
    if (!area || !rows().length) return;
    const entries = new Map(area.value.split("\n").map(parse).reverse().map((entry) => [entry.name, entry]));
    const words = searched.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows()) {
      const name = row.dataset.lora, chosen = entries.has(name);
      const box = row.querySelector("input[type=checkbox]"), strength = row.querySelector(".strength");
      box.checked = chosen;
      box.disabled = "problem" in row.dataset && !chosen;   // one that no longer fits can be removed
      strength.hidden = !chosen;
      for (const input of strength.querySelectorAll("input")) {
        if (chosen && input !== document.activeElement) input.value = entries.get(name)[input.dataset.range ?? "strength"];
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
    if (event.target.type === "checkbox") change(name, event.target.checked ? {} : null);
    // Also a number that will be refused.
    else if (event.target.value && Number.isFinite(Number(event.target.value))) change(name, { [event.target.dataset.range ?? "strength"]: Number(event.target.value) });
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
