// Live refresh: fetches the part of a page that is marked data-live every two seconds, and changes only the nodes that
// differ, so that focus, open details and the scroll position stay. Waits longer after each failure, and stops while
// paused and while the tab is hidden. The event "rlaas:refreshed" tells other scripts that nodes have changed.
"use strict";
{
  const INTERVAL = 2000; // ms
  const MAX_INTERVAL = 60000; // ms, between attempts while requests fail
  const TYPING_PAUSE = 300; // ms, from the last key to the fetch of what a filter finds
  const STORAGE_KEY = "rlaas-paused";

  // Update the nodes that differ

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.getAttribute("data-key") : null);

  const isSameNode = (one, other) => one.nodeType === other.nodeType && one.nodeName === other.nodeName && keyOf(one) === keyOf(other);

  function update(old, fresh) {
    if (old.nodeType !== Node.ELEMENT_NODE) {
      if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
      return;
    }
    if (old.hasAttribute("data-live-keep")) return; // a script has made it what it is
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
    live.dispatchEvent(new CustomEvent("rlaas:refreshed"));
  }

  // Fetch, and schedule the next fetch

  const live = document.querySelector("[data-live]");
  const controls = document.querySelector("[data-live-controls]");

  if (live && controls && live.dataset.liveUrl) {
    const state = controls.querySelector("[data-live-state]");
    const when = controls.querySelector("[data-live-when]");
    const time = controls.querySelector("[data-live-time]");
    const button = controls.querySelector("[data-live-pause]");
    // The page that says that Redis is unavailable waits for Redis.
    const normalState = live.dataset.live === "unavailable" ? "waiting" : "live";
    let timer = null;
    let fetching = false;
    let failures = 0;
    let paused = false;
    let changed = false; // the filter, since the last fetch: then it is fetched also while paused

    function setState(name) {
      // Write only changes: a screen reader announces each.
      if (controls.dataset.state === name) return;
      controls.dataset.state = name;
      state.textContent = controls.dataset[`text${name[0].toUpperCase()}${name.slice(1)}`];
      live.classList.toggle("rlaas-stale", ["late", "signedout", "unavailable"].includes(name));
    }

    function setTime(at) {
      time.textContent = at; // of the server, like all times on the page
      when.hidden = false;
    }

    function schedule(wait) {
      clearTimeout(timer);
      timer = (paused && !changed) || document.hidden ? null : setTimeout(refresh, wait);
    }

    // Return the state after a response, and show what it contains.
    function apply(response, fresh) {
      if (response.redirected) return "signedout";
      if (response.status === 503 && fresh && live.dataset.live !== "unavailable") return "unavailable"; // keep the old data
      if (!response.ok && response.status !== 503) return "late";
      if (!fresh) return "late";
      if (fresh.dataset.live !== live.dataset.live) {
        location.reload(); // Redis is available again: load the page that was requested
        return normalState;
      }
      replaceContent(live, fresh);
      setTime(fresh.dataset.liveAt);
      return normalState;
    }

    async function refresh() {
      if (fetching) return;
      fetching = true;
      const wanted = changed;
      changed = false;
      const began = performance.now();
      let next = "late";
      let retryAfter = 0;
      try {
        const response = await fetch(live.dataset.liveUrl, { headers: { "X-Rlaas-Live": "1" }, cache: "no-store" });
        retryAfter = 1000 * (Number(response.headers.get("Retry-After")) || 0);
        const fresh = new DOMParser().parseFromString(await response.text(), "text/html").querySelector("[data-live]");
        failures = response.ok && !response.redirected ? 0 : failures + 1;
        if (paused && !wanted) return;
        next = apply(response, fresh);
      } catch {
        failures += 1; // the network, or the server is being restarted
      } finally {
        fetching = false;
        if (!paused) setState(next);
        // A page that is slow to render is fetched less often.
        const usual = Math.max(INTERVAL, (performance.now() - began) * 5);
        const backOff = Math.min(MAX_INTERVAL, Math.max(INTERVAL * 2 ** failures, retryAfter));
        schedule(changed ? 0 : failures ? backOff : usual);
      }
    }

    function setPaused(pause) {
      paused = pause;
      button.textContent = pause ? controls.dataset.textResume : controls.dataset.textPause;
      setState(pause ? "paused" : normalState);
      try {
        if (pause) sessionStorage.setItem(STORAGE_KEY, "1");
        else sessionStorage.removeItem(STORAGE_KEY);
      } catch {
        // Storage may be blocked; then the choice lasts as long as the page.
      }
    }

    button.addEventListener("click", () => {
      setPaused(!paused);
      schedule(0);
    });
    document.addEventListener("visibilitychange", () => schedule(0));

    // A form with data-live-filter filters while one types: the URL has its fields, and the next refresh shows the result.
    document.addEventListener("input", (event) => {
      const form = event.target.closest("form[data-live-filter]");
      if (!form) return;
      const url = `?${new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== ""))}`;
      live.dataset.liveUrl = url;
      history.replaceState(null, "", url);
      changed = true;
      schedule(TYPING_PAUSE);
    });

    let startPaused = false;
    try {
      startPaused = sessionStorage.getItem(STORAGE_KEY) !== null;
    } catch {
      // as above
    }
    controls.hidden = false;
    setTime(live.dataset.liveAt);
    setPaused(startPaused);
    schedule(INTERVAL);
  }
}
