// The live view: the engine's steps as columns, its requests as rows.

import { request } from "./server.js";

const PERIOD_MS = 500;
const MAX_SHOWN_STEPS = 240;
const MAX_READ_STEPS = 1024;
const MAX_ROWS = 64;
const CELL = 7;
const KINDS = ["prefill", "decode", "preempted", "ended"];
const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const find = (id) => document.getElementById(id);
const state = {
  steps: [], after: 0, started: null, timer: 0, paused: false, visible: false, generation: 0, selected: null,
};
let rates = [];

/** Start the live view, which reads steps only while it is visible. */
export function startLive() {
  find("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    find("pause").setAttribute("aria-pressed", String(state.paused));
    find("pause").textContent = state.paused ? "Continue" : "Pause";
  });
  const canvas = find("timeline");
  canvas.addEventListener("mousemove", point);
  canvas.addEventListener("mouseleave", () => describe(null));
  canvas.addEventListener("blur", () => describe(null));
  canvas.addEventListener("keydown", move);
  window.addEventListener("resize", draw);
  document.addEventListener("visibilitychange", () => show(state.visible));
}

/** Show or hide the view. */
export function show(visible) {
  state.visible = visible;
  clearTimeout(state.timer);
  state.generation++;
  if (visible && !document.hidden) poll(state.generation);
}

async function poll(generation) {
  const began = performance.now();
  const query = `steps?after=${state.after}&max_steps=${MAX_READ_STEPS}`;
  try {
    if (!state.paused) {
      const trace = await (await request(query)).json();
      if (generation !== state.generation) return;
      take(trace);
    }
  } catch (error) {
    find("hint").textContent = error.message;
  }
  if (generation === state.generation)
    state.timer = setTimeout(
      () => poll(generation), Math.max(50, PERIOD_MS - (performance.now() - began)),
    );
}

function take(trace) {
  if (trace.started_ns !== state.started) {
    Object.assign(state, { steps: [], started: trace.started_ns, after: 0 });
    rates = [];
  }
  let decodes = [];
  for (const step of trace.steps) {
    decodes = step.decodes ?? decodes;
    state.steps.push({ ...step, decodes });
    state.after = step.number;
  }
  state.steps = state.steps.slice(-MAX_SHOWN_STEPS);
  rates.push({ ns: trace.now_ns, tokens: trace.num_new_tokens, steps: trace.num_steps });
  rates = rates.slice(-5);
  showFigures(trace);
  draw();
}

function showFigures(trace) {
  const [first, last] = [rates[0], rates.at(-1)];
  const seconds = (last.ns - first.ns) / 1e9;
  const rate = (name) => (seconds > 0 ? Math.round((last[name] - first[name]) / seconds).toLocaleString("en") : "–");
  find("rate").textContent = rate("tokens");
  find("step_rate").textContent = rate("steps");
  if (!trace.stats) return;
  find("num_running").textContent = trace.stats.num_running;
  find("num_waiting").textContent = trace.stats.num_waiting;
  find("num_preemptions").textContent = trace.stats.num_preemptions;
  const { num_used_blocks: used, num_blocks: blocks } = trace.stats;
  const percent = (100 * used) / blocks;
  find("cache").textContent = blocks ? `${percent.toFixed(percent < 1 ? 3 : 1)} %` : "–";
  find("cache").title = `${used} of ${blocks} blocks`;
}

/** Return the cells of a step: [request, kind, tokens]. */
function cells(step) {
  return [
    ...step.decodes.map((number) => [number, "decode", 1]),
    ...step.prefills.map(([number, , tokens]) => [number, "prefill", tokens]),
    ...step.verified.map(([number, tokens]) => [number, "decode", tokens]),
    ...step.preempted.map((number) => [number, "preempted", 0]),
    ...step.ended.map(([number, reason]) => [number, "ended", reason]),
  ];
}

/** Return the canvas, the steps and requests that fit on it, and the height of a row in pixels. */
function layout() {
  const canvas = find("timeline");
  const columns = Math.max(1, Math.floor(canvas.clientWidth / CELL));
  const steps = state.steps.slice(-columns);
  const numbers = new Set(steps.flatMap((step) => cells(step).map(([number]) => number)));
  const rows = [...numbers].sort((a, b) => a - b).slice(-MAX_ROWS);
  const height = Math.max(2, Math.min(14, canvas.clientHeight / Math.max(1, rows.length)));
  return { canvas, steps, rows, height };
}

function draw() {
  const { canvas, steps, rows, height } = layout();
  if (!canvas.clientWidth) return;
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colors = new Map(KINDS.map((kind) => [kind, style.getPropertyValue(`--${kind}`)]));
  const row = new Map(rows.map((number, index) => [number, index]));
  steps.forEach((step, column) => {
    for (const [number, kind] of cells(step)) {
      if (!row.has(number)) continue;
      context.fillStyle = colors.get(kind);
      const width = kind === "ended" ? 2 : CELL - 1;
      const left = column * CELL + (kind === "ended" ? CELL - 2 : 0);
      context.fillRect(left, row.get(number) * height, width, Math.max(1, height - 1));
    }
  });
  const column = steps.findIndex((step) => step.number === state.selected?.step.number);
  if (column >= 0) {
    const top = (row.get(state.selected.request) ?? 0) * height;
    context.strokeStyle = style.getPropertyValue("--text");
    context.strokeRect(column * CELL - 0.5, 0, CELL, canvas.clientHeight);
    if (row.has(state.selected.request)) context.strokeRect(0, top - 0.5, canvas.clientWidth, height);
  }
  canvas.dataset.steps = steps.length;
  canvas.dataset.rows = rows.length;
  if (state.selected) return;
  find("hint").textContent = steps.length
    ? `The last ${steps.length} steps. Point at a step for its details.`
    : "No steps yet. Send a request.";
}

function point(event) {
  const { canvas, steps, rows, height } = layout();
  const box = canvas.getBoundingClientRect();
  const step = steps[Math.floor((event.clientX - box.left) / CELL)];
  describe(step, rows[Math.floor((event.clientY - box.top) / height)]);
}

/** Select another step or request with the arrow keys; the first key selects the latest step. */
function move(event) {
  if (!(event.key in MOVES)) return;
  event.preventDefault();
  const { steps, rows } = layout();
  const within = (index, items) => items[Math.max(0, Math.min(items.length - 1, index))];
  const [right, down] = MOVES[event.key];
  const { step, request: number } = state.selected ?? {};
  const column = steps.findIndex((other) => other.number === step?.number);
  if (column < 0) describe(steps.at(-1), rows.at(-1));
  else describe(within(column + right, steps), within(rows.indexOf(number) + down, rows));
}

/** Show the numbers of a step, and what a request did in it. Without a step, end the selection. */
function describe(step, number) {
  state.selected = step ? { step, request: number } : null;
  draw();
  if (!step) return;
  const words = {
    prefill: (tokens) => `${tokens} prompt tokens`,
    decode: (tokens) => (tokens === 1 ? "1 token" : `${tokens} tokens`),
    preempted: () => "preempted",
    ended: (reason) => (reason ? `ended (${reason})` : "ended"),
  };
  const actions = cells(step).filter(([other]) => other === number);
  const time = ((step.end_ns - step.begin_ns) / 1e6).toFixed(2);
  const what = actions.map(([, kind, detail]) => words[kind](detail)).join(", ");
  find("hint").textContent =
    `Step ${step.step_id}: ${step.num_tokens} tokens in ${time} ms, ${step.num_running} running, ` +
    `${step.num_waiting} waiting${what && `; request ${number}: ${what}`}`;
}
