// Presets of one's own, beside those of the planner: the settings of the form under a name, stored in this browser.
(() => {
  "use strict";
  const tandem = window.tandem;
  const { names } = tandem;
  const PRESETS = "tandem.presets", MOST = 30;
  const OF_A_VIDEO = /^(prompt|original_prompt|model|seed|seconds|size_from|video|strength|control.*|face|background|preprocess|overlap|mask|outpaint|extend_frames|join|references|keyframe.*|(last_)?image.*)$/;
  const $ = (selector) => document.querySelector(selector);
  const stored = () => {
    try {
      const all = JSON.parse(tandem.read("localStorage", PRESETS) ?? "[]");
      return Array.isArray(all) ? all.filter(({ name, settings }) => typeof name === "string" && settings) : [];
    } catch { return []; }
  };
  const store = (presets) => { tandem.write("localStorage", PRESETS, JSON.stringify(presets)); show(); };
  const settings = () => Object.fromEntries(names().map((name, at) => [name, tandem.values[at]])
    .filter(([name]) => !OF_A_VIDEO.test(name)));
  const same = (first, second) => Object.keys(first).every((name) => String(first[name] ?? "") === String(second[name] ?? ""));

  const button = (text, label, kind) => Object.assign(document.createElement("button"),
    { type: "button", className: kind, textContent: text, ariaLabel: label, title: label });
  // Returns the name of the preset that the form has; empty if it has none.
  const show = tandem.showOwnPresets = () => {
    const row = $("#own-presets .own-presets");
    if (!row || !tandem.values.length) return "";
    const presets = stored(), now = settings();
    const chosen = presets.map((preset) => same(now, preset.settings));
    const key = JSON.stringify(presets.map(({ name }, at) => [name, chosen[at]]));
    if (row.dataset.of !== key) {
      row.dataset.of = key;
      row.replaceChildren(...presets.map(({ name }, at) => {
        const pair = document.createElement("span"), use = button(name, `Use the preset ${name}`, "chip");
        use.dataset.ownPreset = name;
        use.setAttribute("aria-pressed", String(chosen[at]));
        const remove = button("×", `Remove the preset ${name}`, "icon");
        remove.dataset.removePreset = name;
        pair.append(use, remove);
        return pair;
      }));
    }
    const name = presets[chosen.indexOf(true)]?.name ?? "";
    const tag = $("#presets legend .tag");  // "Custom"
    if (tag && tag.hidden !== Boolean(name)) tag.hidden = Boolean(name);
    return name;
  };
  const save = () => {
    const field = $("#preset-name"), name = field.value.trim();
    if (!name) { field.focus(); return; }
    store([...stored().filter((preset) => preset.name !== name), { name, settings: settings() }].slice(-MOST));
    field.value = "";
    tandem.showForm();
  };

  document.addEventListener("click", ({ target }) => {
    const use = target.closest("[data-own-preset]"), remove = target.closest("[data-remove-preset]");
    if (target.id === "preset-save") save();
    if (remove) {
      store(stored().filter((preset) => preset.name !== remove.dataset.removePreset));
      $("#preset-name").focus();
    }
    const preset = use && stored().find(({ name }) => name === use.dataset.ownPreset);
    if (!preset) return;
    const usable = Object.entries(preset.settings).filter(([name]) => names().includes(name) && !OF_A_VIDEO.test(name));
    tandem.uncustomized();
    tandem.apply({ ...Object.fromEntries(usable), size_from: "" });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && event.target.id === "preset-name") { event.preventDefault(); save(); }
  });
})();
