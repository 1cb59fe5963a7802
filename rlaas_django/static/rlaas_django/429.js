// Counts down to the time from which a request is allowed again. Without this script the page shows that time.
"use strict";
{
  const LONGEST = 24 * 3600; // s; a longer wait is read more easily as a date
  const countdown = document.querySelector("[data-wait]");
  const wait = Number(countdown.dataset.wait);

  // 38 -> 0:38, 3725 -> 1:02:05
  function format(seconds) {
    const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, seconds % 60];
    if (!parts[0]) parts.shift();
    return parts.map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
  }

  if (wait <= LONGEST) {
    const clock = countdown.querySelector(".clock");
    const progress = countdown.querySelector("progress");
    const status = document.querySelector(".wait");
    const end = performance.now() + wait * 1000; // not by the clock of the client, which may be wrong

    function tick() {
      const left = end - performance.now();
      const seconds = Math.max(0, Math.ceil(left / 1000));
      clock.textContent = format(seconds);
      progress.value = Math.min(1, 1 - left / 1000 / wait);
      if (seconds) {
        setTimeout(tick, left % 1000 || 1000); // at the next whole second
        return;
      }
      status.textContent = status.dataset.ready;
      document.body.classList.remove("waiting");
    }

    status.querySelector("span").hidden = true; // "in 38 seconds", which the clock shows now
    countdown.hidden = false;
    document.body.classList.add("waiting");
    tick();
  }
}
