
"use strict";
(() => {
const find = (id) => document.getElementById(id);
const data = JSON.parse(find("data").textContent);
const { steps, slices, kinds, requests } = data;
const LABEL = 92, CHART = 52, LANE = 14, AXIS = 18, ROW = 14, MIN_SPAN = 20;
const canvas = find("picture"), scroll = find("scroll");
const numSteps = steps.begin.length;
const lanes = 1 + steps.lane.reduce((most, lane) => Math.max(most, lane), 0);
const top = 2 * CHART + lanes * LANE + AXIS;
const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
const peak = { running: Math.max(1, largest(steps.running), largest(steps.waiting)), blocks: Math.max(1, largest(steps.blocks)) };

// The slices of each request, in the order of time.
const rowOf = new Map(requests.map(([number], index) => [number, index]));
const rows = requests.map(() => []);
for (let index = 0; index < slices.begin.length; index++) rows[rowOf.get(slices.request[index])]?.push(index);
for (const row of rows) row.sort((a, b) => slices.begin[a] - slices.begin[b]);
const spans = rows.map((row) => [
  row.length ? slices.begin[row[0]] : 0,
  row.reduce((last, index) => Math.max(last, slices.begin[index] + slices.duration[index]), 0),
]);

let begin = Infinity, end = -Infinity;
for (const column of [steps, slices])
  column.begin.forEach((time, index) => {
    begin = Math.min(begin, time);
    end = Math.max(end, time + column.duration[index]);
  });
if (!(end > begin)) [begin, end] = [0, 1];
let shown = [];
const view = { from: begin, span: end - begin, selected: null };

const x = (time) => LABEL + ((time - view.from) / view.span) * (canvas.clientWidth - LABEL);
const timeAt = (left) => view.from + ((left - LABEL) / (canvas.clientWidth - LABEL)) * view.span;
const ms = (time) => (time / 1000).toLocaleString("en", { maximumFractionDigits: 3 });
const count = (value) => value.toLocaleString("en");

/** Return the first index whose slice or step ends after a time. */
function firstAt(length, endOf, time) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(middle) < time) low = middle + 1; else high = middle;
  }
  return low;
}
const stepEnd = (index) => steps.begin[index] + steps.duration[index];
const firstStep = (time) => Math.max(0, firstAt(numSteps, stepEnd, time) - lanes);

/** Return the rows to draw: those of requests in view, or all. */
function visibleRows() {
  const all = rows.map((_, row) => row);
  if (!find("filter").checked) return all;
  const until = view.from + view.span;
  return all.filter((row) => spans[row][0] <= until && spans[row][1] >= view.from);
}

function draw() {
  shown = visibleRows();
  find("space").style.height = `${Math.max(scroll.clientHeight, top + shown.length * ROW + 4)}px`;
  const width = canvas.clientWidth, height = scroll.clientHeight, scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(`--${name}`);
  drawRows(context, width, height, color);
  context.fillStyle = color("panel");
  context.fillRect(0, 0, width, top);
  drawCharts(context, width, color);
  drawSteps(context, width, color);
  drawAxis(context, width, color);
  drawSelection(context, width, height, color);
  canvas.dataset.from = view.from;
  canvas.dataset.span = view.span;
  canvas.dataset.rows = shown.length;
}

function drawRows(context, width, height, color) {
  const colors = kinds.map(color);
  const first = Math.floor(scroll.scrollTop / ROW);
  const last = Math.min(shown.length, first + Math.ceil((height - top) / ROW) + 1);
  for (let place = first; place < last; place++) {
    const row = shown[place], y = top + place * ROW - scroll.scrollTop;
    context.save();
    context.beginPath();
    context.rect(LABEL, y, width - LABEL, ROW);
    context.clip();
    const own = rows[row];
    const endOf = (index) => slices.begin[own[index]] + slices.duration[own[index]];
    let painted = -1;
    for (let index = firstAt(own.length, endOf, view.from); index < own.length; index++) {
      const item = own[index], left = x(slices.begin[item]);
      if (left > width) break;
      const right = Math.max(left + 1, x(slices.begin[item] + slices.duration[item]));
      if (right <= painted && slices.kind[item] !== 4) continue;
      context.fillStyle = colors[slices.kind[item]];
      context.fillRect(left, y + 1, right - left, ROW - 3);
      painted = right;
    }
    context.restore();
    context.fillStyle = color(row === view.selected?.row ? "accent" : "dim");
    context.fillText(fit(context, requests[row][1]), 6, y + ROW / 2);
  }
}

function fit(context, text) {
  if (context.measureText(text).width <= LABEL - 12) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`…${text.slice(-length)}`).width > LABEL - 12) length--;
  return `…${text.slice(-length)}`;
}

function drawCharts(context, width, color) {
  const lines = [
    ["running", 0, peak.running], ["waiting", 0, peak.running], ["blocks", CHART, peak.blocks],
  ];
  for (const [name, y, most] of lines) {
    context.strokeStyle = color(name === "waiting" ? "dim" : name);
    context.lineWidth = 1.3;
    context.beginPath();
    let level = null, column = -1;
    for (let index = firstStep(view.from); index < numSteps; index++) {
      const left = Math.max(LABEL, x(stepEnd(index)));
      if (Math.floor(left) === column && index + 1 < numSteps) continue;
      column = Math.floor(left);
      const next = y + CHART - 6 - ((CHART - 12) * steps[name][index]) / most;
      if (level === null) context.moveTo(left, next);
      else { context.lineTo(left, level); context.lineTo(left, next); }
      level = next;
      if (left > width) break;
    }
    context.stroke();
  }
  label(context, color, [["running", `running ≤ ${count(peak.running)}`], ["dim", "waiting"]], 0);
  label(context, color, [["blocks", "KV blocks"], ["dim", `≤ ${count(peak.blocks)}`]], CHART);
}

function label(context, color, texts, y) {
  context.fillStyle = color("panel");
  context.fillRect(0, y, LABEL, CHART);
  texts.forEach(([name, text], index) => {
    context.fillStyle = color(name);
    context.fillText(text, 6, y + 14 + 16 * index);
  });
}

function drawSteps(context, width, color) {
  const colors = { prefill: color("prefill"), decode: color("decode"), empty: color("waiting") };
  const painted = new Array(lanes).fill(-1);
  for (let index = firstStep(view.from); index < numSteps; index++) {
    const left = Math.max(LABEL, x(steps.begin[index])), right = Math.max(left + 1, x(stepEnd(index)));
    if (left > width) break;
    const lane = steps.lane[index];
    if (right <= LABEL || right <= painted[lane]) continue;
    painted[lane] = right;
    const y = 2 * CHART + lane * LANE;
    const total = steps.prefill[index] + steps.decode[index];
    const share = total ? steps.prefill[index] / total : 0;
    const high = Math.round((LANE - 3) * share);
    const inner = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
    context.fillStyle = total ? colors.decode : colors.empty;
    context.fillRect(left, y + 1 + high, inner, LANE - 3 - high);
    context.fillStyle = colors.prefill;
    context.fillRect(left, y + 1, inner, high);
  }
  context.fillStyle = color("dim");
  context.fillText("steps", 6, 2 * CHART + (lanes * LANE) / 2);
}

function drawAxis(context, width, color) {
  const y = top - AXIS;
  const raw = view.span / Math.max(1, (width - LABEL) / 110);
  const power = 10 ** Math.floor(Math.log10(raw));
  const tick = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  context.fillStyle = color("dim");
  context.strokeStyle = color("line");
  context.lineWidth = 1;
  for (let time = Math.ceil((view.from - begin) / tick) * tick; time <= view.from + view.span - begin; time += tick) {
    const left = x(time + begin);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(left, top);
    context.stroke();
    context.fillText(`${ms(time)} ms`, left + 3, y + AXIS / 2);
  }
}

function drawSelection(context, width, height, color) {
  const { step, row } = view.selected ?? {};
  context.strokeStyle = color("text");
  context.lineWidth = 1;
  if (step !== undefined && step >= 0) {
    const left = x(steps.begin[step]), right = x(stepEnd(step));
    if (right >= LABEL) context.strokeRect(Math.max(LABEL, left) - 0.5, 0.5, Math.max(1, right - Math.max(LABEL, left)), height - 1);
  }
  if (shown.includes(row)) {
    const y = top + shown.indexOf(row) * ROW - scroll.scrollTop;
    if (y >= top - ROW) context.strokeRect(LABEL - 0.5, y - 0.5, width - LABEL, ROW);
  }
}

/** Show the numbers of a step and of a request at a time. */
function describe(time, step, row) {
  view.selected = { step, row };
  const parts = [];
  if (step >= 0)
    parts.push(
      `Step ${count(steps.step_id[step])} at ${ms(steps.begin[step] - begin)} ms: ${ms(steps.duration[step])} ms, ` +
      `${count(steps.prefill[step])} prompt tokens, ${count(steps.decode[step])} tokens of decodes, ` +
      `${count(steps.running[step])} running, ${count(steps.waiting[step])} waiting, ${count(steps.blocks[step])} blocks.`,
    );
  if (row >= 0) parts.push(describeRequest(row, time));
  find("hint").textContent = parts.join(" ");
}

function describeRequest(row, time) {
  const [, name, prompt, reason] = requests[row];
  const own = rows[row];
  const item = own.find((index) => slices.begin[index] <= time && time <= slices.begin[index] + slices.duration[index]);
  const total = (kind, column) =>
    own.reduce((sum, index) => sum + (kinds[slices.kind[index]] === kind ? column[index] : 0), 0);
  const phases = kinds
    .map((kind) => [kind, total(kind, slices.duration)])
    .filter(([, duration]) => duration)
    .map(([kind, duration]) => `${kind} ${ms(duration)} ms`);
  const facts = [];
  if (prompt >= 0) facts.push(`${count(prompt)} prompt tokens`);
  facts.push(`${count(total("decode", slices.tokens))} tokens in decodes`, ...phases);
  if (reason) facts.push(`ended: ${reason}`);
  const now = item === undefined ? "" :
    ` Here: ${kinds[slices.kind[item]]}, ${ms(slices.duration[item])} ms` +
    `${slices.steps[item] ? `, ${count(slices.steps[item])} steps, ${count(slices.tokens[item])} tokens` : ""}.`;
  return `Request ${name}: ${facts.join(", ")}.${now}`;
}

function point(event) {
  const box = canvas.getBoundingClientRect();
  const left = event.clientX - box.left, y = event.clientY - box.top;
  if (left < LABEL && y < top) return;
  const time = left < LABEL ? begin - 1 : timeAt(left);
  let step = -1;
  for (let index = firstStep(time); index < numSteps && steps.begin[index] <= time; index++)
    if (stepEnd(index) >= time) step = index;
  const place = y < top ? -1 : Math.floor((y - top + scroll.scrollTop) / ROW);
  describe(time, step, shown[place] ?? -1);
  draw();
}

function zoom(factor, center = view.from + view.span / 2) {
  const span = Math.min(end - begin, Math.max(MIN_SPAN, view.span * factor));
  view.from = center - ((center - view.from) * span) / view.span;
  view.span = span;
  move(0);
}

function move(time) {
  view.from = Math.min(Math.max(begin, view.from + time), end - view.span);
  draw();
}

/** Select another step, and move the view so that it is visible. */
function select(change) {
  if (!numSteps) return;
  const current = view.selected?.step ?? -1;
  const step = Math.max(0, Math.min(numSteps - 1, current < 0 ? firstAt(numSteps, stepEnd, view.from) : current + change));
  describe(steps.begin[step], step, view.selected?.row ?? -1);
  if (steps.begin[step] < view.from || stepEnd(step) > view.from + view.span)
    view.from = steps.begin[step] - view.span / 2;
  move(0);
}

const keys = {
  ArrowLeft: () => move(-view.span / 8), ArrowRight: () => move(view.span / 8),
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => zoom(Infinity),
  n: () => select(1), p: () => select(-1),
};
canvas.addEventListener("keydown", (event) => {
  const action = keys[event.key];
  if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  action();
});
let drag = null;
canvas.addEventListener("pointerdown", (event) => { drag = { left: event.clientX, from: view.from }; });
window.addEventListener("pointerup", () => { drag = null; });
canvas.addEventListener("pointermove", (event) => {
  if (!drag || !event.buttons) { point(event); return; }
  view.from = drag.from;
  move(((drag.left - event.clientX) / (canvas.clientWidth - LABEL)) * view.span);
});
canvas.addEventListener("wheel", (event) => {
  if (event.ctrlKey || event.metaKey) {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event.clientX - canvas.getBoundingClientRect().left));
  } else if (event.shiftKey || event.deltaX) {
    event.preventDefault();
    move(((event.deltaX || event.deltaY) / canvas.clientWidth) * view.span);
  }
}, { passive: false });
find("in").addEventListener("click", () => zoom(0.5));
find("out").addEventListener("click", () => zoom(2));
find("all").addEventListener("click", () => zoom(Infinity));
find("search").addEventListener("input", () => {
  const text = find("search").value.trim();
  const row = text ? requests.findIndex(([, name]) => name.includes(text)) : -1;
  if (row < 0) {
    find("hint").textContent = text ? "No request has this text in its name." : "";
    view.selected = null;
  } else {
    if (spans[row][0] > view.from + view.span || spans[row][1] < view.from) zoom(Infinity);
    scroll.scrollTop = Math.max(0, visibleRows().indexOf(row) * ROW - (scroll.clientHeight - top) / 2);
    describe(begin - 1, -1, row);
  }
  draw();
});
find("filter").addEventListener("change", draw);
scroll.addEventListener("scroll", draw);
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

find("hint").textContent =
  `${count(numSteps)} steps and ${count(requests.length)} requests in ${ms(end - begin)} ms. Point at the picture for details.`;
draw();
document.documentElement.dataset.ready = "true";
})();
