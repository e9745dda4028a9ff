// The chips below the prompt: each shows what is chosen, and opens the controls of it.
(() => {
  "use strict";
  const tandem = window.tandem;
  const GAP = 6;   // pixels between a chip and what it opens
  const $ = (selector, parent = document) => parent.querySelector(selector);
  const chipOf = (popover) => $(`#chips [popovertarget="${popover.id}"]`);

  // Where the bar with Generate stays at the foot of the window, what a chip opens ends above it.
  const foot = () => {
    const bar = $("#bar");
    return bar && getComputedStyle(bar).position === "fixed" ? bar.getBoundingClientRect().top : innerHeight;
  };
  // Below the chip or, if there is more room, above it; in a narrow window as wide as the window.
  const place = (popover) => {
    const opener = chipOf(popover);  // hidden for a model without images: a refusal is shown there too
    const chip = (opener.hidden ? $("#chips") : opener).getBoundingClientRect(), { offsetWidth: wide, offsetHeight: high } = popover;
    const below = foot() - chip.bottom - 2 * GAP, above = chip.top - 2 * GAP;
    const under = high <= below || below >= above;
    popover.style.maxHeight = `${under ? below : above}px`;
    popover.style.left = `${Math.max(GAP, Math.min(chip.left, document.documentElement.offsetWidth - wide - GAP))}px`;
    popover.style.top = `${under ? chip.bottom + GAP : Math.max(GAP, chip.top - GAP - Math.min(high, above))}px`;
  };
  const around = new ResizeObserver((entries) => {
    for (const { target } of entries) if (target.matches(":popover-open")) { target.style.maxHeight = ""; place(target); }
  });
  addEventListener("resize", () => { const open = $(".popover:popover-open"); if (open) place(open); });

  // Gradio creates the elements and may draw them again.
  const prepare = () => {
    for (const popover of document.querySelectorAll(".popover:not([popover])")) {
      popover.setAttribute("popover", "auto");
      popover.setAttribute("role", "dialog");
      popover.setAttribute("aria-label", chipOf(popover).dataset.title);
      popover.addEventListener("toggle", ({ newState }) => {
        if (newState === "open") place(popover);
        chipOf(popover).setAttribute("aria-expanded", String(newState === "open"));
      });
      around.observe(popover);
      if (popover.id === "pop-prompts") chipOf(popover).hidden = false;  // its chip shows no choice
    }
  };
  tandem.openPopover = (node) => {
    const popover = node.closest(".popover");
    if (popover?.hasAttribute("popover") && !popover.matches(":popover-open")) popover.showPopover();
  };

  const write = (chip, text, about = text) => {
    if (chip.textContent !== text) chip.textContent = text;
    const name = `${chip.dataset.title}: ${about}`;
    if (chip.getAttribute("aria-label") !== name) chip.setAttribute("aria-label", name);
  };
  const picture = (chip, address) => {
    const image = address ? `url("${address}")` : "";
    chip.classList.toggle("pictured", Boolean(image));
    if (chip.dataset.picture !== address) { chip.dataset.picture = address; chip.style.backgroundImage = image; }
  };
  // The text of the chip of images: what is chosen, or what the model takes.
  const inputs = (value) => {
    const [image, video, extend, control, references] = ["image", "video", "extend", "control", "references"]
      .map((name) => $(`#images [data-place=${name}]`));
    if (extend && value("extend")) return ["Extends a video", "the video is chosen"];
    if (video && value("video")) return ["Video", "a video is chosen"];
    if (image && value("image")) return ["Image", "chosen"];
    if (control && value("control")) return ["Control video", "chosen"];
    if (references && value("references")) return ["Reference images", "chosen"];
    if (references) return [control ? "+ Control video or images" : "+ Reference images", "none"];
    return [image && video ? "+ Image or video" : video ? "+ Video" : "+ Image", "none"];
  };
  tandem.showChips = (value) => {
    prepare();
    const ownPreset = tandem.showOwnPresets();
    const model = $("#card .model")?.dataset.title ?? "", image = $("#images [data-place]");
    const title = $("input[name=size]:checked")?.parentNode.querySelector("span")?.textContent ?? "";
    const [wide, high] = tandem.imageSize() ?? [value("width"), value("height")];
    const size = tandem.fromImage() && !tandem.imageSize() ? title : `${wide} × ${high}`;  // not planned yet
    const named = /:/.test(title) ? title : size, seed = value("seed");
    const texts = {
      model: [model],
      images: inputs(value),
      size: [named, named === size ? size : `${named}, ${size}`],
      length: [`${(value("frames") / value("fps")).toFixed(1)} s`],
      quality: [ownPreset || ($("#presets input:checked ~ span")?.textContent ?? "Custom")],
      seed: seed === "" || seed === null ? ["Seed: random", "random"] : [`Seed: ${seed}`, String(seed)],
    };
    for (const [name, [text, about]] of Object.entries(texts)) {
      const chip = $(`[data-chip=${name}]`);
      const lacks = !$(`#pop-${name}`) || (name === "images" && !image) || (name === "quality" && !$("#presets fieldset"));
      if (chip.hidden !== lacks) chip.hidden = lacks;
      write(chip, text, about);
      if (name === "images") picture(chip, $("#images .place.given .seen:not([hidden]) img")?.src ?? "");
    }
  };
})();
