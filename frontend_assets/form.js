// The form of Make without the server: choices that are no controls of Gradio's (sizes, lengths, presets, backends),
// suggestions and words, the words that the model does not know, the panel Advanced, and errors at their fields.
(() => {
  "use strict";
  const tandem = window.tandem;
  const CUSTOM = "custom", ADVANCED = "tandem.advanced";
  const TYPING_MS = 700;   // a word that is being typed is not reported before this rest
  const MOST_WORDS = 12, LONGEST_WORD = 30, MOST_OFFERED = 8;   // in the list of unknown words
  const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
  const WORD = /[\p{L}\p{N}\p{M}]+/gu;
  const $ = (selector, parent = document) => parent.querySelector(selector);
  const $$ = (selector, parent = document) => [...parent.querySelectorAll(selector)];
  const { names, value } = tandem;

  // Changes controls of Gradio's, by name: a hidden button hands them over.
  let pending = {};
  const apply = tandem.apply = (changes) => { Object.assign(pending, changes); $("#apply").click(); };
  tandem.applied = () => {
    const now = pending;
    pending = {};
    return names().map((name) => name in now ? now[name] : { __type__: "update" });
  };

  // Choices show the form's values; a custom size or length stays open while it is typed.
  const custom = { size: false, length: false };
  const check = (radio) => { if (radio && !radio.checked) radio.checked = true; };
  const showTile = (name, text) => {
    const radios = $$(`input[name=${name}]`);
    const same = radios.find((radio) => radio.value === text);
    check(!custom[name] && same ? same : radios.find((radio) => radio.value === CUSTOM));
  };
  // The tile of the image's proportions is there only with an image.
  const showSize = () => {
    const tile = $("input[name=size][value=image]")?.parentNode;
    if (tile) {
      const hasImage = ["image", "video", "control"].some((name) => value(name) && $(`#field-${name}`)), size = tandem.imageSize();
      if (tile.hidden === hasImage) tile.hidden = !hasImage;
      write($("span", tile), value("video") || value("control") ? "As video" : "As image");
      let pixels = $("small", tile);
      if (!pixels) { pixels = document.createElement("small"); tile.append(pixels); }
      write(pixels, size ? `${size[0]} × ${size[1]}` : "");
    }
    showTile("size", tandem.fromImage() ? "image" : `${value("width")}x${value("height")}`);
  };
  tandem.uncustomized = () => { custom.size = custom.length = false; };
  tandem.showForm = () => {
    if (!tandem.values.length) return;
    const frames = value("frames"), fps = value("fps");
    tandem.showImages();
    tandem.showOriginal();
    showSize();
    showTile("length", String(frames));
    const seconds = (count) => `${(count / fps).toFixed(1)} s`;
    for (const radio of $$("input[name=length]")) {
      if (radio.value !== CUSTOM && fps > 0) write($("span", radio.parentNode), seconds(radio.value));
    }
    const isTimed = frames >= 1 && fps > 0, stride = Number($("#length [data-stride]")?.dataset.stride);
    const made = stride ? Math.floor((frames - 1) / stride) : 0;
    const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
    write($("[data-length]"), !isTimed ? "" : [seconds(frames), ...(made ? [plural(made, "section")] : []),
      `${plural(frames, "frame")} at ${fps} fps`].join(", "));
    const length = $("#length-seconds");
    if (length && isTimed && document.activeElement !== length) length.value = Number((frames / fps).toFixed(1));
    for (const control of $$("[data-field]:not(.status)")) {
      const now = value(control.dataset.field);
      if (control.type === "radio") { if (control.value === now) check(control); }
      else if (control.value !== now && $$("option", control).some((option) => option.value === now)) control.value = now;
    }
    const presets = $("#presets fieldset");
    for (const radio of $$("input", presets ?? document.createElement("i"))) {
      if (radio.checked !== (radio.value === presets.dataset.chosen)) radio.checked = !radio.checked;
    }
    tandem.showChips(value);
  };
  const write = (node, text) => { if (node && node.textContent !== text) node.textContent = text; };

  document.addEventListener("change", ({ target }) => {
    if (target.name === "size") {
      custom.size = target.value === CUSTOM;
      const [width, height] = target.value.split("x").map(Number);
      const size = tandem.imageSize();
      if (target.value === "image") apply({ size_from: "image" });
      else if (!custom.size) apply({ width, height, size_from: "" });
      else apply({ size_from: "", ...(size ? { width: size[0], height: size[1] } : {}) });
    } else if (target.name === "length") {
      custom.length = target.value === CUSTOM;
      if (!custom.length) apply({ frames: Number(target.value) });
    } else if (target.name === "words") {
      for (const row of $$("#card [data-group]")) row.hidden = row.dataset.group !== target.value;
    } else if (target.name === "preset") {
      $("#presets fieldset").dataset.chosen = target.value;
      apply(JSON.parse(target.dataset.changes));
    } else if (target.matches("input[data-field], select[data-field]")) apply({ [target.dataset.field]: target.value });
  });
  document.addEventListener("input", ({ target }) => {
    if (target.closest("#sides")) custom.size = true;
    if (target.closest("#custom-length")) custom.length = true;
    if (target.id === "length-seconds" && target.value && value("fps") > 0) {
      // The number of whole sections that is nearest, as `--seconds` has it.
      const stride = Number($("#length [data-stride]").dataset.stride);
      custom.length = true;
      apply({ frames: Math.max(Math.round(target.value * value("fps") / stride), 1) * stride + 1 });
    }
  });

  // One tab stop for a row of buttons; arrow keys move in it.
  const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  const settle = (button) => {
    for (const stop of $$("button", button.closest("[data-roving]"))) stop.tabIndex = stop === button ? 0 : -1;
  };
  document.addEventListener("keydown", (event) => {
    const row = event.target.closest("[data-roving]");
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const buttons = $$("button", row), at = buttons.indexOf(event.target);
    const next = { Home: 0, End: buttons.length - 1 }[event.key] ?? at + (STEPS[event.key] ?? 0);
    if (next === at) return;
    event.preventDefault();
    const to = buttons[(next + buttons.length) % buttons.length];
    settle(to);
    to.focus();
  });
  document.addEventListener("focusin", ({ target }) => { if (target.matches("[data-roving] button")) settle(target); });

  // A word of the model's is put where it belongs in the sentence; one of the same group gives way.
  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const group = (row) => {
    const words = $$("button", row).map((button) => button.dataset.word);
    const first = [...new Set(words.map((word) => word.split(" ")[0]))].map(escaped).join("|");
    // "on the sea" also stands for "on a calm sea".
    const loose = words.map((word) => word.split(" ")).map((parts) => parts.length < 3 ? escaped(parts.join(" "))
      : `(?:${first})(?:\\s+\\p{L}+){0,3}?\\s+${escaped(parts.at(-1))}`);
    return new RegExp(`(?<![\\p{L}\\p{N}])(?:${loose.join("|")})(?![\\p{L}\\p{N}])`, "iu");
  };
  const withWord = (text, word, row) => {
    const rows = $$("[data-group]", row.parentNode), at = rows.indexOf(row);
    const present = group(row).exec(text);
    if (present) return text.slice(0, present.index) + word + text.slice(present.index + present[0].length);
    const later = rows.slice(at + 1).map((other) => group(other).exec(text)?.index).filter((index) => index !== undefined);
    const place = later.length ? Math.min(...later) : text.length;
    const before = text.slice(0, place).trimEnd(), after = text.slice(place).trimStart();
    return [before || (after || at > 1 ? "" : "a"), word, after].filter(Boolean).join(" ");
  };
  const articles = (text) => text.replace(/\b(an?)(?=\s+(\p{L}))/giu, (article, _, next) =>
    /[aeiou]/i.test(next) ? `${article[0]}n` : article[0]);
  const prompt = () => $("#field-prompt textarea");
  // The seed of an example belongs to its prompt: with other words it is random again.
  let exampleShown = null;
  document.addEventListener("input", ({ target }) => {
    if (target !== prompt() || !exampleShown || target.value === exampleShown.prompt) return;
    if (String(value("seed")) === String(exampleShown.seed)) apply({ seed: "" });
    exampleShown = null;
  });
  // Presses Generate once the form has the example's prompt.
  const generateSoon = () => setTimeout(() => {
    if (prompt().value === exampleShown?.prompt) $("#generate")?.click(); else if (exampleShown) generateSoon();
  }, 50);
  document.addEventListener("click", ({ target }) => {
    const example = target.closest("[data-suggestion], [data-make]"), word = target.closest("[data-word]");
    if (example) {
      exampleShown = JSON.parse(example.dataset.suggestion ?? example.dataset.make);
      apply({ prompt: exampleShown.prompt, original_prompt: "", seed: String(exampleShown.seed) });
      if (example.dataset.make) generateSoon();
    }
    if (word) apply({ prompt: articles(withWord(prompt().value, word.dataset.word, word.closest("[data-group]"))) });
    const instead = target.closest("[data-replace]");
    if (instead) apply({ prompt: articles(prompt().value.replace(instead.dataset.replace, instead.textContent)) });
    if (target.closest("[data-get-models]")) tandem.goTo("Models");
    if (target.closest("#advanced")) toggle(!isOpen());
    if (target.closest("[data-close-advanced]")) { toggle(false); $("#advanced").focus(); }
    if (target.id === "reset") {
      const defaults = JSON.parse(target.dataset.request), chosen = tandem.defaults();
      const request = { ...defaults, prompt: value("prompt"), model: value("model"), ...chosen };
      tandem.fill(request, "all", chosen.model ? "Defaults of Settings:" : "Defaults of the model:");
    }
  });
  // Words that the model does not know, as its tokenizer splits them. A model without a list knows pieces of all words.
  const plain = (text) => text.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  let vocabulary = { list: null, words: null };
  const unknownWords = (text) => {
    const list = $("#card .model")?.dataset.vocabulary ?? "";
    if (vocabulary.list !== list) vocabulary = { list, words: new Set(list.split(" ")) };
    if (!list) return [];
    return [...text.matchAll(WORD)].filter(([word]) => !(plain(word).match(/[\p{L}\p{N}]+/gu) ?? [])
      .every((part) => vocabulary.words.has(part)));
  };
  let resting = 0;
  const markWords = () => {
    const area = prompt();
    if (!area) return;
    let layer = $("#field-prompt .marks");
    if (!layer) {
      layer = document.createElement("div");
      layer.className = "marks";
      layer.setAttribute("aria-hidden", "true");
      area.after(layer);
      area.addEventListener("scroll", () => { layer.scrollTop = area.scrollTop; });
    }
    const unknown = unknownWords(area.value), key = [area.value, $("#card .model")?.dataset.title, ...unknown].join("\n");
    if (layer.dataset.of !== key) {
      layer.dataset.of = key;
      const pieces = [];
      let at = 0;
      for (const match of unknown) {
        const mark = document.createElement("mark");
        mark.textContent = match[0];
        pieces.push(area.value.slice(at, match.index), mark);
        at = match.index + match[0].length;
      }
      layer.replaceChildren(...pieces, `${area.value.slice(at)}\n`);
      clearTimeout(resting);
      resting = setTimeout(() => reportWords(unknown), TYPING_MS);
    }
    layer.scrollTop = area.scrollTop;
  };
  // A long word is cut; one that is written from right to left does not turn the list.
  const excerpt = (word) => {
    const text = word.length > LONGEST_WORD ? `${word.slice(0, LONGEST_WORD)}…` : word;
    return RIGHT_TO_LEFT.test(text) ? `\u2068${text}\u2069` : text;
  };
  const reportWords = (matches) => {
    const words = [...new Set(matches.map(([word]) => word))];
    const rest = words.length - MOST_WORDS;
    const listed = words.slice(0, MOST_WORDS).map(excerpt);
    write($("#unknown-words .unknown"), words.length
      ? `${$("#card .model").dataset.title} does not know: ${listed.join(", ")}${rest > 0 ? ` and ${rest} more` : ""}.` : "");
    offerWords(words);
  };
  // The largest group of words has the things: one of them can take the place of the first unknown word.
  const offerWords = ([word]) => {
    const row = $("#unknown-words .chips");
    const groups = $$("#card [data-group]").sort((first, second) => second.children.length - first.children.length);
    const hidden = !word || !groups.length;
    if (row.hidden !== hidden) row.hidden = hidden;
    const key = `${$("#card .model").dataset.title}: ${word}`;
    if (hidden || row.dataset.of === key) return;
    row.dataset.of = key;
    const label = document.createElement("span");
    Object.assign(label, { className: "instead", textContent: `Instead of “${excerpt(word)}”:` });
    row.replaceChildren(label, ...$$("button", groups[0]).slice(0, MOST_OFFERED).map((offer, at) => {
      const chip = document.createElement("button");
      Object.assign(chip, { type: "button", className: "chip", textContent: offer.dataset.word, tabIndex: at ? -1 : 0 });
      chip.dataset.replace = word;
      chip.setAttribute("aria-label", `${offer.dataset.word} instead of ${word}`);
      return chip;
    }));
  };
  document.addEventListener("input", ({ target }) => { if (target === prompt()) markWords(); });

  // Advanced: a drawer beside the stage.
  const isOpen = () => $("#settings").classList.contains("open");
  const toggle = (open, move = true) => {
    const settings = $("#settings");
    if (!settings || isOpen() === open) return;
    settings.classList.toggle("open", open);
    tandem.write("sessionStorage", ADVANCED, open ? "open" : "");
    tandem.tidy();
    if (open && move) settings.scrollIntoView({ block: "nearest" });
    document.body.classList.toggle("drawer", open);
  };
  let restored = false;

  // An error is shown at its field, until the field changes.
  let marked = null;
  const fieldOf = (name) => {
    const block = name === "frames" && $("#length-seconds") || $(`#field-${name}`);
    if (block?.id === "length-seconds") return block;
    return block?.matches("select") ? block : block && $("textarea, input", block);
  };
  const reveal = (name) => {
    if (name === "width" || name === "height") { custom.size = true; tandem.showForm(); }
    if (name === "frames") { custom.length = true; tandem.showForm(); }
    const field = fieldOf(name);
    if (field?.closest("#settings")) toggle(true, false);
    else if (field) tandem.openPopover(field);
  };
  tandem.unmark = () => {
    if (!marked) return;
    marked.input.removeAttribute("aria-invalid");
    marked.line.remove();
    marked = null;
  };
  tandem.mark = (name, text, isPlanned = false) => {
    const input = name && fieldOf(name);
    if (input && !isPlanned) reveal(name);  // also if the plan has marked it
    if (marked && marked.input === input && marked.line.textContent === text) return;
    tandem.unmark();
    if (!input) return;
    const line = document.createElement("p");
    line.className = "field-error";
    line.id = `error-${name}`;
    line.textContent = text;
    (input.closest(".block, .place") ?? input.parentNode).append(line);
    input.setAttribute("aria-invalid", "true");
    marked = { input, line };
  };
  // The error of a refused request that is out of date: the stage shows its video again.
  const endRefusal = () => {
    if (!$('#status .status[data-state="failed"][data-job=""]:not([data-field=""])')) return;
    tandem.select(tandem.job());
    $("#show").click();
  };
  document.addEventListener("input", ({ target }) => {
    if (target === unmarked?.input) unmarked = null;
    if (!marked || target !== marked.input) return;
    tandem.unmark();
    // No plan judges what is typed there.
    if (target.closest("#field-prompt, #field-negative_prompt")) endRefusal();
  });
  tandem.marked = (input) => marked?.input === input ? ` ${marked.line.id}` : "";
  // The plan names the field too, but not while it is being typed: then the error is shown when the field is left.
  let unmarked = null;
  document.addEventListener("focusout", ({ target }) => {
    if (target !== unmarked?.input) return;
    tandem.mark(unmarked.field, unmarked.problem, true);
    unmarked = null;
  });
  tandem.planned = ({ field, problem, size, control }) => {
    tandem.plannedSize(size ?? null);
    tandem.plannedControl(control ?? null);
    tandem.showForm();
    const recovery = !problem && document.body.classList.contains("unplannable");
    document.body.classList.toggle("unplannable", Boolean(problem));
    if (recovery) endRefusal();
    const input = field && fieldOf(field);
    unmarked = null;
    if (input && (input.type === "file" || document.activeElement !== input)) tandem.mark(field, problem, true);
    else if (input) unmarked = { input, field, problem };
    else if (!field && marked && marked.input.closest("#columns, .popover") && !$("#status .status[data-state=failed]")) tandem.unmark();
  };

  tandem.tidyForm = () => {
    if (!restored && $("#settings")) {
      restored = true;
      if (tandem.read("sessionStorage", ADVANCED)) toggle(true, false);
    }
    const button = $("#advanced");
    if (button && button.getAttribute("aria-expanded") !== String(isOpen())) {
      button.setAttribute("aria-expanded", String(isOpen()));
    }
    tandem.showForm();
    markWords();
  };
})();
