// Keeps the part of a page that is marked data-live fresh: asks for it every two seconds and changes only what differs,
// so that focus, open details and the place of reading stay. Pauses when asked to, and while nobody looks.
"use strict";
{
  const EVERY = 2000; // ms
  const LONGEST = 60000; // between attempts while the site does not answer
  const MEMORY = "rlaas-paused";

  // ── changing what differs ───────────────────────────────────────────────────────────────────────────────────────

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

  const alike = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function update(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    const counted = fresh.hasAttribute("data-count");
    const differs = counted && old.textContent !== fresh.textContent;
    for (const { name } of [...old.attributes]) {
      const opened = name === "open" && old.nodeName === "DETAILS";
      if (!opened && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    updateChildren(old, fresh);
    if (differs) old.classList.add("rlaas-changed"); // until the next time, when the server's class holds again
  }

  function updateChildren(old, fresh) {
    const keyed = new Map();
    for (const child of old.children) {
      if (keyOf(child) !== null) keyed.set(`${child.nodeName} ${keyOf(child)}`, child);
    }
    let at = old.firstChild;
    for (const wanted of [...fresh.childNodes]) {
      const name = `${wanted.nodeName} ${keyOf(wanted)}`;
      const known = keyOf(wanted) !== null ? keyed.get(name) : null;
      if (known) {
        keyed.delete(name);
        if (known === at) at = at.nextSibling;
        else old.insertBefore(known, at);
        update(known, wanted);
      } else if (at && alike(at, wanted) && keyOf(at) === null) {
        const next = at.nextSibling;
        update(at, wanted);
        at = next;
      } else {
        old.insertBefore(document.importNode(wanted, true), at);
      }
    }
    while (at) {
      const next = at.nextSibling;
      at.remove();
      at = next;
    }
  }

  function show(live, fresh) {
    const focused = document.activeElement;
    updateChildren(live, fresh);
    // A row that moved takes its focus along.
    if (focused !== document.activeElement && live.contains(focused)) focused.focus({ preventScroll: true });
  }

  // ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

  const live = document.querySelector("[data-live]");
  const controls = document.querySelector("[data-live-controls]");

  if (live && controls && live.dataset.liveUrl) {
    const state = controls.querySelector("[data-live-state]");
    const when = controls.querySelector("[data-live-when]");
    const time = controls.querySelector("[data-live-time]");
    const button = controls.querySelector("[data-live-pause]");
    let timer = null;
    let asking = false;
    let failures = 0;
    let stopped = false;
    // A page that tells that there is no Redis waits for it.
    const usual = live.dataset.live === "unreachable" ? "waiting" : "live";

    const paused = () => button.getAttribute("aria-pressed") === "true";

    function tell(name) {
      // Only a change is written, and so read out.
      if (controls.dataset.state === name) return;
      controls.dataset.state = name;
      state.textContent = controls.dataset[`text${name[0].toUpperCase()}${name.slice(1)}`];
      live.classList.toggle("rlaas-stale", name === "late" || name === "stopped" || name === "unreachable");
    }

    function tellTime(at) {
      time.textContent = at; // the server's, like all times on the page
      when.hidden = false;
    }

    function later(wait) {
      clearTimeout(timer);
      timer = paused() || stopped || document.hidden ? null : setTimeout(ask, wait);
    }

    function stop() {
      stopped = true;
      button.hidden = true;
      tell("stopped");
    }

    function take(answer, fresh) {
      const name = fresh.dataset.live;
      if (name === live.dataset.live) {
        show(live, fresh);
        tellTime(fresh.dataset.liveAt);
        tell(usual);
      } else if (answer.status === 503) {
        tell("unreachable"); // what was seen last stays
      } else {
        location.reload(); // Redis is back, and this page is not the one that was asked for
      }
    }

    async function ask() {
      if (asking) return;
      asking = true;
      const began = performance.now();
      try {
        const answer = await fetch(live.dataset.liveUrl, { headers: { "X-Rlaas-Live": "1" }, cache: "no-store" });
        if (answer.redirected || (answer.status >= 400 && answer.status < 500)) {
          stop(); // logged out, or no longer allowed to look
          return;
        }
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("[data-live]");
        if (!fresh) throw new Error(`There is nothing to show in an answer of status ${answer.status}.`);
        failures = 0;
        if (!paused()) take(answer, fresh);
      } catch {
        failures += 1;
        if (!paused()) tell("late");
      } finally {
        asking = false;
        // A page that is slow to make is asked for less often.
        const took = performance.now() - began;
        later(failures ? Math.min(LONGEST, EVERY * 2 ** failures) : Math.max(EVERY, took * 5));
      }
    }

    function setPaused(pause) {
      button.setAttribute("aria-pressed", String(pause));
      try {
        if (pause) sessionStorage.setItem(MEMORY, "1");
        else sessionStorage.removeItem(MEMORY);
      } catch {
        // Storage may be forbidden; then the choice lasts as long as the page.
      }
    }

    button.addEventListener("click", () => {
      setPaused(!paused());
      tell(paused() ? "paused" : usual);
      later(0);
    });
    document.addEventListener("visibilitychange", () => later(0));

    let remembered = false;
    try {
      remembered = sessionStorage.getItem(MEMORY) !== null;
    } catch {
      // as above
    }
    if (remembered) setPaused(true);
    controls.hidden = false;
    tellTime(live.dataset.liveAt);
    tell(remembered ? "paused" : usual);
    later(EVERY);
  }
}
