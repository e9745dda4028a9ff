// The button "Enhance": the chat model's prompt takes the place of the one in the form, which can be restored.
(() => {
  "use strict";
  const tandem = window.tandem;
  const POLL_MS = 400;
  const $ = (selector) => document.querySelector(selector);
  const area = () => $("#field-prompt textarea");
  const hide = (node, hidden) => { if (node && node.hidden !== hidden) node.hidden = hidden; };
  const write = (node, text) => { if (node && node.textContent !== text) node.textContent = text; };

  let running = "";   // the enhancement that is followed, or "asked" until it is known
  const ask = async (action, target, values, form) => {
    const call = { action, target, values, view: {}, form, drawn: {} };
    const answer = await fetch("tandem/panels/enhancer", {
      method: "POST", headers: { "Content-Type": "application/json" }, cache: "no-store", body: JSON.stringify(call),
    }).catch(() => null);
    if (answer?.ok) return answer.json();
    const message = answer ? await tandem.refusal(answer) : "Tandem did not answer. Try again.";
    return { message, error: true };
  };
  const report = (reply) => tandem.panels.notify(reply.message, { error: true });
  const showRunning = (line) => {
    hide($("#original-prompt .enhancing"), !line);
    write($("#original-prompt .enhancing span"), line);
    $("#enhance").setAttribute("aria-busy", String(Boolean(line)));
  };

  // As if it were typed, so that the browser's own undo has the earlier text.
  const type = (text) => {
    const field = area();
    field.focus({ preventScroll: true });
    field.select();
    if (!document.execCommand("insertText", false, text) || field.value !== text) tandem.apply({ prompt: text });
  };

  const enhance = async () => {
    const prompt = area().value;
    running = "asked";
    showRunning("Asking the enhancer.");
    const begun = await ask("enhance", "", { prompt }, await tandem.panels.formValues());
    if (begun.error) { running = ""; showRunning(""); report(begun); return; }
    $("#enhance").removeAttribute("aria-disabled");
    if (running === "stopped") { ask("cancel", begun.id, {}, []); running = ""; return; }
    for (running = begun.id; running === begun.id;) {
      const reply = await ask("progress", begun.id, {}, []);
      if (running !== begun.id) return;
      if (reply.state === "running") {
        showRunning(reply.line);
        await new Promise((resolve) => { setTimeout(resolve, POLL_MS); });
        continue;
      }
      running = "";
      showRunning("");
      if (reply.error) report(reply);
      // What was typed meanwhile stays.
      else if (reply.state === "done" && area().value === prompt) { tandem.apply({ original_prompt: prompt }); type(reply.prompt); }
      else if (reply.state === "done") report({ message: "The prompt was changed meanwhile, and is not replaced. Enhance it again." });
    }
  };
  const stop = () => {
    if (running && running !== "asked") ask("cancel", running, {}, []);
    running = running === "asked" ? "stopped" : "";
    showRunning("");
    area().focus();
  };

  // Called for each change of the form.
  tandem.showOriginal = () => {
    const original = tandem.value("original_prompt"), prompt = tandem.value("prompt");
    if (original === undefined) return;   // the visitors' page
    hide($("#original-prompt .original"), !original || original === prompt);
    write($("#original-prompt q"), original);
  };
  document.addEventListener("input", ({ target }) => {
    if (target === area() && !target.value) tandem.apply({ original_prompt: "" });
  });
  document.addEventListener("click", ({ target }) => {
    if (target.id === "enhance" && !running) enhance();
    else if (target.id === "enhance-stop") stop();
    else if (target.id === "enhance-undo") { type(tandem.value("original_prompt")); tandem.apply({ original_prompt: "" }); }
  });
})();
