// The chat: a conversation with streamed responses.

import { render } from "./markdown.js";
import { events, request, setApiKey, apiKey } from "./server.js";

const STORE = "dovetail.conversation";
const MAX_STORED = 1_000_000;
const find = (id) => document.getElementById(id);
const state = { messages: [], running: null, onStart: () => {} };

/** Start the chat. */
export function startChat() {
  find("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  find("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") state.running?.abort();
  });
  find("stop").addEventListener("click", () => state.running?.abort());
  find("regenerate").addEventListener("click", regenerate);
  find("clear").addEventListener("click", clear);
  find("api_key").value = apiKey();
  find("api_key").addEventListener("change", (event) => setApiKey(event.target.value.trim()));
  restore();
}

function restore() {
  try {
    state.messages = JSON.parse(sessionStorage.getItem(STORE)) ?? [];
  } catch {
    state.messages = [];
  }
  for (const message of state.messages) {
    const view = addMessage(message.role);
    if (message.role === "user") view.body.textContent = message.content;
    else showAnswer(view, { text: message.content ?? "", calls: message.tool_calls ?? [] });
  }
  update();
}

function store() {
  const text = JSON.stringify(state.messages);
  try {
    if (text.length <= MAX_STORED) sessionStorage.setItem(STORE, text);
  } catch {}
}

function update() {
  const last = state.messages.at(-1);
  find("send").disabled = find("clear").disabled = state.running !== null;
  find("stop").hidden = state.running === null;
  find("regenerate").disabled = state.running !== null || last?.role !== "assistant";
}

function clear() {
  state.messages = [];
  find("messages").replaceChildren();
  store();
  update();
  find("input").focus();
}

function addMessage(role) {
  const article = document.createElement("article");
  article.className = role;
  article.setAttribute("aria-label", role === "user" ? "You" : "Assistant");
  const view = { article };
  for (const name of ["reasoning", "body", "calls", "figures"]) {
    view[name] = document.createElement("div");
    view[name].className = name;
    view[name].hidden = name !== "body";
    article.append(view[name]);
  }
  view.reasoning.setAttribute("role", "group");
  view.reasoning.setAttribute("aria-label", "Reasoning");
  find("messages").append(article);
  return view;
}

async function send() {
  const text = find("input").value.trim();
  if (!text || state.running) return;
  find("input").value = "";
  for (const node of document.querySelectorAll("article.unanswered")) node.remove();
  state.messages.push({ role: "user", content: text });
  addMessage("user").body.textContent = text;
  await respond();
}

async function regenerate() {
  if (state.running || state.messages.at(-1)?.role !== "assistant") return;
  state.messages.pop();
  find("messages").lastElementChild.remove();
  await respond();
}

function body() {
  const system = find("system").value.trim();
  const fields = {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...state.messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"])
    if (find(name).value !== "") fields[name] = Number(find(name).value);
  if (find("show_probabilities").checked) Object.assign(fields, { logprobs: true, top_logprobs: 3 });
  if (find("tools").value.trim()) {
    try {
      fields.tools = JSON.parse(find("tools").value);
    } catch {
      throw new Error("The field Tools is not valid JSON.");
    }
  }
  return fields;
}

async function respond() {
  const view = addMessage("assistant");
  const answer = { text: "", reasoning: "", calls: [], tokens: [], usage: null, first: 0 };
  const began = performance.now();
  state.running = new AbortController();
  view.article.setAttribute("aria-busy", "true"); // a screen reader reads the complete response
  update();
  const paint = painter(view, answer);
  let note = "";
  let complete = false;
  try {
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body()),
      signal: state.running.signal,
    });
    for await (const event of events(response)) {
      if (event.usage) answer.usage = event.usage;
      if (event.choices.length) take(answer, event.choices[0]);
      paint();
    }
    complete = true;
  } catch (error) {
    if (error.name === "AbortError") note = "stopped";
    else showError(view, error.message);
  }
  state.running = null;
  answer.calls = answer.calls.filter(Boolean);
  try {
    showAnswer(view, answer);
    showFigures(view, answer, began, note);
  } catch (error) {
    showError(view, `The response cannot be shown: ${error.message}`);
  }
  view.article.removeAttribute("aria-busy");
  if (complete || answer.text || answer.calls.length) {
    const message = { role: "assistant", content: answer.text };
    if (answer.calls.length) message.tool_calls = answer.calls;
    state.messages.push(message);
  } else takeBack(view);
  store();
  update();
  scroll(true);
}

/** Put an unanswered message back into the input, so that the user can change or resend it. */
function takeBack(view) {
  const { content } = state.messages.pop();
  if (!find("input").value) find("input").value = content;
  for (const node of [view.article.previousElementSibling, view.article])
    node.classList.add("unanswered");
}

function take(answer, choice) {
  const delta = choice.delta ?? {};
  if (!answer.first) answer.first = performance.now();
  answer.text += delta.content ?? "";
  answer.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (answer.calls[call.index] ??= {
      id: "", type: "function", function: { name: "", arguments: "" },
    });
    known.id ||= call.id ?? "";
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  answer.tokens.push(...(choice.logprobs?.content ?? []));
}

/** Return a function that shows the answer in one of the next frames, without blocking them. */
function painter(view, answer) {
  let waiting = false;
  let pause = 0;
  return () => {
    if (waiting) return;
    waiting = true;
    setTimeout(() => requestAnimationFrame(() => {
      waiting = false;
      if (state.running === null) return;
      const began = performance.now();
      showAnswer(view, answer);
      scroll(false);
      pause = 4 * (performance.now() - began);  // at most a fifth of the time is used
    }), pause);
  };
}

function showAnswer(view, answer) {
  if (answer.tokens?.length) showTokens(view.body, answer.tokens);
  else render(view.body, answer.text);
  view.reasoning.hidden = !answer.reasoning;
  if (answer.reasoning) view.reasoning.textContent = answer.reasoning;
  view.calls.hidden = !answer.calls.length;
  view.calls.replaceChildren(...answer.calls.filter(Boolean).map((call) => {
    const node = document.createElement("div");
    node.className = "tool";
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", "Tool call");
    node.textContent = `${call.function.name}(${call.function.arguments})`;
    return node;
  }));
}

function showTokens(target, tokens) {
  target.classList.add("tokens");
  for (let index = target.childElementCount; index < tokens.length; index++) {
    const token = tokens[index];
    const span = document.createElement("span");
    span.textContent = token.token;
    const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
    const others = (token.top_logprobs ?? []).map((other) => `${JSON.stringify(other.token)} ${percent(other.logprob)}`);
    span.title = [`${percent(token.logprob)}`, ...others].join("\n");
    target.append(span);
  }
}

function showFigures(view, answer, began, note) {
  const parts = [];
  if (answer.usage) {
    const seconds = (performance.now() - answer.first) / 1000;
    const count = answer.usage.completion_tokens;
    parts.push(`${count} tokens`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens/s`);
    const cached = answer.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${cached} of ${answer.usage.prompt_tokens} prompt tokens cached`);
  }
  if (answer.first) parts.push(`first token after ${Math.round(answer.first - began)} ms`);
  if (note) parts.push(note);
  view.figures.hidden = !parts.length;
  view.figures.textContent = parts.join(" · ");
}

function showError(view, message) {
  const node = document.createElement("div");
  node.className = "error";
  node.setAttribute("role", "alert");
  node.textContent = message;
  view.article.append(node);
}

function scroll(always) {
  const box = find("messages");
  const isNear = box.scrollHeight - box.scrollTop - box.clientHeight < 120;
  if (always || isNear) box.scrollTop = box.scrollHeight;
}
