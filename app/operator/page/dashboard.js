// The dashboard: live pictures from the server to the page, once a second.
// Owns the connection and every element but the playground's. All text goes in as text, never as HTML.

import { ask, events, key, Refused } from "/dashboard/server.js";
import { drawArea, drawCells, drawDots, drawPhases, shape } from "/dashboard/charts.js";
import { startPlayground } from "/dashboard/playground.js";

const RETRY_MS = 1500;
const SILENT_MS = 8000;
const MAX_CELLS = 160;
const MAX_SLOTS = 64;
const TIMELINE_EVERY_MS = 1500;

const $ = (id) => document.getElementById(id);
let picture = null;

// -- words and figures

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const rough = (value) => (value >= 10 || value === 0 ? whole.format(value) : value.toFixed(1));

export function duration(ms) {
  if (ms < 0) return "0 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 10_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 120_000) return `${Math.round(ms / 1000)} s`;
  if (ms < 7_200_000) return `${Math.round(ms / 60_000)} min`;
  if (ms < 172_800_000) return `${Math.round(ms / 3_600_000)} h`;
  return `${Math.round(ms / 86_400_000)} days`;
}

const shortTick = (ms) => (ms >= 1000 ? `${+(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`);
const shortCount = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toFixed(1)}`);
const shortId = (id) => {
  const rest = id.replace(/^(chatcmpl|cmpl)-/, "");
  const choice = rest.match(/\.\d+$/)?.[0] ?? "";
  return rest.slice(0, 8) + (rest.length > 8 + choice.length ? choice : rest.slice(8));
};

function element(name, options = {}, ...children) {
  const node = document.createElement(name);
  const { text, ...rest } = options;
  for (const [attribute, value] of Object.entries(rest)) node.setAttribute(attribute, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Keeps one child for each item, by its key: what has the focus keeps it. */
function reconcile(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = parent.firstElementChild;
  for (const item of items) {
    const name = keyOf(item);
    let child = known.get(name);
    if (child) {
      known.delete(name);
    } else {
      child = make(item);
      child.dataset.key = name;
    }
    update(child, item);
    if (child === before) {
      before = before.nextElementSibling;
    } else {
      parent.insertBefore(child, before);
    }
  }
  for (const child of known.values()) child.remove();
}

export function say(text) {
  setText($("news"), text);
}

// -- the picture

function show(next) {
  if (next.error) {
    setStatus("away", next.error === "queue_unreachable" ? "Redis cannot be reached" : "The server has an error");
    document.body.classList.add("stale");
    return;
  }
  document.body.classList.remove("stale", "blank");
  tellChanges(picture, next);
  picture = next;
  const live = next.workers.filter((worker) => worker.is_live);
  setStatus(live.length ? "live" : "idle", live.length ? "Live" : "Live, without a worker");
  showFigures(next);
  showPlots();
  showWorkers(next, live.length);
  showQueues(next);
  showRequests(next);
  showEnded(next);
  showLately(next);
}

function setStatus(state, text) {
  $("status").dataset.state = state;
  setText($("status-text"), text);
}

function tellChanges(before, now) {
  if (!before) return;
  const names = (one) => one.workers.filter((worker) => worker.is_live).map((worker) => worker.worker);
  const [old, current] = [names(before), names(now)];
  const lost = old.filter((name) => !current.includes(name));
  const joined = current.filter((name) => !old.includes(name));
  const failures = (one) => one.lately.filter((item) => item.kind === "failed").map((item) => item.request_id);
  const known = new Set(failures(before));
  const failed = failures(now).filter((id) => !known.has(id));
  const parts = [];
  if (lost.length) parts.push(`${lost.length === 1 ? "A worker is" : `${lost.length} workers are`} gone`);
  if (joined.length) parts.push(`${joined.length === 1 ? "A worker" : `${joined.length} workers`} joined`);
  if (failed.length) parts.push(`${failed.length === 1 ? "A request" : `${failed.length} requests`} failed`);
  if (parts.length) say(`${parts.join(", ")}. ${current.length} live.`);
}

const numWaiting = (one) => one.queues.reduce((sum, queue) => sum + queue.num_waiting, 0);

function showFigures(now) {
  const last = now.tokens.slice(-3);
  const rate = last.reduce((sum, value) => sum + value, 0) / Math.max(1, last.length);
  setText($("figure-rate"), rough(rate));
  setText($("figure-running"), whole.format(now.num_running));
  setText($("figure-waiting"), whole.format(numWaiting(now)));
  setText($("figure-first"), now.first_token_median_ms === null ? "–" : duration(now.first_token_median_ms));
  const { finished, cancelled, failed } = now.num_ended;
  setText($("figure-ended"), whole.format(finished + cancelled + failed));
  const parts = [];
  if (failed) parts.push(`${failed} failed`);
  if (cancelled) parts.push(`${cancelled} cancelled`);
  if (parts.length) $("figure-ended").append(element("small", { class: failed ? "bad" : "dim", text: parts.join(", ") }));
}

function showPlots() {
  if (!picture) return;
  const { tokens, first_tokens: dots, at_ms: now, window_s: windowS } = picture;
  drawArea($("plot-rate"), tokens, shortCount);
  drawDots($("plot-first"), dots, now, windowS, shortTick);
  $("plot-rate").setAttribute("aria-label", `Token rate of the last ${windowS / 60} minutes: at most ${rough(Math.max(...tokens))} tokens a second`);
  const worst = Math.max(0, ...dots.map(([, value]) => value));
  $("plot-first").setAttribute("aria-label", dots.length ? `Times to the first token of ${dots.length} requests: at most ${duration(worst)}` : "No request had a first token in this time");
}

function showWorkers(now, numLive) {
  setText($("num-workers"), now.workers.length ? `${numLive} live` : "");
  $("no-workers").hidden = now.workers.length > 0 || now.num_strange_workers > 0;
  const strange = now.num_strange_workers;
  $("strange-workers").hidden = !strange;
  setText($("strange-workers"), strange ? `${strange} more of another version, which this one cannot describe.` : "");
  $("crashes").hidden = !now.crashes.length;
  setText($("crashes"), now.crashes.slice(0, 3).join(" · "));
  reconcile($("workers"), now.workers, (worker) => worker.worker, makeWorker, (node, worker) => updateWorker(node, worker, now.at_ms));
}

function makeWorker() {
  const part = (name, attributes = {}) => element(name, attributes);
  const card = element("article", { class: "card worker" });
  card.append(
    element("header", {}, part("h3", { class: "mono" }), part("p", { class: "pill" })),
    part("p", { class: "dim what" }),
    element("div", { class: "gauge" }, element("span", { text: "Slots" }), shape("svg", { class: "cells slots", "aria-hidden": "true" }), part("span", { class: "dim" })),
    element("div", { class: "gauge" }, element("span", { text: "KV blocks" }), shape("svg", { class: "cells blocks", "aria-hidden": "true" }), part("span", { class: "dim" })),
    part("p", { class: "dim small" }),
  );
  return card;
}

function updateWorker(card, worker, nowMs) {
  const stepAge = nowMs - worker.last_step_ms;
  const isBusy = worker.num_running + worker.num_waiting > 0;
  const state = !worker.is_live ? "lost" : isBusy ? (stepAge > 3000 ? "slow" : "busy") : "idle";
  card.dataset.state = state;
  const [title, pill] = [card.querySelector("h3"), card.querySelector(".pill")];
  setText(title, worker.worker);
  title.title = worker.worker;
  setText(pill, { lost: "lost", slow: "in a long step", busy: "busy", idle: "idle" }[state]);
  pill.dataset.state = state;
  setText(card.querySelector(".what"), `${worker.model} · ${worker.variant} on ${worker.device}`);
  const [slots, blocks] = card.querySelectorAll(".gauge");
  const numShown = Math.min(worker.max_num_seqs, MAX_SLOTS);
  const used = Math.min(numShown, Math.ceil((worker.num_running / Math.max(1, worker.max_num_seqs)) * numShown));
  drawCells(slots.children[1], used, numShown, Math.min(numShown, 32), 8);
  const inside = worker.num_waiting ? `, ${worker.num_waiting} more inside` : "";
  setText(slots.children[2], `${worker.num_running} of ${worker.max_num_seqs}${inside}`);
  const cells = Math.min(worker.num_blocks, MAX_CELLS);
  const usedBlocks = worker.num_blocks - worker.num_free_blocks;
  drawCells(blocks.children[1], Math.ceil((usedBlocks / Math.max(1, worker.num_blocks)) * cells), cells, Math.min(cells, 40) || 1, 6);
  setText(blocks.children[2], `${whole.format(usedBlocks)} of ${whole.format(worker.num_blocks)}`);
  const step = isBusy || !worker.is_live ? `last step ${duration(stepAge)} ago` : "waiting for work";
  setText(card.querySelector(".small"), `${step} · up ${duration(nowMs - worker.started_ms)} · ${worker.host}, process ${worker.pid}`);
}

function showQueues(now) {
  const several = new Set(now.queues.map((queue) => queue.model)).size > 1;
  reconcile(
    $("queues"),
    now.queues,
    (queue) => `${queue.model} ${queue.priority}`,
    () => element("li", {}, element("span", { class: "name" }), element("strong"), element("span", { class: "dim" })),
    (node, queue) => {
      const age = now.at_ms - queue.oldest_ms;
      node.dataset.state = queue.num_waiting === 0 ? "empty" : age > 5000 ? "late" : "some";
      setText(node.children[0], several ? `${queue.model} · ${queue.priority}` : queue.priority);
      setText(node.children[1], whole.format(queue.num_waiting));
      setText(node.children[2], queue.num_waiting ? `the oldest for ${duration(age)}` : "nobody waits");
    },
  );
}

const STATES = { offered: "waiting", claimed: "reading", streaming: "answering" };

function requestButton(id) {
  const button = element("button", { type: "button", class: "link mono", text: shortId(id), title: id, "aria-label": `Timeline of request ${id}` });
  button.addEventListener("click", () => openTimeline(id));
  return button;
}

function row(id, classes) {
  const cells = classes.map((name) => element("td", name ? { class: name } : {}));
  cells[0] = element("th", { scope: "row" }, requestButton(id));
  return element("tr", {}, ...cells);
}

function showRequests(now) {
  const { requests } = now;
  const total = now.num_running + numWaiting(now);
  setText($("num-requests"), total > requests.length ? `${requests.length} of ${whole.format(total)}` : total ? whole.format(total) : "");
  $("no-requests").hidden = requests.length > 0;
  $("live-requests").hidden = !requests.length;
  reconcile(
    $("live-requests").tBodies[0],
    requests,
    (request) => request.request_id,
    (request) => {
      const node = row(request.request_id, ["", "", "wide mono", "progress-cell", "wide number", "number"]);
      node.children[1].append(element("span", { class: "pill" }));
      node.children[3].append(element("progress", { "aria-label": "Tokens of the longest answer" }), element("span", { class: "dim" }));
      return node;
    },
    (node, request) => {
      const again = request.attempt > 1 ? `, ${request.attempt}${request.attempt === 2 ? "nd" : request.attempt === 3 ? "rd" : "th"} attempt` : "";
      const pill = node.children[1].firstChild;
      pill.dataset.state = STATES[request.state];
      setText(pill, (STATES[request.state] ?? request.state) + again);
      setText(node.children[2], request.worker || "–");
      const [bar, count] = node.children[3].children;
      bar.hidden = request.max_tokens === null;
      bar.max = request.max_tokens ?? 1;
      bar.value = request.num_tokens;
      setText(count, request.max_tokens === null ? whole.format(request.num_tokens) : `${whole.format(request.num_tokens)} of ${whole.format(request.max_tokens)}`);
      setText(node.children[4], request.state === "streaming" ? rough(request.tokens_per_s) : "–");
      setText(node.children[5], duration(now.at_ms - request.submitted_ms));
    },
  );
}

function showEnded(now) {
  $("no-ended").hidden = now.ended.length > 0;
  $("ended-requests").hidden = !now.ended.length;
  reconcile(
    $("ended-requests").tBodies[0],
    now.ended,
    (one) => one.request_id,
    (one) => {
      const node = row(one.request_id, ["", "", "wide mono", "number", "wide number", "number"]);
      const isDefault = one.state === "finished";
      node.children[1].append(element("span", { class: "pill", "data-state": one.state, text: isDefault ? one.reason : `${one.state}: ${one.reason}` }));
      node.children[2].textContent = one.worker || "–";
      node.children[3].textContent = whole.format(one.num_tokens);
      node.children[4].textContent = one.first_token_ms && one.submitted_ms ? duration(one.first_token_ms - one.submitted_ms) : "–";
      node.children[5].textContent = one.submitted_ms ? duration(one.at_ms - one.submitted_ms) : "–";
      return node;
    },
    () => {},
  );
}

const after = (count) => (count ? ` after ${whole.format(count)} tokens` : "");
const WORDS = {
  failed: (one) => ` failed: ${one.reason}${one.message ? ` (${one.message})` : ""}`,
  lost: (one) => ` lost its worker ${one.worker}${after(one.num_tokens)}: another one goes on`,
  released: (one) => ` was given back by ${one.worker}${after(one.num_tokens)} (${one.reason}): another one goes on`,
  worker_joined: (one) => `Worker ${one.worker} joined`,
  worker_left: (one) => `Worker ${one.worker} left`,
};

function showLately(now) {
  $("no-lately").hidden = now.lately.length > 0;
  $("lately").hidden = !now.lately.length;
  reconcile(
    $("lately"),
    now.lately,
    (one) => `${one.kind} ${one.at_ms} ${one.request_id} ${one.worker}`,
    (one) => {
      const text = element("span");
      if (one.request_id) text.append("Request ", requestButton(one.request_id));
      text.append(WORDS[one.kind](one));
      return element("li", { "data-kind": one.kind }, element("span", { class: "lamp", "aria-hidden": "true" }), text, element("time", { class: "dim" }));
    },
    (node, one) => setText(node.lastChild, `${duration(now.at_ms - one.at_ms)} ago`),
  );
}

// -- the timeline of one request

let openId = null;
let timelineTimer = 0;

export async function openTimeline(id) {
  openId = id;
  $("timeline-id").textContent = id;
  $("timeline-note").hidden = true;
  for (const part of ["timeline-facts", "timeline-list", "timeline-bar"]) $(part).replaceChildren();
  if (!$("timeline").open) $("timeline").showModal();
  await readTimeline(id);
}

async function readTimeline(id) {
  clearTimeout(timelineTimer);
  let life = null;
  try {
    life = await (await ask(`/dashboard/requests/${encodeURIComponent(id)}`)).json();
  } catch (error) {
    if (openId === id) note(error instanceof Refused ? error.message : "The server cannot be reached.");
  }
  if (openId !== id) return;
  if (life) showTimeline(life);
  const isOver = life === null || life.facts.some((fact) => fact.kind === "ended");
  if (!isOver) timelineTimer = setTimeout(readTimeline, TIMELINE_EVERY_MS, id);
}

function note(text) {
  $("timeline-note").hidden = !text;
  setText($("timeline-note"), text);
}

function showTimeline({ facts, record, is_complete: isComplete }) {
  const missing = [];
  if (!isComplete) missing.push("The beginning is older than the facts that are still in Redis. The catalog has it: tokenferry request ID.");
  if (!record) missing.push("Its record is gone: answers are kept for some minutes after their end.");
  note(missing.join(" "));
  showSummary(facts, record);
  const phases = phasesOf(facts);
  if (phases.length) {
    drawPhases($("timeline-bar"), phases);
    $("timeline-bar").setAttribute("aria-label", phases.map((one) => `${one.words} ${duration(one.to - one.from)}`).join(", "));
  }
  const start = facts[0]?.at_ms ?? 0;
  $("timeline-list").replaceChildren(
    ...facts.map((fact) =>
      element("li", { "data-kind": fact.kind }, element("span", { class: "mono dim", text: `+${duration(fact.at_ms - start)}` }), element("span", { text: sentence(fact) })),
    ),
  );
}

function showSummary(facts, record) {
  const find = (kind) => facts.find((fact) => fact.kind === kind);
  const [submitted, claimed, first, ended] = ["submitted", "claimed", "first_token", "ended"].map(find);
  const pairs = [];
  const add = (name, value) => value !== undefined && value !== "" && pairs.push([name, value]);
  add("State", ended ? `${ended.state} (${ended.reason})` : record ? STATES[record.state] ?? record.state : "");
  add("Model", record?.model ?? facts[0]?.model);
  add("Worker", ended?.worker || record?.worker || undefined);
  add("Prompt", submitted && `${whole.format(submitted.details.prompt_tokens ?? 0)} tokens`);
  add("Cached", (first || record) && `${whole.format(first?.details.cached ?? record?.num_cached_tokens ?? 0)} tokens`);
  add("Answer", `${whole.format(ended?.details.next_index ?? record?.next_index ?? 0)} tokens`);
  add("Waited", submitted && claimed && duration(claimed.at_ms - submitted.at_ms));
  add("First token", submitted && first && duration(first.at_ms - submitted.at_ms));
  add("In all", submitted && ended && duration(ended.at_ms - submitted.at_ms));
  $("timeline-facts").replaceChildren(...pairs.map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: value }))));
}

function sentence(fact) {
  const { details, worker, attempt } = fact;
  const tokens = details.next_index ? ` at token ${whole.format(details.next_index)}` : "";
  switch (fact.kind) {
    case "submitted":
      return `Submitted as ${details.class ?? "default"}: ${whole.format(details.prompt_tokens ?? 0)} prompt tokens, at most ${whole.format(details.max_tokens ?? 0)} more; on offer`;
    case "claimed":
      return `Claimed by ${worker}${tokens}, after ${duration(details.waited_ms ?? 0)} on offer (attempt ${attempt})`;
    case "first_token":
      return `First token${details.cached ? `, with ${whole.format(details.cached)} prompt tokens from the cache` : ""}`;
    case "lost":
      return `Worker ${worker} was lost${tokens} (${fact.reason})`;
    case "released":
      return `Given back by ${worker}${tokens} (${fact.reason})`;
    case "reoffered":
      return `On offer again${tokens}, attempt ${attempt} (${fact.reason})`;
    case "ended":
      return `${fact.state[0]?.toUpperCase() ?? ""}${fact.state.slice(1)} after ${whole.format(details.next_index ?? 0)} tokens: ${fact.reason}${details.message ? ` (${details.message})` : ""}`;
    default:
      return fact.kind;
  }
}

/** What the request was in between two facts: waiting, reading its prompt, answering. */
function phasesOf(facts) {
  const phases = [];
  const words = { waiting: "waiting", prompt: "reading the prompt", answer: "answering" };
  let open = null;
  const begin = (phase, at, label = "") => {
    if (open) phases.push({ ...open, to: at });
    open = phase ? { phase, from: at, label, words: words[phase] } : null;
  };
  for (const fact of facts) {
    if (fact.kind === "submitted" || fact.kind === "reoffered") begin("waiting", fact.at_ms);
    if (fact.kind === "claimed") begin(fact.details.next_index ? "answer" : "prompt", fact.at_ms, fact.worker);
    if (fact.kind === "first_token") begin("answer", fact.at_ms, fact.worker);
    if (fact.kind === "lost" || fact.kind === "released" || fact.kind === "ended") begin(null, fact.at_ms);
  }
  if (open) phases.push({ ...open, to: Math.max(open.from, picture?.at_ms ?? open.from) });
  return phases;
}

$("timeline-close").addEventListener("click", () => $("timeline").close());
$("timeline").addEventListener("close", () => {
  openId = null;
  clearTimeout(timelineTimer);
});
$("timeline").addEventListener("click", (event) => {
  if (event.target === $("timeline")) $("timeline").close();
});

// -- the connection

let following = null;

/** Reads pictures until the connection ends. A connection that says nothing for long is taken for dead. */
async function follow() {
  const control = (following = new AbortController());
  let timer = setTimeout(() => control.abort(), SILENT_MS);
  try {
    const response = await ask("/dashboard/events", { signal: control.signal });
    askForKey(null);
    for await (const data of events(response)) {
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENT_MS);
      show(JSON.parse(data));
    }
  } finally {
    clearTimeout(timer);
  }
}

function askForKey(message) {
  const isNeeded = message !== null;
  document.body.classList.toggle("locked", isNeeded);
  $("key-form").hidden = !isNeeded;
  if (isNeeded) {
    setText($("key-note"), message);
    $("key").focus();
  }
}

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// A page that nobody sees needs no pictures; and a browser that keeps it in mind would keep its connection too, of
// which it has six for a server.
document.addEventListener("visibilitychange", () => document.hidden && following?.abort());
addEventListener("pagehide", () => following?.abort());

const visible = () =>
  document.hidden ? new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })) : Promise.resolve();

async function followForEver() {
  for (;;) {
    await visible();
    try {
      await follow();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) {
        askForKey(key.get() ? error.message : "It stays in this tab until the tab is closed, and goes nowhere else.");
        setStatus("away", "A key is needed");
        return;
      }
      if (document.hidden) continue;
      setStatus("away", error instanceof Refused ? error.message : "No connection, trying again");
    }
    document.body.classList.add("stale");
    if ($("status").dataset.state === "live") setStatus("away", "No connection, trying again");
    await wait(RETRY_MS);
  }
}

const playground = startPlayground({ say, duration, openTimeline, element });

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value.trim());
  $("key").value = "";
  start();
});

function start() {
  playground.loadModels();
  followForEver();
}

new ResizeObserver(showPlots).observe($("plot-rate"));
start();
