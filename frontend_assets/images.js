// The images of Make: dropped, pasted, picked, an example, or a frame of a video; or a video to change, or to steer
// with. The form has their names, those of keyframes and reference images in lines; the places show what the model will see of them.
// Dropped files of other kinds are for restore.js.
(() => {
  "use strict";
  const tandem = window.tandem;
  const PICTURES = "tandem.pictures", KEPT = 6, SIDE = 512, QUALITY = 0.85;
  const CUT = 0.005;   // a smaller share that is cut cannot be seen
  const NAME = 100;    // longer names of files are cut
  const FROM_IMAGE = "image", SEVERAL = ["keyframes", "references"];
  const STEERING = ["control", "face", "background", "mask", "references"], VIDEOS = ["join", "video", ...STEERING.slice(0, 4)],
    SIZED = ["image", "video", "control"];
  const FIELDS = ["image", "keyframes", "last_image", "extend", "join", "video", ...STEERING];
  const IMAGE = /\.(jpe?g|png|webp|avif|bmp|tiff?|gif|hei[cf])$/i;
  const VIDEO = /\.(mp4|m4v|mov|mkv|webm|avi|mpe?g|ogv|3gp)$/i;
  const $ = (selector, parent = document) => parent.querySelector(selector);
  const $$ = (selector, parent = document) => [...parent.querySelectorAll(selector)];
  const { set, value } = tandem;
  const section = () => $("#images .images");
  const place = (field) => $(`#images [data-place=${field}]`);
  const able = () => JSON.parse(section()?.dataset.able ?? "[]");
  const digestOf = (reference) => /^sha256:([0-9a-f]{64})/.exec(reference ?? "")?.[1] ?? "";
  const nameOf = (references) => references.split("\n").map((name) => name.slice(name.indexOf("/") + 1)).join(", ");
  const chosen = (field) => place(field) ? value(field) || "" : "";
  const write = (node, text) => { if (node.textContent !== text) node.textContent = text; };
  const hide = (node, hidden) => { if (node.hidden !== hidden) node.hidden = hidden; };

  // Pictures by digest: of the browser's own file, or from the server. Some stay for reloads.
  let pictures = {};
  try { pictures = JSON.parse(tandem.read("localStorage", PICTURES)) ?? {}; } catch { /* none */ }
  const remember = (digest, picture) => {
    delete pictures[digest];
    pictures[digest] = picture;
    const kept = Object.entries(pictures).filter(([, stored]) => stored.url).slice(-KEPT);
    tandem.write("localStorage", PICTURES, JSON.stringify(Object.fromEntries(kept)));
    tandem.showImages();
  };
  // Draws the browser's own file on white, as the server does; `null` for a format that this browser does not show.
  const pictureOf = async (file) => {
    try {
      const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
      const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
      const canvas = document.createElement("canvas");
      canvas.width = Math.max(1, Math.round(bitmap.width * scale));
      canvas.height = Math.max(1, Math.round(bitmap.height * scale));
      const context = canvas.getContext("2d");
      context.fillStyle = "white";
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
      bitmap.close();
      return canvas.toDataURL("image/webp", QUALITY);
    } catch { return ""; }
  };

  // Questions to the server, one at a time.
  const questions = [];
  let asking = null;
  const ask = tandem.askImage = (question) => new Promise((resolve) => { questions.push({ question, resolve }); next(); });
  const next = () => {
    if (asking || !questions.length || !$("#ask-image")) return;
    asking = { ...questions.shift(), id: `${Date.now()}-${Math.random()}` };
    $("#ask-image").click();
    asking.timer = setTimeout(() => tandem.imageAnswered(JSON.stringify({
      id: asking.id, error: "Tandem did not answer. Try again.",
    })), 30000);
  };
  tandem.imageAsked = () => JSON.stringify({ ...asking?.question, id: asking?.id });
  tandem.imageAnswered = (text) => {
    let answer = {};
    try { answer = JSON.parse(text); } catch { /* an answer that was lost */ }
    if (!asking || answer.id !== asking.id) return;
    clearTimeout(asking.timer);
    const { resolve } = asking;
    asking = null;
    resolve(answer);
    next();
  };

  // One line below the places.
  const note = (text, bad = false, offer = null) => {
    const line = $("#images .note");
    if (!line) return;
    write(line, text);
    line.classList.toggle("bad", bad);
    const button = $("#images [data-offer]");
    hide(button, !offer);
    if (offer) write(button, offer.installed ? `Use ${offer.title}` : `Download ${offer.title} in Models`);
    if (bad) tandem.openPopover(line);
  };
  document.addEventListener("toggle", ({ target, newState }) => {
    if (target.id === "pop-images" && newState === "closed") note("");
  }, true);
  const show = () => {
    if (tandem.panels?.tab() !== "Make") tandem.goTo?.("Make");
    for (const dialog of $$("dialog[open]")) dialog.close();
    setTimeout(() => { if (section()) tandem.openPopover(section()); }, 0);
  };
  // A model without images says which take them, and offers the first that runs here, with the image.
  let imageOffer = null;
  const refuse = async (file, kind = "image") => {
    show();
    const title = $("#card .model")?.dataset.title ?? section().dataset.model;
    note(`${title} does not start from ${kind === "image" ? "an image" : "a video"}.`, true);
    const { error, offer } = await ask({ what: "refusal", model: title, kind });
    imageOffer = offer ? { ...offer, file } : null;
    note(error, true, offer);
  };
  const takeOffer = async () => {
    const { name, title, installed, place: field, file } = imageOffer, isImage = field === "image";
    if (!installed) { tandem.goTo("Models"); return; }
    const upload = await send(file, undefined, isImage ? "images" : "videos");
    if (!upload) return;
    // A picture of a video is asked for.
    if (isImage) remember(digestOf(upload.image), { url: await pictureOf(file), width: upload.width, height: upload.height });
    startWith(name, title, upload.image ?? upload.video, field);
  };
  const startWith = (name, title, reference, field = "image") => {
    const prompt = value("prompt") ? { prompt: value("prompt") } : {};  // an empty one would be refused
    const takes = { image: "starts from images", video: "starts from videos", control: "is steered by videos" }[field];
    tandem.fill({ ...prompt, model: name, [field]: reference, width: "auto", height: "auto" }, "all",
      `${title} is selected: it ${takes}.`);
  };
  // Some models have other guidance with an image: it replaces the usual one, unless the user has changed that.
  const guidance = (withImage) => {
    const { text, image } = JSON.parse(section().dataset.guidance);
    const [before, after] = withImage ? [text, image] : [image, text];
    return Object.entries(before).every(([name, scale]) => Number(value(name)) === scale) ? after : {};
  };
  const isFirst = (field) => SIZED.includes(field) && !SIZED.some(chosen);
  const sizeNote = (field) => isFirst(field) && value("size_from") !== FROM_IMAGE
    ? `The size follows the ${field === "control" ? "control video" : field}.` : "";
  const use = (field, reference, picture, changes = {}) => {
    remember(digestOf(reference), picture);
    tandem.unmark();
    tandem.uncustomized();
    const first = isFirst(field) ? { size_from: FROM_IMAGE } : {};
    const scales = field === "image" && !chosen("image") ? guidance(true) : field === "video" && chosen("image") ? guidance(false) : {};
    const others = [...STEERING, "join"].includes(field) ? {} : field === "video" ? { image: "", last_image: "", extend: "" } : { extend: "", video: "" };
    const all = SEVERAL.includes(field) && chosen(field) ? `${chosen(field)}\n${reference}` : reference;
    const times = field === "keyframes" ? { keyframe_seconds: withTime() } : {};
    tandem.apply({ ...others, [field]: all, ...times, ...first, ...scales, ...changes });
  };

  // The times of keyframes, with one for a further keyframe: halfway from the last one to the end.
  const withTime = () => {
    const times = value("keyframe_seconds") || "", end = value("frames") / value("fps");
    const last = times ? Number(times.split(",").at(-1)) || 0 : 0;
    return `${times}${times && ", "}${Number(((last + end) / 2).toFixed(2))}`;
  };

  // Returns what the server has kept of a file; nothing if it was refused, or if `isCurrent` no longer holds.
  const send = async (file, isCurrent = () => true, kind = "images") => {
    const most = Number(section().dataset.most);
    if (file.size > most) {
      const help = kind === "images" ? "Save a smaller copy of it." : "Cut out a part, or use the command line.";
      note(`“${file.name}” is larger than ${Math.round(most / 2 ** 20)} MB. ${help}`, true);
      return null;
    }
    note(`Loading “${file.name}”…`);
    const path = `tandem/${kind}/${encodeURIComponent(file.name.slice(-NAME).toWellFormed?.() ?? "file")}`;
    const answer = await fetch(path, { method: "POST", body: file, cache: "no-store" }).catch(() => null);
    const upload = answer?.ok ? await answer.json().catch(() => null) : null;
    if (!upload && isCurrent()) note(await tandem.refusal(answer) || `“${file.name}” cannot be sent. Try again.`, true);
    return isCurrent() ? upload : null;
  };
  // The newest file of a place counts, unless the place was cleared meanwhile.
  const newest = {};
  const take = async (file, field, line = "") => {
    if (!place(field)) { refuse(file); return; }
    show();
    const turn = newest[field] = {};
    const upload = await send(file, () => newest[field] === turn);
    if (!upload) return;
    const url = await pictureOf(file);
    if (newest[field] !== turn) return;
    note([sizeNote(field), line].filter(Boolean).join(" "));
    use(field, upload.image, { url, width: upload.width, height: upload.height });
  };
  const isImage = (file) => (file.type.startsWith("image/") || IMAGE.test(file.name)) && !/gif$/i.test(file.type || file.name);
  const takeVideo = async (file, field = "video", line = "") => {
    show();
    const turn = newest[field] = {};
    // A mask is a video, or an image that holds for all frames.
    const upload = await send(file, () => newest[field] === turn, field === "mask" && isImage(file) ? "images" : "videos");
    if (!upload) return;
    const { video = upload.image, width, height, seconds } = upload;
    const { picture: url = "" } = await ask({ what: "picture", video });
    if (newest[field] !== turn) return;
    const changes = { ...noLonger(seconds), ...(field === "control" && { control_start: 0 }) };
    note([sizeNote(field), changes.frames ? "The length follows the video." : "", line].filter(Boolean).join(" "));
    use(field, video, { url, width, height, seconds }, changes);
    return video;
  };
  // A clip is not longer than the video that it is made from.
  const noLonger = (seconds) => {
    const frames = Math.round((seconds ?? Infinity) * value("fps")), stride = Number($("#field-frames input")?.step) || 1;
    return frames < value("frames") ? { frames: Math.floor((frames - 1) / stride) * stride + 1 } : {};
  };
  // Takes a mask that was drawn.
  tandem.takeMask = (file) => takeVideo(file, "mask");
  tandem.pictureOf = (field) => pictures[digestOf(chosen(field))];
  // Takes a video that was dropped, or says before it is sent that the model takes none; returns whether the page takes it.
  tandem.takeVideo = (file) => {
    const field = ["video", "control"].find(place), isOwners = section()?.dataset.videos === "true";
    if (!isOwners || !(file.type.startsWith("video/") || VIDEO.test(file.name))) return false;
    if (field) takeVideo(file, field); else refuse(file, "video");
    return true;
  };
  const free = () => {
    if (!place("image") && place("references")) return "references";
    return chosen("image") && place("last_image") && !chosen("last_image") ? "last_image" : "image";
  };
  // Takes the first image of several files; returns whether there is one.
  tandem.takeImages = (files, target = null) => {
    const dropPlace = target?.closest?.("#images [data-place]");
    if (VIDEOS.includes(dropPlace?.dataset.place) && files.length) { takeVideo(files[0], dropPlace.dataset.place); return true; }
    const images = [...files].filter((file) => file.type.startsWith("image/") || IMAGE.test(file.name));
    if (!images.length && dropPlace && files.length && !/\.(mp4|json)$/i.test(files[0].name)) images.push(files[0]);
    if (!images.length) return false;
    const rest = files.length - 1;
    take(images[0], dropPlace?.dataset.place ?? free(),
      rest ? `Only “${images[0].name}” was taken; ${rest} other file${rest === 1 ? " was" : "s were"} left out.` : "");
    return true;
  };
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData?.files ?? []].filter((file) => file.type.startsWith("image/"));
    const text = event.target.closest?.("input, textarea") && event.clipboardData.types.includes("text/plain");
    if (!files.length || text || document.querySelector("dialog[open]") || (tandem.panels?.tab() ?? "Make") !== "Make") return;
    event.preventDefault();
    tandem.takeImages(files);
  });
  document.addEventListener("change", ({ target }) => {
    if (!target.id?.startsWith("pick-") || !target.files?.length) return;
    const field = target.id.slice("pick-".length);
    if (VIDEOS.includes(field)) takeVideo(target.files[0], field); else take(target.files[0], field);
    target.value = "";
  });
  // While a slider moves, the form is a step behind.
  const SLIDERS = { "image-position": "image_position", strength: "strength", "control-start": "control_start" };
  const OPTIONS = {
    "control-scale": "control_scale", preprocess: "preprocess", overlap: "overlap", "keyframe-seconds": "keyframe_seconds",
    outpaint: "outpaint", "extend-frames": "extend_frames",
  };
  const SHOWN_WITH = {
    control_scale: ["control", "references", "extend"], preprocess: ["control"], overlap: ["control"], keyframe_seconds: ["keyframes"],
    outpaint: ["control"], extend_frames: ["extend"],
  };
  const moving = {};
  document.addEventListener("input", ({ target }) => {
    if (OPTIONS[target.id]) tandem.apply({ [OPTIONS[target.id]]: target.value });
    const field = SLIDERS[target.id];
    if (!field) return;
    moving[field] = Number(target.value);
    tandem.showImages();
    tandem.apply({ [field]: moving[field] });
  });
  document.addEventListener("change", ({ target }) => { delete moving[SLIDERS[target.id]]; });

  // A frame of the video on the stage or in the viewer: the one that is shown if it is paused, else the last.
  const moment = (button) => {
    const video = button.closest("#history-detail") ? $("#history-detail video") : tandem.stageVideo();
    const inside = video?.paused && !video.ended && video.currentTime > 0 && video.currentTime < video.duration - 0.001;
    return inside ? video.currentTime : null;
  };
  const proceed = async (button) => {
    const question = { what: "frame", job: button.dataset.continue, seconds: moment(button) };
    show();
    note("Reading the frame…");
    const turn = newest.image = {};
    const { image, width, height, picture, model, error } = await ask(question);
    if (newest.image !== turn) return;
    if (error) { note(error, true); return; }
    note("");
    const frame = { url: picture, width, height };
    if (place("image")) {
      use("image", image, frame, value("model") === model ? { width, height, size_from: "" } : {});
    } else {
      const [name, title] = able()[0];
      remember(digestOf(image), frame);
      startWith(name, title, image);
    }
    setTimeout(() => $("#field-prompt textarea")?.focus({ preventScroll: true }), 100);
  };
  // The settings of a video, for a part that follows it.
  const extend = async (job) => {
    show();
    note("Reading the last frame…");
    const turn = newest.extend = {};
    const { extend: reference, settings, width, height, seconds, picture, error } = await ask({ what: "extend", job });
    if (newest.extend !== turn) return;
    if (error) { note(error, true); return; }
    note("");
    remember(digestOf(reference), { url: picture, width, height, seconds });
    tandem.fill(settings, "all", "The next video continues this one. Say what happens next.");
    setTimeout(() => { const prompt = $("#field-prompt textarea"); prompt?.focus({ preventScroll: true }); prompt?.select(); }, 100);
  };
  document.addEventListener("click", async ({ target }) => {
    const clear = target.closest("[data-clear]"), example = target.closest("[data-example]");
    const frame = target.closest("[data-continue]");
    if (clear) {
      const field = clear.dataset.clear;
      newest[field] = null;
      note("");
      tandem.unmark();
      const times = field === "keyframes" && { keyframe_seconds: "" };
      tandem.apply({ [field]: "", ...times, ...(field === "image" && guidance(false)), ...(field === "control" && { control_start: 0 }) });
      ($(`#pick-${field}`) ?? $("#pick-image")).focus();
    }
    if (example) {
      const turn = newest.image = {};
      const { image, width, height, picture, error } = await ask({ what: "example", name: example.dataset.example });
      if (newest.image !== turn) return;
      if (error) note(error, true); else { note(sizeNote("image")); use("image", image, { url: picture, width, height }); }
    }
    if (frame) proceed(frame);
    const longer = target.closest("[data-extend]"), part = target.closest("#facts [data-from]");
    if (longer) extend(longer.dataset.extend);
    if (part) tandem.stageVideo().currentTime = Number(part.dataset.from);
    if (target.closest("#images [data-offer]")) takeOffer();
  });

  // The frame of the plan, or what is known of it before there is a plan.
  let planned = null;
  tandem.plannedSize = (size) => { planned = size; tandem.showImages(); };
  const main = () => ["extend", "video", "control"].find(chosen) ?? "image";
  const fromImage = () => Boolean(chosen(main())) && value("size_from") === FROM_IMAGE;
  const frameSize = (picture) => {
    if (!fromImage()) return [value("width"), value("height")];
    return planned ?? (picture?.width ? [picture.width, picture.height] : [value("width"), value("height")]);
  };
  const cutShare = (picture, [width, height]) => {
    if (!picture?.width || !(width > 0 && height > 0)) return 0;
    const ratio = picture.width / picture.height / (width / height);
    return 1 - Math.min(ratio, 1 / ratio);
  };
  tandem.fromImage = fromImage;
  tandem.imageSize = () => fromImage() ? planned : null;
  // Pictures that came with the settings of a video, by digest; see restore.js.
  tandem.thumbnails = (images) => {
    for (const { digest, thumbnail, width, height, seconds } of Object.values(images ?? {})) {
      if (digest && /^data:image\/webp;base64,[\w+/=]+$/.test(thumbnail ?? "") && !pictures[digest]?.url) {
        pictures[digest] = { url: thumbnail, width, height, seconds };
      }
    }
  };

  const picture = (field) => {
    const reference = chosen(field);
    const digest = digestOf(reference);
    const stored = pictures[digest];
    // One without a picture is asked for once; visitors' pages have no answer.
    if (stored || !digest || !tandem.restored) return stored;
    pictures[digest] = {};
    const kind = VIDEOS.includes(field) ? "video" : field === "extend" ? field : "image";
    ask({ what: "picture", [kind]: reference.split("\n")[0] }).then((answer) => {
      const { picture: url, width, height, seconds } = answer;
      if (url) remember(digest, { url, width, height, seconds });
    });
    return null;
  };
  const showStrength = (row, visible) => {
    hide(row, !visible);
    const slider = $("input", row), strength = moving.strength ?? value("strength"), steps = value("steps");
    if (slider.value !== String(strength) && document.activeElement !== slider) slider.value = strength;
    const run = Math.min(Math.floor(steps * strength), steps);
    const text = `${strength}, ${run} of ${steps} step${steps === 1 ? "" : "s"}`;
    write($("output", row), text);
    set(slider, "aria-valuetext", text);
  };
  tandem.showImages = () => {
    if (!section() || !tandem.values.length) return;
    let adjustable = 0, any = false;
    const fit = value("image_fit"), at = moving.image_position ?? value("image_position") ?? 50;
    for (const field of FIELDS) {
      const node = place(field);
      if (!node) continue;
      const reference = chosen(field), seen = $(".seen", node), image = $("img", seen);
      const shownPicture = reference ? picture(field) : null;
      const size = frameSize(chosen(main()) ? picture(main()) : shownPicture);
      any ||= Boolean(reference);
      // A video excludes images and another video. Which one is extended is chosen below it.
      // A control video can have given frames at its start and its end.
      const start = main() === "control" ? "image" : main();
      const unused = start === "image" ? field === "extend" || Boolean(field === "video" && chosen("image")) : field !== start;
      // A mask is for a background video, or for a control video. The image of a character is for both.
      const needed = { mask: place("background") ? "background" : "control", join: "extend" }[field];
      const steers = STEERING.includes(field) || field === "join" || (field === "image" && place("face"));
      hide(node, steers ? Boolean(needed) && !chosen(needed) && !reference : unused);
      node.classList.toggle("given", Boolean(reference));
      const url = (field === "control" && tandem.controlFrame()) || shownPicture?.url;
      hide(seen, !url);
      if (url) {
        set(image, "src", url);
        set(image, "alt", `${reference ? nameOf(reference) : "The clip"}, as the model sees it`);
        set(seen, "style", `--width:${size[0]};--height:${size[1]}`);
        set(image, "style", `object-fit:${fit === "fit" ? "contain" : "cover"};object-position:${fit === "fit" ? 50 : at}% ${fit === "fit" ? 50 : at}%`);
        adjustable = Math.max(adjustable, cutShare(shownPicture, size));
      }
      const length = shownPicture?.seconds ? `, ${shownPicture.seconds.toFixed(1)} s` : "";
      const empty = VIDEOS.includes(field) ? "or drop it here" : "or drop or paste it";
      write($(".what", node), reference ? `${nameOf(reference)}${length}` : empty);
      if (field === "control") tandem.showControl(shownPicture?.seconds, moving.control_start);
      if (field === "video") showStrength($(".strength", node), Boolean(reference));
      hide($("[data-clear]", node), !reference);
      const examples = $(".examples", node);
      if (examples) hide(examples, Boolean(reference));
      const input = $(`#pick-${field}`);
      if (!input) continue;
      write($("label.button span", node), !reference ? "Choose" : SEVERAL.includes(field) ? "Add" : "Replace");
      const described = tandem.marked(input).trim();
      if (described) set(input, "aria-describedby", described); else input.removeAttribute("aria-describedby");
    }
    for (const [id, field] of Object.entries(OPTIONS)) {
      const option = $(`#${id}`);
      if (!option) continue;
      hide(option.closest(".steering"), !SHOWN_WITH[field].some(chosen));
      const now = value(field) ?? "";
      if (option.value !== now && document.activeElement !== option) option.value = now;
    }
    const adjust = $("#images .adjust");
    if (adjust) {
      hide(adjust, !any || adjustable < CUT);
      for (const radio of $$("input[type=radio]", adjust)) {
        if (radio.checked !== (radio.value === fit)) radio.checked = radio.value === fit;
      }
      hide($(".position", adjust), fit === "fit");
      const slider = $("#image-position");
      if (slider.value !== String(at) && document.activeElement !== slider) slider.value = at;
      set(slider, "aria-valuetext", `${at} %`);
    }
    // Buttons below videos need a model that starts from images.
    for (const button of $$("[data-extend]")) hide(button, !able().length);
    for (const button of $$("[data-continue]")) {
      hide(button, !able().length);
      const text = moment(button) === null ? "Continue from the last frame" : "Start from the frame shown";
      write(button, text);
    }
    next();
  };
  for (const name of ["pause", "play", "seeked", "ended"]) document.addEventListener(name, () => tandem.showImages(), true);
})();
