// Draws a mask on a frame of the control video: strokes, boxes, all inverted. It has the proportions of the video, is kept
// as a list of what was drawn, and is sent as a PNG that is white where the video changes.
(() => {
  "use strict";
  const tandem = window.tandem;
  const COLOR = "rgb(255, 92, 138)";        // as the preview marks what changes
  const STEP = 0.02, LARGE_STEP = 0.1;      // of the cursor, in widths of the frame
  const COUNTED = 64;                       // pixels of a side in which the share is counted
  const BRIGHT = 127;
  const WAIT_MS = 250;                      // a slider rests before its frame is read
  const $ = (selector) => editor().querySelector(selector);
  const editor = () => document.querySelector("#mask-editor");
  const { set, value } = tandem;

  // What was drawn: {tool, size, points}, in shares of the width and height; "image" is a mask that was chosen before.
  let drawn = [], current = null, made = { reference: "", drawn: [] };
  let cursor = { x: 0.5, y: 0.5 }, resting = 0, turn = null, isReady = false;

  const context = () => $("canvas").getContext("2d", { willReadFrequently: true });
  const tool = () => $("input[name=mask-tool]:checked").value;
  const size = () => Number($("#mask-size input").value) / 100;
  const draw = ({ tool: kind, size: width, points, image }) => {
    const { canvas } = context(), c = context(), [w, h] = [canvas.width, canvas.height];
    c.globalCompositeOperation = kind === "eraser" ? "destination-out" : kind === "invert" ? "xor" : "source-over";
    c.fillStyle = c.strokeStyle = COLOR;
    if (kind === "image") c.drawImage(image, 0, 0, w, h);
    else if (kind === "invert") c.fillRect(0, 0, w, h);
    else if (kind === "clear") c.clearRect(0, 0, w, h);
    else if (kind === "box") {
      const [a, b] = [points[0], points.at(-1)];
      c.fillRect(Math.min(a.x, b.x) * w, Math.min(a.y, b.y) * h, Math.abs(a.x - b.x) * w, Math.abs(a.y - b.y) * h);
    } else {
      c.lineWidth = width * w;
      c.lineCap = c.lineJoin = "round";
      // A line of no length would not be drawn.
      c.beginPath();
      c.arc(points[0].x * w, points[0].y * h, width * w / 2, 0, 2 * Math.PI);
      c.fill();
      c.beginPath();
      c.moveTo(points[0].x * w, points[0].y * h);
      for (const { x, y } of points) c.lineTo(x * w, y * h);
      c.stroke();
    }
  };
  const redraw = () => {
    const { canvas } = context();
    context().globalCompositeOperation = "source-over";
    context().clearRect(0, 0, canvas.width, canvas.height);
    for (const each of current ? [...drawn, current] : drawn) draw(each);
  };
  const share = () => {
    const small = Object.assign(document.createElement("canvas"), { width: COUNTED, height: COUNTED });
    const c = small.getContext("2d");
    c.drawImage(context().canvas, 0, 0, COUNTED, COUNTED);
    const { data } = c.getImageData(0, 0, COUNTED, COUNTED);
    let sum = 0;
    for (let at = 3; at < data.length; at += 4) sum += data[at];
    return sum / 255 / COUNTED ** 2;
  };
  const note = (text, bad = false) => { $(".note").textContent = text; $(".note").classList.toggle("bad", bad); };
  const report = () => {
    const part = share(), percent = part > 0 && part < 0.01 ? "less than 1" : Math.round(100 * part);
    note(part ? `${percent} % of the frame changes.` : "Paint what changes.");
    set($("[data-mask=use]"), "aria-disabled", String(!part));
    for (const name of ["undo", "clear"]) set($(`[data-mask=${name}]`), "aria-disabled", String(!drawn.length));
  };
  const add = (entry) => { drawn.push(entry); redraw(); report(); };
  const begin = (point) => { current = { tool: tool(), size: size(), points: [point] }; redraw(); };
  const extend = (point) => { current?.points.push(point); redraw(); };
  const end = () => {
    if (!current) return;
    const done = current;
    current = null;
    add(done);
  };
  const cancel = () => { current = null; redraw(); };

  const showCursor = () => {
    const node = $(".cursor");
    node.style.left = `${100 * cursor.x}%`;
    node.style.top = `${100 * cursor.y}%`;
    node.style.width = tool() === "box" ? "0.8rem" : `${100 * size()}%`;
    node.classList.toggle("down", Boolean(current));
  };
  const point = (event) => {
    const box = $("canvas").getBoundingClientRect();
    return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
  };

  // The frame below the mask. Its size is that of the mask.
  const second = () => Number($("#mask-moment input").value);
  const showSecond = () => {
    $("#mask-moment output").textContent = `${second().toFixed(1)} s`;
    set($("#mask-moment input"), "aria-valuetext", `${second().toFixed(1)} seconds`);
  };
  const loadFrame = async () => {
    const mine = turn = {};
    const { picture, error } = await tandem.askImage({ what: "moment", video: value("control"), seconds: second() });
    if (turn !== mine) return false;
    if (error) { note(error, true); return false; }
    const image = $(".canvas img");
    image.src = picture;
    await image.decode().catch(() => {});
    const canvas = $("canvas");
    if (canvas.width !== image.naturalWidth || canvas.height !== image.naturalHeight) {
      [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
      $(".canvas").style.setProperty("--ratio", image.naturalWidth / image.naturalHeight);
      redraw();
    }
    return true;
  };
  // A mask that was chosen as an image, in the color of what is drawn.
  const asDrawn = async (url) => {
    const image = Object.assign(new Image(), { src: url });
    await image.decode();
    const canvas = Object.assign(document.createElement("canvas"), { width: image.width, height: image.height });
    const c = canvas.getContext("2d");
    c.drawImage(image, 0, 0);
    const pixels = c.getImageData(0, 0, image.width, image.height), { data } = pixels;
    const [red, green, blue] = COLOR.match(/\d+/g).map(Number);
    for (let at = 0; at < data.length; at += 4) data.set([red, green, blue, data[at] > BRIGHT ? 255 : 0], at);
    c.putImageData(pixels, 0, 0);
    return { tool: "image", image: canvas };
  };
  const open = async () => {
    const dialog = editor(), { seconds = 0, width, height } = tandem.pictureOf("control") ?? {}, before = tandem.pictureOf("mask");
    const moment = $("#mask-moment input");
    moment.max = String(Math.max(Math.floor(10 * seconds - 1) / 10, tandem.controlSecond(), 0));
    moment.value = String(tandem.controlSecond());
    $("#mask-moment").hidden = moment.max === "0";
    showSecond();
    drawn = made.reference && made.reference === value("mask") ? [...made.drawn] : [];
    isReady = false;
    redraw();
    if (height) $(".canvas").style.setProperty("--ratio", width / height);
    dialog.showModal();
    report();
    note("Reading the frame…");
    if (!await loadFrame()) return;
    isReady = true;
    // The first frame of a mask that is a video says little of the others.
    if (!drawn.length && value("mask") && before?.url && !before.seconds) drawn = [await asDrawn(before.url)];
    redraw();
    showCursor();
    report();
    $("canvas").focus({ preventScroll: true });
  };
  const close = () => {
    turn = null;
    cancel();
    editor().close();
  };
  const use = async () => {
    const { canvas } = context(), whole = document.createElement("canvas");
    [whole.width, whole.height] = [canvas.width, canvas.height];
    const c = whole.getContext("2d");
    c.drawImage(canvas, 0, 0);
    c.globalCompositeOperation = "source-in";
    c.fillStyle = "white";
    c.fillRect(0, 0, whole.width, whole.height);
    c.globalCompositeOperation = "destination-over";
    c.fillStyle = "black";
    c.fillRect(0, 0, whole.width, whole.height);
    const blob = await new Promise((resolve) => whole.toBlob(resolve, "image/png")), kept = [...drawn];
    close();
    const reference = await tandem.takeMask(new File([blob], "drawn mask.png", { type: "image/png" }));
    if (reference) made = { reference, drawn: kept };
  };
  const ACTIONS = {
    undo: () => { drawn.pop(); redraw(); report(); },
    invert: () => add({ tool: "invert" }),
    clear: () => add({ tool: "clear" }),
    cancel: close,
    use,
  };

  document.addEventListener("click", ({ target }) => {
    if (target.closest("[data-draw]")) open();
    const button = target.closest("#mask-editor [data-mask]");
    if (button && button.getAttribute("aria-disabled") !== "true") ACTIONS[button.dataset.mask]();
  });
  const isCanvas = ({ target }) => target.matches?.("#mask-editor canvas");
  document.addEventListener("pointerdown", (event) => {
    if (!isCanvas(event) || event.button !== 0 || current || !isReady) return;
    event.target.setPointerCapture(event.pointerId);
    begin(point(event));
  });
  document.addEventListener("pointermove", (event) => { if (current && isCanvas(event)) extend(point(event)); });
  document.addEventListener("pointerup", (event) => { if (isCanvas(event)) end(); });
  document.addEventListener("pointercancel", (event) => { if (isCanvas(event)) cancel(); });
  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  document.addEventListener("keydown", (event) => {
    if (!editor()?.open) return;
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") { event.preventDefault(); ACTIONS.undo(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || !isCanvas(event)) return;
    const move = MOVES[event.key];
    if (move) {
      const step = event.shiftKey ? LARGE_STEP : STEP, ratio = event.target.width / event.target.height;
      const within = (at) => Math.min(Math.max(at, 0), 1);
      cursor = { x: within(cursor.x + move[0] * step), y: within(cursor.y + move[1] * step * ratio) };
      if (current) extend(cursor);
    } else if (event.key === " " && isReady) {
      if (current) end(); else { begin(cursor); note(tool() === "box" ? "Box begun." : "Stroke begun."); }
    } else return;
    event.preventDefault();
    showCursor();
  });
  document.addEventListener("input", ({ target }) => {
    if (!target.closest("#mask-editor")) return;
    if (target.closest("#mask-size")) set(target, "aria-valuetext", `${target.value} percent`);
    showCursor();
    if (!target.closest("#mask-moment")) return;
    showSecond();
    clearTimeout(resting);
    resting = setTimeout(loadFrame, WAIT_MS);
  });
  // Escape gives up a stroke first.
  document.addEventListener("cancel", (event) => {
    if (event.target !== editor()) return;
    if (current) { event.preventDefault(); cancel(); showCursor(); }
  }, true);
  document.addEventListener("close", ({ target }) => {
    if (target !== editor()) return;
    turn = null;
    const button = document.querySelector("#images [data-draw]");
    if (!button) return;
    tandem.openPopover(button);
    button.focus();
  }, true);
})();
