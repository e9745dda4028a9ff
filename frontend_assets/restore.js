// Settings from a video, or an image exported from one: its comment has the request as JSON, see metadata.js. JSON files
// with a request are read too. Of files that other programs made, only the tags are sent, which the server reads.
(() => {
  "use strict";
  const MAX_TEXT = 4 * 1024 * 1024;    // of a JSON file
  const MAX_TAGS = 120 * 1024;         // sent to the server
  const $ = (selector) => document.querySelector(selector);
  const { Damaged } = window.tandem;

  // Returns the request of a result, or the request itself, with the version of the model that made it if a plan has it;
  // `null` if it is neither.
  const settingsOf = (made) => {
    const request = made?.request ?? made;
    if (typeof request?.prompt !== "string") return null;
    return made.plan ? { ...request, model_version: made.plan.model_version ?? 1 } : request;
  };

  // Returns what the server reads of the tags of ComfyUI, Wan2GP or FramePack-Studio, `null` for other tags.
  const OTHERS = /"class_type"|"widgets_values"|"type":\s*"WanGP|"latent_window_size"/;
  const PARTS = ["id", "type", "mode", "inputs", "widgets_values"];
  const parsed = (text) => { try { return JSON.parse(text); } catch { return text; } };
  // Without places and colors: a workflow has hundreds of kilobytes.
  const essential = (value) => !Array.isArray(value?.nodes) ? value : {
    nodes: value.nodes.map((node) => Object.fromEntries(PARTS.map((name) => [name, node?.[name]]))), links: value.links,
  };
  const ofOthers = (tags) => {
    if (!("latent_window_size" in tags) && !Object.values(tags).some((text) => OTHERS.test(text))) return null;
    const kept = {};
    for (const [name, text] of Object.entries(tags)) kept[name] = OTHERS.test(text) ? essential(parsed(text)) : text;
    if (OTHERS.test(tags.prompt)) delete kept.workflow;
    if (JSON.stringify(kept).length > MAX_TAGS) throw new Damaged();
    return { tags: kept };
  };

  // Returns the request of a video, `null` if it has none. Small pictures of its images are in the file too.
  const requestOf = async (file) => {
    const tags = await window.tandem.tagsOf(file);
    let made;
    try {
      made = JSON.parse(tags.comment).tandem;
      window.tandem.thumbnails(made.images);
    } catch { return ofOthers(tags); }
    return settingsOf(made);
  };

  // Returns the request in a JSON file: one of Tandem's own objects that have it, or the request itself.
  const requestIn = async (file) => {
    if (file.size > MAX_TEXT) throw new Damaged();
    const text = await file.text(), content = parsed(text);
    const others = content?.tandem || content?.request ? null : ofOthers({ json: text });
    if (!others && content === text) throw new Damaged();
    return others ?? settingsOf(content?.tandem ?? content);
  };

  // Fills the form and shows it; the server lists the values that it does not take. Without settings, the reason
  // appears where the user is.
  const restore = async (file, isDropped = false) => {
    const { panels } = window.tandem;
    const isText = /\.json$/i.test(file.name) || file.type === "application/json";
    const choose = "Choose a video, image or JSON file of Tandem, ComfyUI, Wan2GP or FramePack-Studio.";
    let text, request = null;
    try {
      request = await (isText ? requestIn(file) : requestOf(file));
      text = request ? `Settings of “${file.name}”:` : `“${file.name}” has no settings. ${choose}`;
    } catch {
      text = `“${file.name}” is damaged or not ${isText ? "JSON" : "a video or image"}. ${choose}`;
    }
    // A video that Tandem did not make can be changed.
    if (!request && isDropped && window.tandem.takeVideo(file)) return;
    if (!request && panels.tab() !== "Make") { panels.notify(text, { error: true }); return; }
    for (const dialog of document.querySelectorAll("dialog[open]")) dialog.close();
    panels.goTo("Make");
    const line = $("#restored");
    $("#refused .restored")?.replaceChildren();
    if (request) window.tandem.fill(request, "all", text); else line.textContent = text;
    setTimeout(() => line.scrollIntoView({ block: "nearest" }), 0);
  };

  document.addEventListener("click", ({ target }) => {
    const use = target.closest("[data-use]");
    if (use) $("#restored").textContent = use.dataset.source ?? "";
  }, true);
  // What was filled in is history once the form is changed by hand, what was refused once a video is made.
  const forget = () => {
    if ($("#restored").textContent) $("#restored").textContent = "";
    $("#refused .restored")?.replaceChildren();
  };
  document.addEventListener("input", ({ target, isTrusted }) => {
    if (isTrusted && target.closest("#compose, #settings") && !$("#refused .trouble")) forget();
  });
  document.addEventListener("click", ({ target }) => { if (target.closest("#generate")) forget(); });
  document.addEventListener("change", (event) => {
    if (event.target.id !== "restore" || !event.target.files.length) return;
    restore(event.target.files[0]);
    event.target.value = "";
  });
  // A video may be dropped anywhere on the page; by default the browser would leave the page and play it.
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const hover = (on) => document.body.classList.toggle("dropping", on);
  document.addEventListener("dragover", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    hover(true);
  });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) hover(false); });
  // An image with settings is an image only where images are chosen.
  const hasSettings = async (file, target) => {
    if (!file.type.startsWith("image/") || target.closest("#images")) return false;
    return Boolean(await requestOf(file).catch(() => null));
  };
  document.addEventListener("drop", async (event) => {
    hover(false);
    if (!carries(event)) return;
    event.preventDefault();
    const { target } = event, files = [...event.dataTransfer.files];  // the event has them only now
    const { takeImages, takeLatents } = window.tandem;
    if (!files.length || takeLatents(files, target)) return;
    if (await hasSettings(files[0], target) || !takeImages(files, target)) restore(files[0], true);
  }, true);
})();
