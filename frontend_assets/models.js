// The panel Models: selects a model in Make, and follows models that were added or deleted.
(() => {
  "use strict";
  const tandem = window.tandem;
  const $ = (selector) => document.querySelector(selector);

  tandem.chosenModel = "";
  // Selects a model in Make with its defaults, as if it was chosen there.
  tandem.useModel = (name) => {
    tandem.chosenModel = name;
    $("#choose-model").click();
  };
  tandem.modelsChanged = ({ models, gone, first }) => {
    const panel = $('[data-panel="models"]');
    if (gone && tandem.value("model") === gone) tandem.useModel(first);
    else if (Number(panel.dataset.models) !== models) $("#refresh-models").click();
    panel.dataset.models = models;
  };
})();
