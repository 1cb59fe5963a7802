// Live refresh: fetches the part of a page that is marked data-live every two seconds, and changes only the nodes that
// differ, so that focus, open details and the scroll position stay. Stops while paused, and while the tab is hidden.
"use strict";
{
  const INTERVAL = 2000; // ms
  const MAX_INTERVAL = 60000; // ms, between attempts while requests fail
  const STORAGE_KEY = "rlaas-paused";

  // Update the nodes that differ

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

  const isSameNode = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function update(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    const countChanged = fresh.hasAttribute("data-count") && old.textContent !== fresh.textContent;
    for (const { name } of [...old.attributes]) {
      const opened = name === "open" && old.nodeName === "DETAILS";
      if (!opened && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
    for (const { name, value } of fresh.attributes) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    updateChildren(old, fresh);
    if (countChanged) old.classList.add("rlaas-changed"); // the next update removes it again
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
      } else if (at && isSameNode(at, wanted) && keyOf(at) === null) {
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

  function replaceContent(live, fresh) {
    const focused = document.activeElement;
    updateChildren(live, fresh);
    // Moving a row in the document removes the focus from it.
    if (focused !== document.activeElement && live.contains(focused)) focused.focus({ preventScroll: true });
  }

  // Fetch, and schedule the next fetch

  const live = document.querySelector("[data-live]");
  const controls = document.querySelector("[data-live-controls]");

  if (live && controls && live.dataset.liveUrl) {
    const state = controls.querySelector("[data-live-state]");
    const when = controls.querySelector("[data-live-when]");
    const time = controls.querySelector("[data-live-time]");
    const button = controls.querySelector("[data-live-pause]");
    let timer = null;
    let fetching = false;
    let failures = 0;
    let stopped = false;
    // The page that says that Redis is unavailable waits for Redis.
    const normalState = live.dataset.live === "unavailable" ? "waiting" : "live";

    const paused = () => button.getAttribute("aria-pressed") === "true";

    function setState(name) {
      // Write only changes: a screen reader announces each.
      if (controls.dataset.state === name) return;
      controls.dataset.state = name;
      state.textContent = controls.dataset[`text${name[0].toUpperCase()}${name.slice(1)}`];
      live.classList.toggle("rlaas-stale", name === "late" || name === "stopped" || name === "unavailable");
    }

    function setTime(at) {
      time.textContent = at; // of the server, like all times on the page
      when.hidden = false;
    }

    function schedule(wait) {
      clearTimeout(timer);
      timer = paused() || stopped || document.hidden ? null : setTimeout(refresh, wait);
    }

    function stop() {
      stopped = true;
      button.hidden = true;
      setState("stopped");
    }

    function apply(response, fresh) {
      const name = fresh.dataset.live;
      if (name === live.dataset.live) {
        replaceContent(live, fresh);
        setTime(fresh.dataset.liveAt);
        setState(normalState);
      } else if (response.status === 503) {
        setState("unavailable"); // keep the old data
      } else {
        location.reload(); // Redis is available again: load the page that was requested
      }
    }

    async function refresh() {
      if (fetching) return;
      fetching = true;
      const began = performance.now();
      try {
        const response = await fetch(live.dataset.liveUrl, { headers: { "X-Rlaas-Live": "1" }, cache: "no-store" });
        if (response.redirected || (response.status >= 400 && response.status < 500)) {
          stop(); // logged out, or permission revoked
          return;
        }
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html").querySelector("[data-live]");
        if (!fresh) throw new Error(`No data-live element in a response of status ${response.status}.`);
        failures = 0;
        if (!paused()) apply(response, fresh);
      } catch {
        failures += 1;
        if (!paused()) setState("late");
      } finally {
        fetching = false;
        // A page that is slow to render is fetched less often.
        const took = performance.now() - began;
        schedule(failures ? Math.min(MAX_INTERVAL, INTERVAL * 2 ** failures) : Math.max(INTERVAL, took * 5));
      }
    }

    function setPaused(pause) {
      button.setAttribute("aria-pressed", String(pause));
      try {
        if (pause) sessionStorage.setItem(STORAGE_KEY, "1");
        else sessionStorage.removeItem(STORAGE_KEY);
      } catch {
        // Storage may be blocked; then the choice lasts as long as the page.
      }
    }

    button.addEventListener("click", () => {
      setPaused(!paused());
      setState(paused() ? "paused" : normalState);
      schedule(0);
    });
    document.addEventListener("visibilitychange", () => schedule(0));

    let startPaused = false;
    try {
      startPaused = sessionStorage.getItem(STORAGE_KEY) !== null;
    } catch {
      // as above
    }
    if (startPaused) setPaused(true);
    controls.hidden = false;
    setTime(live.dataset.liveAt);
    setState(startPaused ? "paused" : normalState);
    schedule(INTERVAL);
  }
}
