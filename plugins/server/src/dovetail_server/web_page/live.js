// The live view: the engine's steps as columns, its requests as rows.

import { request } from "./server.js";

const PERIOD_MS = 500;
const MAX_SHOWN_STEPS = 240;
const MAX_ROWS = 64;
const CELL = 7;
const find = (id) => document.getElementById(id);
const state = { steps: [], after: 0, started: null, timer: 0, paused: false, visible: false, generation: 0 };
let rates = [];

/** Start the live view, which reads steps only while it is visible. */
export function startLive() {
  find("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    find("pause").setAttribute("aria-pressed", String(state.paused));
    find("pause").textContent = state.paused ? "Continue" : "Pause";
  });
  find("timeline").addEventListener("mousemove", describe);
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
  try {
    if (!state.paused) {
      const trace = await (await request(`steps?after=${state.after}`)).json();
      if (generation !== state.generation) return;
      take(trace);
    }
  } catch (error) {
    find("hint").textContent = error.message;
  }
  if (generation === state.generation)
    state.timer = setTimeout(() => poll(generation), Math.max(50, PERIOD_MS - (performance.now() - began)));
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
  find("cache").textContent = blocks ? `${((100 * used) / blocks).toFixed(1)} %` : "–";
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

function layout() {
  const canvas = find("timeline");
  const columns = Math.max(1, Math.floor(canvas.clientWidth / CELL));
  const steps = state.steps.slice(-columns);
  const numbers = new Set(steps.flatMap((step) => cells(step).map(([number]) => number)));
  const rows = [...numbers].sort((a, b) => a - b).slice(-MAX_ROWS);
  return { canvas, steps, rows };
}

function draw() {
  const { canvas, steps, rows } = layout();
  if (!canvas.clientWidth) return;
  const scale = window.devicePixelRatio || 1;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = canvas.clientHeight * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const height = Math.max(2, Math.min(14, canvas.clientHeight / Math.max(1, rows.length)));
  const row = new Map(rows.map((number, index) => [number, index]));
  steps.forEach((step, column) => {
    for (const [number, kind] of cells(step)) {
      if (!row.has(number)) continue;
      context.fillStyle = style.getPropertyValue(`--${kind}`);
      const width = kind === "ended" ? 2 : CELL - 1;
      const left = column * CELL + (kind === "ended" ? CELL - 2 : 0);
      context.fillRect(left, row.get(number) * height, width, Math.max(1, height - 1));
    }
  });
  canvas.dataset.steps = steps.length;
  canvas.dataset.rows = rows.length;
  if (steps.length && !find("hint").dataset.pointed)
    find("hint").textContent = `The last ${steps.length} steps. Point at a step for its details.`;
}

function describe(event) {
  const { canvas, steps, rows } = layout();
  const box = canvas.getBoundingClientRect();
  const step = steps[Math.floor((event.clientX - box.left) / CELL)];
  if (!step) return;
  const height = Math.max(2, Math.min(14, canvas.clientHeight / Math.max(1, rows.length)));
  const number = rows[Math.floor((event.clientY - box.top) / height)];
  const cell = cells(step).find(([other]) => other === number);
  const action = { prefill: "prompt tokens", decode: "token", preempted: "preempted", ended: "ended" };
  const time = ((step.end_ns - step.begin_ns) / 1e6).toFixed(2);
  const what = cell ? `; request ${number}: ${cell[2] || ""} ${action[cell[1]]}` : "";
  find("hint").dataset.pointed = "yes";
  find("hint").textContent =
    `Step ${step.step_id}: ${step.num_tokens} tokens in ${time} ms, ${step.num_running} running, ` +
    `${step.num_waiting} waiting${what}`;
}
