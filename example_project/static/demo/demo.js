// Each panel of the page tries one limited view: it sends the request, and shows what came back.
"use strict";

let csrf = document.querySelector("[name=csrfmiddlewaretoken]").value; // another one after each login
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const SHOWN_HEADERS = [
  "Retry-After", "RateLimit-Policy", "RateLimit",
  "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset",
];
const HISTORY = 20;

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// --- What came back -------------------------------------------------------------------------------------------------

// A structured field such as `"login";q=5;w=60, "search";q=30;w=10`.
function items(field) {
  return Array.from((field ?? "").matchAll(/"([^"]+)"((?:;\w+=\d+)*)/g), ([, policy, parameters]) => ({
    policy,
    ...Object.fromEntries(Array.from(parameters.matchAll(/;(\w+)=(\d+)/g), ([, name, value]) => [name, Number(value)])),
  }));
}

// The figures of the enforced policies are in the headers, as any client can read them.
function figuresIn(headers) {
  const usage = new Map(items(headers.get("RateLimit")).map((item) => [item.policy, item]));
  return items(headers.get("RateLimit-Policy")).map(({ policy, q }) => {
    const { r, t } = usage.get(policy);
    return { policy, limit: q, count: q - r, reset_after: t };
  });
}

function read(response, body) {
  const told = figuresIn(response.headers);
  const over = (body.figures ?? []).find((figure) => !figure.allowed);
  return {
    status: response.status,
    reason: response.statusText,
    headers: SHOWN_HEADERS.filter((name) => response.headers.has(name)).map((name) => [name, response.headers.get(name)]),
    figures: told.length ? told : body.figures ?? [],
    violated: body["violated-policies"] ?? [],
    said: body.text ?? (told.length > 1 ? `By the policy “${body["violated-policies"]?.join("” and “")}”.` : ""),
    heard: body.detail ?? "", // the eye has the seconds counted down to it
    retryAfter: Number(response.headers.get("Retry-After") ?? over?.retry_after ?? 0),
    ...verdict(response, body, over),
  };
}

function verdict(response, body, over) {
  if (response.status === 503) return { kind: "refused", word: "Refused; Redis is unavailable" };
  if (response.status === 429) return { kind: "refused", word: "Refused" };
  if (over?.shadow) return { kind: "over", word: "Allowed; would be refused" };
  if (over) return { kind: "over", word: "Over the limit, but served" };
  if (body.degraded) return { kind: "over", word: "Allowed; Redis is unavailable" };
  if (body.figures?.length === 0) return { kind: "allowed", word: "Allowed; there is no limit" };
  return { kind: "allowed", word: "Allowed" };
}

// --- A panel --------------------------------------------------------------------------------------------------------

class Panel {
  constructor(element) {
    this.element = element;
    this.name = element.dataset.panel;
    this.form = this.find("form");
    this.asked = 0;
    this.busy = 0;
    this.queue = Promise.resolve();
    this.retryAt = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.press(1);
    });
    this.find(".ten").addEventListener("click", () => this.press(10));
    this.find(".reset").addEventListener("click", () => this.reset());
    this.find(".token")?.addEventListener("change", () => look());
    for (const button of element.querySelectorAll(".switch")) {
      button.addEventListener("click", () => this.switchRedis(button));
    }
  }

  find(selector) {
    return this.element.querySelector(selector);
  }

  get authorization() {
    const token = this.find(".token")?.value;
    return token ? { Authorization: `Bearer ${token}` } : {};
  }

  // One after the other, also when the buttons are pressed faster than the answers come.
  then(work) {
    this.busy += 1;
    this.asked += 1;
    this.queue = this.queue.then(work).catch((error) => this.fail(error)).finally(() => { this.busy -= 1; });
    return this.queue;
  }

  press(times) {
    if (!this.form.reportValidity()) return this.queue;
    return this.then(async () => {
      const status = this.find("[role=status]");
      status.setAttribute("aria-busy", "true"); // ten presses are announced once, by the last
      const results = [];
      for (let i = 0; i < times; i += 1) {
        if (i && !calm.matches) await pause(40); // so that the eye can follow
        results.push(await this.ask());
        this.show(results.at(-1));
      }
      if (times > 1) this.sum(results);
      status.setAttribute("aria-busy", "false");
    });
  }

  async ask() {
    const options = { headers: { Accept: "application/json", ...this.authorization } };
    if (this.find("[name=password]")) {
      options.method = "POST";
      options.headers["X-CSRFToken"] = csrf;
      options.body = new URLSearchParams(new FormData(this.form));
    }
    const response = await fetch(this.element.dataset.url, options);
    return read(response, await response.json());
  }

  reset() {
    return this.then(async () => {
      const headers = { "X-CSRFToken": csrf, ...this.authorization };
      const response = await fetch(this.element.dataset.reset, { method: "POST", headers });
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      this.clear("Reset. The counters start anew.");
    });
  }

  switchRedis(button) {
    return this.then(async () => {
      const response = await fetch(button.dataset.url, { method: "POST", headers: { "X-CSRFToken": csrf } });
      if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
      const { running } = await response.json();
      this.say("", running ? "Redis was started again, empty." : "Redis was stopped. Press on.");
    });
  }

  // --- What is seen ---

  show(result) {
    this.say(result.kind, result.word, `${result.status} ${result.reason}`, result.said, result.heard);
    this.remember(result);
    this.showHeaders(result.headers);
    this.showMeters(result.figures, result.violated);
    this.retryAt = result.retryAfter ? performance.now() + result.retryAfter * 1000 : null;
    this.tick();
    keepLooking();
  }

  say(kind, word, status = "", said = "", heard = "") {
    this.element.dataset.kind = kind;
    for (const [part, text] of Object.entries({ word, status, said, heard, sum: "" })) {
      this.find(`.${part}`).textContent = text;
    }
  }

  sum(results) {
    const count = (kind) => results.filter((result) => result.kind === kind).length;
    const parts = [`${count("allowed")} allowed`, `${count("refused")} refused`, `${count("over")} over the limit`];
    const told = parts.filter((part, i) => i === 0 || !part.startsWith("0"));
    this.find(".sum").textContent = `Of ${results.length}: ${told.join(", ")}.`;
  }

  remember({ kind }) {
    const history = this.find(".history");
    const mark = document.createElement("li");
    mark.className = kind;
    mark.textContent = { allowed: "✓", refused: "✕", over: "!" }[kind];
    history.append(mark);
    while (history.children.length > HISTORY) history.firstElementChild.remove();
  }

  showHeaders(headers) {
    const told = headers.length ? headers : [["No RateLimit headers came back.", ""]];
    this.find(".headers").replaceChildren(...told.flatMap(([name, value]) => {
      const term = document.createElement("dt");
      const definition = document.createElement("dd");
      term.textContent = name;
      // A list breaks after its commas, a long name where it must.
      if (value) definition.append(...value.split(/(?<=, )/).flatMap((part) => [part, document.createElement("wbr")]));
      return [term, definition];
    }));
  }

  showMeters(figures, violated = []) {
    const meters = this.find(".meters");
    const known = new Map(Array.from(meters.children, (meter) => [meter.dataset.policy, meter]));
    meters.replaceChildren(...figures.map((figure) => {
      const meter = known.get(figure.policy) ?? newMeter(figure.policy);
      fill(meter, figure, violated.includes(figure.policy));
      return meter;
    }));
  }

  tick() {
    const wait = this.find(".wait");
    if (this.retryAt === null) {
      wait.textContent = "";
      return;
    }
    const seconds = Math.ceil((this.retryAt - performance.now()) / 1000);
    const next = this.element.dataset.kind === "refused" ? "Retry in" : "Within the limit again in";
    wait.textContent = seconds > 0 ? `${next} ${seconds} s` : "Now there is room again.";
  }

  clear(word) {
    this.say("", word);
    this.retryAt = null;
    this.tick();
    for (const part of [".history", ".headers"]) this.find(part).replaceChildren();
    for (const meter of this.element.querySelectorAll(".meter")) {
      fill(meter, { limit: meter.querySelector("progress").max, count: 0, reset_after: 0 }, false);
    }
  }

  fail(error) {
    this.say("refused", "No answer", "", `${error.message}. Is the demo still running?`);
    this.find("[role=status]").setAttribute("aria-busy", "false");
  }
}

function newMeter(policy) {
  const meter = document.getElementById("meter").content.firstElementChild.cloneNode(true);
  meter.dataset.policy = policy;
  meter.querySelector(".policy").textContent = policy.replace("example_project.views.", "");
  meter.querySelector("progress").setAttribute("aria-label", `Used of ${policy}`);
  return meter;
}

function fill(meter, { limit, count, reset_after: reset }, violated) {
  const bar = meter.querySelector("progress");
  bar.max = limit;
  bar.value = count;
  meter.querySelector(".count").textContent = `${count} / ${limit}`;
  meter.querySelector(".whole").textContent = count ? `whole again in ${Math.ceil(reset)} s` : "unused";
  meter.classList.toggle("full", count >= limit);
  meter.classList.toggle("violated", violated);
}

// --- Time goes by ---------------------------------------------------------------------------------------------------

const panels = Array.from(document.querySelectorAll(".panel:has(form)"), (element) => new Panel(element));
let looking = null;

// A look costs nothing: the server peeks. It goes on while something is counted.
async function look() {
  const asked = new Map(panels.map((panel) => [panel, panel.asked]));
  const headers = Object.assign({}, ...panels.map((panel) => panel.authorization));
  const response = await fetch(document.body.dataset.counters, { headers }).catch(() => null);
  if (!response?.ok) return;
  const counters = await response.json();
  for (const panel of panels) {
    const overtaken = panel.busy || panel.asked !== asked.get(panel);
    if (!overtaken && counters[panel.name]) panel.showMeters(counters[panel.name]);
  }
  const counted = Object.values(counters).flat().some(({ count }) => count > 0);
  if (counted) keepLooking();
  else stopLooking();
}

function keepLooking() {
  looking ??= setInterval(() => { if (!document.hidden) look(); }, 1000);
}

function stopLooking() {
  clearInterval(looking);
  looking = null;
}

setInterval(() => panels.forEach((panel) => panel.tick()), 250);
look();

// --- Another user: the page stays as it is, and shows the counters of that user --------------------------------------

const people = document.querySelector(".people");
people.addEventListener("submit", async (event) => {
  event.preventDefault();
  const body = new URLSearchParams({ username: event.submitter.value });
  const headers = { Accept: "application/json", "X-CSRFToken": csrf };
  const response = await fetch(people.action, { method: "POST", headers, body }).catch(() => null);
  if (!response?.ok) return people.submit(); // the page is loaded anew
  const user = await response.json();
  csrf = user.csrf;
  people.querySelector("[name=csrfmiddlewaretoken]").value = csrf;
  for (const button of people.querySelectorAll("[name=username]")) {
    button.setAttribute("aria-pressed", String(button.value === user.username));
  }
  people.querySelector(".hint")?.remove();
  look();
});

// --- A command to copy ------------------------------------------------------------------------------------------------

for (const code of document.querySelectorAll("[data-curl]")) {
  code.textContent = code.dataset.curl.replace("{host}", location.origin);
  code.closest(".live").querySelector(".copy").addEventListener("click", async ({ target }) => {
    await navigator.clipboard?.writeText(code.textContent).catch(() => {});
    getSelection().selectAllChildren(code); // where there is no clipboard, it can be copied by hand
    target.textContent = "Copied";
  });
}

// --- A card with several panels shows one ---------------------------------------------------------------------------

for (const choice of document.querySelectorAll(".choice")) {
  choice.addEventListener("change", ({ target }) => {
    for (const panel of choice.parentElement.querySelectorAll(".panel")) {
      panel.hidden = panel.dataset.panel !== target.value;
    }
  });
  choice.querySelector(":checked").dispatchEvent(new Event("change", { bubbles: true })); // a reload keeps the choice
}
