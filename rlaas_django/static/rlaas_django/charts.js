// Lets charts be read by pointer, touch and keyboard: a bar is chosen, and its numbers are shown below the chart.
// For assistive technology each chart is a slider whose value is the text of the chosen bar.
"use strict";
{
  const STEPS = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };

  function read(plot) {
    const chart = plot.querySelector(".rlaas-chart");
    const reader = plot.querySelector(".rlaas-reader");
    const readout = plot.querySelector(".rlaas-readout");
    let chosen = null; // how many bars before the latest; null if none is chosen

    function show() {
      const spans = chart.querySelectorAll(".rlaas-span");
      const last = spans.length - 1;
      const index = last - (chosen === null ? 0 : Math.min(chosen, last));
      spans.forEach((span, i) => span.classList.toggle("rlaas-chosen", chosen !== null && i === index));
      const text = spans[index].textContent;
      readout.textContent = text;
      reader.setAttribute("aria-valuemax", last);
      reader.setAttribute("aria-valuenow", index);
      reader.setAttribute("aria-valuetext", text);
      reader.setAttribute("aria-label", chart.getAttribute("aria-label"));
    }

    function choose(index) {
      const last = chart.querySelectorAll(".rlaas-span").length - 1;
      chosen = index === null ? null : last - Math.max(0, Math.min(last, index));
      show();
    }

    function point(event) {
      const box = reader.getBoundingClientRect();
      const number = chart.querySelectorAll(".rlaas-span").length;
      choose(Math.floor(((event.clientX - box.left) / box.width) * number));
    }

    reader.addEventListener("pointerdown", point);
    reader.addEventListener("pointermove", point);
    reader.addEventListener("pointerleave", (event) => {
      // A finger that is lifted leaves, too; what it chose stays.
      if (event.pointerType === "mouse" && document.activeElement !== reader) choose(null);
    });
    reader.addEventListener("blur", () => choose(null));
    reader.addEventListener("keydown", (event) => {
      if (event.key === "Escape") choose(null);
      if (!(event.key in STEPS)) return;
      event.preventDefault();
      choose(Number(reader.getAttribute("aria-valuenow")) + (chosen === null ? 0 : STEPS[event.key]));
    });

    reader.tabIndex = 0;
    reader.setAttribute("role", "slider");
    reader.setAttribute("aria-valuemin", 0);
    reader.hidden = false;
    show();
    return show;
  }

  const shows = new Map(); // plot -> what shows its chosen bar again

  function update() {
    for (const plot of document.querySelectorAll(".rlaas-plot")) {
      if (shows.has(plot)) shows.get(plot)();
      else shows.set(plot, read(plot));
    }
  }

  update();
  document.querySelector("[data-live]")?.addEventListener("rlaas:refreshed", update);
}
