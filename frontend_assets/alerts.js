// What marks the end of a job: a sound and a notification of the desktop. Both are off until Settings turns them on.
(() => {
  "use strict";
  const tandem = window.tandem;
  const SOUND = "tandem.sound", NOTIFICATION = "tandem.notification";
  const { read, write } = tandem;
  const $ = (selector) => document.querySelector(selector);
  const isOn = (key) => read("localStorage", key) === "on";

  // Browsers allow sound only after the page was touched.
  let audio = null;
  const wake = () => {
    if (!isOn(SOUND)) return;
    audio ??= new AudioContext();
    audio.resume();
  };
  const chime = (good) => {
    if (!isOn(SOUND)) return;
    wake();
    (good ? [523.25, 783.99] : [392, 311.13]).forEach((pitch, place) => {
      const tone = audio.createOscillator(), loud = audio.createGain();
      const at = audio.currentTime + 0.16 * place;
      tone.frequency.value = pitch;
      loud.gain.setValueAtTime(0, at);
      loud.gain.linearRampToValueAtTime(0.08, at + 0.03);
      loud.gain.exponentialRampToValueAtTime(0.0001, at + 0.7);
      tone.connect(loud).connect(audio.destination);
      tone.start(at);
      tone.stop(at + 0.75);
    });
    tandem.chimes = (tandem.chimes ?? 0) + 1;
  };
  for (const touch of ["pointerdown", "keydown"]) document.addEventListener(touch, wake, { once: true });

  // Browsers have notifications only for pages by HTTPS and of this machine, and ask only after a click.
  const permission = () => "Notification" in window && isSecureContext ? Notification.permission : "unavailable";
  const INFO = {
    unavailable: "Not available here: open this page by HTTPS, or on the machine of Tandem by 127.0.0.1.",
    denied: "Blocked by the browser. Allow notifications in its settings for this page, then turn this on.",
    default: "Shown when a video is done or fails while this page is hidden. The browser asks for permission.",
    granted: "Shown when a video is done or fails while this page is hidden.",
  };
  const notifyDesktop = (good) => {
    if (!document.hidden || !isOn(NOTIFICATION) || permission() !== "granted") return;
    try {
      // The tag: several tabs show one notification.
      const title = good ? "The video is done" : "The video has failed";
      const shown = new Notification(title, { body: "Tandem", tag: "tandem", icon: "favicon.ico" });
      shown.addEventListener("click", () => { window.focus(); shown.close(); });
    } catch { /* Android's browsers have them in service workers only */ }
  };
  tandem.alertEnd = (good) => { chime(good); notifyDesktop(good); };

  tandem.showAlerts = () => {
    const sound = $("#sound"), notification = $("#notification");
    if (!sound) return;  // a visitors' page
    sound.checked = isOn(SOUND);
    notification.disabled = permission() === "unavailable";
    notification.checked = isOn(NOTIFICATION) && permission() === "granted";
    $("#notification-info").textContent = INFO[permission()];
  };
  const chooseNotification = async (on) => {
    const answer = on && permission() !== "unavailable" ? await Notification.requestPermission() : "";
    write("localStorage", NOTIFICATION, answer === "granted" ? "on" : "off");
    tandem.showAlerts();
  };
  document.addEventListener("change", ({ target }) => {
    if (target.id === "sound") {
      write("localStorage", SOUND, target.checked ? "on" : "off");
      chime(true);
    } else if (target.id === "notification") chooseNotification(target.checked);
  });
})();
