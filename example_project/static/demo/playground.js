// The algorithms side by side. The page makes the requests of a run; the server decides them with the real scripts.
"use strict";

const root = document.querySelector(".playground");
const START = Number(root.dataset.start);
const LANES = {
  "fixed-window-algo": "Fixed window",
  "sliding-window-algo": "Sliding window",
  "sliding-window-compact-algo": "Sliding window, compact",
  "sliding-window-counter-algo": "Sliding window counter",
  "token-bucket-algo": "Token bucket",
};
const DEFAULTS = { pattern: "boundary", limit: 5, window: 10, burst: 8, cost: 1 };
const FIELDS = ["limit", "window", "burst", "cost"];
const HEIGHT = 120;
const FLOOR = 96; // where the bars stand; the time is written below

const find = (selector) => root.querySelector(selector);
const field = (name) => find(`[name=${name}]`);
const seconds = (ms, digits = 1) => `${(ms / 1000).toFixed(digits)} s`;

// --- The run --------------------------------------------------------------------------------------------------------

// The times of a pattern's requests, in ms from the beginning. Its settings are those of the first step.
const PATTERNS = {
  steady: ({ limit, window }) => every((window * 1000) / limit, 2.4 * window * 1000, (window * 500) / limit),
  boundary: ({ limit, window, cost }) => {
    const units = Math.max(1, Math.floor(limit / cost));
    const around = window * 1000;
    return [...burst(units, around - 60 * units, 50), ...burst(units, around + 40, 50), around + 0.5 * around, 2.1 * around];
  },
  attack: ({ window }) => every(150, Math.min(2.2 * window * 1000, 45_000), 500),
  retrying: ({ limit, burst: most, cost }) => burst(Math.floor(Math.max(limit, most) / cost) + 2, 1000, 150),
  own: () => [],
};
const every = (gap, end, first) => Array.from({ length: Math.min(300, Math.floor((end - first) / gap)) }, (_, i) => first + i * gap);
const burst = (count, from, gap) => Array.from({ length: count }, (_, i) => Math.max(0, from) + i * gap);

const run = { pattern: "boundary", steps: [], requests: [], now: 0 };
let decided = {}; // by algorithm
let width = 1000; // of the charts, in px
let version = 0;

const firstStep = () => Object.fromEntries(FIELDS.map((name, i) => [name, run.steps[0][i + 1]]));
const windowAt = (at) => run.steps.findLast((step) => step[0] <= at)[2] * 1000;
const duration = () => Math.max(2.5 * Math.max(...run.steps.map((step) => step[2])) * 1000, ...run.requests.map((at) => at + 2000));

function begin(pattern, settings) {
  run.pattern = pattern;
  run.steps = [[0, ...FIELDS.map((name) => settings[name])]];
  run.requests = PATTERNS[pattern](settings).map(Math.round).slice(0, 300);
  run.now = 0;
}

function send() {
  if (run.requests.length >= 300) return say("A run has at most 300 requests.", true);
  run.pattern = "own";
  field("pattern").value = "own";
  run.requests = [...run.requests, Math.round(run.now)].sort((a, b) => a - b);
  return decide();
}

// A change of the settings applies from the present on, as it would on a site; at the beginning it makes a new run.
function change() {
  if (!find(".controls").reportValidity()) return;
  const settings = Object.fromEntries(FIELDS.map((name) => [name, Number(field(name).value)]));
  if (run.now === 0) begin(run.pattern, settings);
  else {
    const step = [Math.round(run.now), ...FIELDS.map((name) => settings[name])];
    run.steps = [...run.steps.filter(([at]) => at < step[0]), step].slice(0, 50);
  }
  decide();
}

async function decide() {
  version += 1;
  const mine = version;
  const found = await decisions().catch((error) => ({ error: error.message }));
  if (mine !== version) return; // a later change is on its way
  if (found.error) return say(found.error, true);
  decided = found;
  remember();
  draw();
  say(summary());
}

async function decisions() {
  if (window.RECORDED) {
    return window.RECORDED[run.pattern] ?? { error: "This page shows recorded runs. To send requests of your own: make run." };
  }
  const token = document.cookie.match(/csrftoken=(\w+)/)?.[1] ?? "";
  const body = JSON.stringify({ steps: run.steps, requests: run.requests, retries: run.pattern === "retrying" });
  const headers = { "Content-Type": "application/json", "X-CSRFToken": token };
  const response = await fetch(root.dataset.decide, { method: "POST", headers, body });
  return response.json();
}

function say(text, isError = false) {
  const message = find(".message");
  message.textContent = text;
  message.classList.toggle("error", isError);
}

function summary() {
  const [fixed, sliding] = ["fixed-window-algo", "sliding-window-algo"].map((algo) => fullest(decided[algo]));
  if (!sliding) return "No request yet. Press “Send a request”, or choose a pattern.";
  const { window: size } = firstStep();
  return `Most units admitted in any ${size} s: fixed window ${fixed.units}, sliding window ${sliding.units}.`;
}

// --- What is seen ---------------------------------------------------------------------------------------------------

// The window in which the most units were admitted.
function fullest(requests, until = Infinity) {
  const admitted = requests.filter(({ allowed, at }) => allowed && at <= until);
  let best = null;
  for (const [i, last] of admitted.entries()) {
    const size = windowAt(last.at);
    const units = admitted.slice(0, i + 1).filter(({ at }) => at > last.at - size).reduce((sum, { at }) => sum + costAt(at), 0);
    if (!best || units > best.units) best = { units, from: last.at - size, to: last.at, limit: last.limit };
  }
  return best;
}

const costAt = (at) => run.steps.findLast((step) => step[0] <= at)[4];
const x = (at) => (at / duration()) * width;

function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text) element.textContent = text;
  return element;
}

function draw() {
  field("time").max = duration();
  width = find(".lane svg").clientWidth || width;
  for (const lane of root.querySelectorAll(".lane")) drawLane(lane, decided[lane.dataset.algo] ?? []);
  drawTable();
  drawTime();
}

function drawLane(lane, requests) {
  const chart = lane.querySelector("svg");
  const top = Math.max(1, ...requests.map(({ count, limit }) => Math.max(count, limit))) * 1.15;
  const y = (units) => FLOOR - (units / top) * (FLOOR - 8);
  chart.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const parts = [...boundaries(), svg("line", { class: "axis", x1: 0, x2: width, y1: FLOOR, y2: FLOOR })];
  for (const [i, [at, limit, , burstSize]] of run.steps.entries()) {
    const height = y(lane.dataset.algo === "token-bucket-algo" && burstSize ? burstSize : limit);
    parts.push(svg("line", { class: "limit", x1: x(at), x2: x(run.steps[i + 1]?.[0] ?? duration()), y1: height, y2: height }));
  }
  const best = fullest(requests);
  if (best && best.units > best.limit) {
    parts.push(svg("rect", { class: "band", x: x(Math.max(0, best.from)), y: 0, width: x(best.to) - x(Math.max(0, best.from)), height: FLOOR, "data-at": best.to }));
  }
  for (const { at, allowed, count, wait, retry } of requests) {
    const left = x(at);
    if (allowed) parts.push(svg("rect", { class: "bar", x: left - 2.5, y: y(count), width: 5, height: FLOOR - y(count), "data-at": at }));
    else {
      parts.push(svg("path", { class: "refused-mark", d: `M${left - 4} ${y(count) - 4}l8 8m0 -8l-8 8`, "data-at": at }));
      if (wait > 0) parts.push(svg("line", { class: "wait", x1: left, x2: x(at + wait), y1: y(count), y2: y(count), "data-at": at }));
    }
    if (retry) parts.push(svg("circle", { class: "again", cx: left, cy: y(count), r: 6, "data-at": at }));
  }
  parts.push(svg("line", { class: "playhead", y1: 0, y2: FLOOR }));
  chart.replaceChildren(...parts);
}

// Where fixed windows begin.
function boundaries() {
  const size = firstStep().window * 1000;
  const parts = [];
  for (let at = (size - (START % size)) % size; at <= duration(); at += size) {
    parts.push(svg("line", { class: "boundary", x1: x(at), x2: x(at), y1: 0, y2: FLOOR }));
    parts.push(svg("text", { class: "tick", x: x(at) + 3, y: HEIGHT - 8 }, seconds(at, 0)));
  }
  return parts;
}

// Only what has happened by the present is shown.
function drawTime() {
  field("time").value = run.now;
  find("output").textContent = seconds(run.now);
  for (const lane of root.querySelectorAll(".lane")) {
    for (const part of lane.querySelectorAll("[data-at]")) {
      part.setAttribute("visibility", Number(part.dataset.at) > run.now ? "hidden" : "visible");
    }
    const head = lane.querySelector(".playhead");
    head?.setAttribute("x1", x(run.now));
    head?.setAttribute("x2", x(run.now));
    drawFigures(lane, (decided[lane.dataset.algo] ?? []).filter(({ at }) => at <= run.now));
  }
}

function drawFigures(lane, requests) {
  const admitted = requests.filter(({ allowed }) => allowed).length;
  const last = requests.at(-1);
  const best = fullest(requests);
  const left = last && !last.allowed ? last.at + last.wait - run.now : 0;
  const figures = {
    admitted,
    refused: requests.length - admitted,
    count: last ? `${last.count} / ${last.limit}` : "–",
    wait: last?.wait === -1 ? "never" : left > 0 ? seconds(left, 2) : "–",
    most: best ? best.units : 0,
    memory: last ? `${last.memory} B` : "–",
  };
  for (const [name, text] of Object.entries(figures)) lane.querySelector(`[data-figure=${name}]`).textContent = text;
  lane.querySelector("[data-figure=most]").classList.toggle("over", Boolean(best) && best.units > best.limit);
  const label = `${LANES[lane.dataset.algo]}: ${admitted} admitted, ${figures.refused} refused, at most ${figures.most} in one window`;
  lane.querySelector("svg").setAttribute("aria-label", label);
}

function drawTable() {
  const row = (cell, texts) => {
    const line = document.createElement("tr");
    line.append(...texts.map((text) => Object.assign(document.createElement(cell), { textContent: text })));
    return line;
  };
  find("thead").replaceChildren(row("th", ["Algorithm", "Time", "Decision", "Count", "Wait", "Memory"]));
  const lines = Object.entries(decided).flatMap(([algo, requests]) => requests.map((each) => [
    LANES[algo], seconds(each.at, 2), `${each.allowed ? "admitted" : "refused"}${each.retry ? " (sent again)" : ""}`,
    `${each.count} / ${each.limit}`, each.allowed ? "" : each.wait === -1 ? "never" : seconds(each.wait, 3), `${each.memory} B`,
  ]));
  find("tbody").replaceChildren(...lines.map((line) => row("td", line)));
}

// --- Time -----------------------------------------------------------------------------------------------------------

let playing = null;

function go(at) {
  run.now = Math.min(Math.max(0, at), duration());
  remember();
  drawTime();
}

function play() {
  if (playing) return pause();
  if (run.now >= duration()) run.now = 0;
  let before = performance.now();
  const tick = (now) => {
    run.now = Math.min(duration(), run.now + (now - before) * Number(field("speed").value));
    before = now;
    drawTime();
    if (run.now >= duration() && run.pattern !== "own") pause();
    else playing = requestAnimationFrame(tick);
  };
  playing = requestAnimationFrame(tick);
  showPlaying();
}

function pause() {
  cancelAnimationFrame(playing);
  playing = null;
  remember();
  showPlaying();
}

function showPlaying() {
  const button = find("[data-action=play]");
  button.setAttribute("aria-pressed", String(Boolean(playing)));
  button.textContent = playing ? "Pause" : "Play";
}

// --- The link -------------------------------------------------------------------------------------------------------

// A whole run in the fragment of the URL; requests as gaps, so that 300 of them fit.
function remember() {
  const parameters = new URLSearchParams({ p: run.pattern, s: run.steps.map((step) => step.join(".")).join("_"), t: Math.round(run.now) });
  if (run.pattern === "own") parameters.set("r", run.requests.map((at, i) => (at - (run.requests[i - 1] ?? 0)).toString(36)).join("."));
  if (!window.RECORDED) history.replaceState(null, "", `#${parameters}`);
}

function recall() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const steps = (parameters.get("s") ?? "").split("_").map((step) => step.split(".").map(Number));
  const isStep = (step) => step.length === 5 && step.every(Number.isInteger) && Math.min(step[1], step[2], step[4]) > 0;
  const valid = steps.every(isStep) && steps[0][0] === 0;
  const pattern = Object.hasOwn(PATTERNS, parameters.get("p")) ? parameters.get("p") : DEFAULTS.pattern;
  const settings = valid ? Object.fromEntries(FIELDS.map((name, i) => [name, steps[0][i + 1]])) : DEFAULTS;
  begin(pattern, settings);
  if (valid) run.steps = steps.slice(0, 50);
  if (pattern === "own") {
    let at = 0;
    run.requests = (parameters.get("r") ?? "").split(".").filter(Boolean).slice(0, 300).map((gap) => (at += parseInt(gap, 36) || 0));
  }
  run.now = valid ? Number(parameters.get("t")) || 0 : duration();
  for (const [name, value] of Object.entries({ pattern, ...settings })) field(name).value = value;
}

// --- Controls -------------------------------------------------------------------------------------------------------

const ACTIONS = {
  play,
  send,
  back: () => go(Math.ceil(run.now / 1000 - 1) * 1000),
  forward: () => go(Math.floor(run.now / 1000 + 1) * 1000),
  restart: () => { pause(); begin(run.pattern, firstStep()); decide(); },
  share: async () => {
    remember();
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    say("The address of this page is the link to this run.");
  },
};
const KEYS = { s: "send", p: "play", ArrowLeft: "back", ArrowRight: "forward" };

function newLane([algo, name]) {
  const lane = document.createElement("section");
  lane.className = "lane";
  lane.dataset.algo = algo;
  const head = document.createElement("header");
  head.append(Object.assign(document.createElement("h2"), { textContent: name }));
  const list = document.createElement("dl");
  for (const [figure, label] of Object.entries({ admitted: "Admitted", refused: "Refused", count: "Count", wait: "Wait", most: "Most in a window", memory: "Memory" })) {
    const pair = document.createElement("div");
    const value = document.createElement("dd");
    value.dataset.figure = figure;
    pair.append(Object.assign(document.createElement("dt"), { textContent: label }), value);
    list.append(pair);
  }
  head.append(list);
  lane.append(head, svg("svg", { role: "img" }));
  return lane;
}

find(".lanes").append(...Object.entries(LANES).map(newLane));
for (const button of root.querySelectorAll("[data-action]")) {
  button.addEventListener("click", () => ACTIONS[button.dataset.action]());
}
document.addEventListener("keydown", (event) => {
  const busy = event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey;
  if (busy || window.RECORDED || !(event.key in KEYS)) return; // elsewhere these keys have another meaning
  event.preventDefault();
  ACTIONS[KEYS[event.key]]();
});
find(".controls").addEventListener("submit", (event) => event.preventDefault());
field("pattern").addEventListener("change", () => { pause(); begin(field("pattern").value, firstStep()); run.now = run.pattern === "own" ? 0 : duration(); decide(); });
for (const name of FIELDS) field(name).addEventListener("change", change);
field("time").addEventListener("input", () => go(Number(field("time").value)));
addEventListener("resize", draw);
addEventListener("hashchange", () => { recall(); decide(); });
recall();
decide();
