// Requests to the server that serves this page.

const KEY = "dovetail.api_key";

export function apiKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

/** Send a request. Throws an Error with the server's message for an error status. */
export async function request(path, options = {}) {
  const headers = { ...(options.headers ?? {}) };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached.");
  }
  if (response.ok) return response;
  let message = `The server responded with the status ${response.status}.`;
  try {
    message = (await response.json()).error.message ?? message;
  } catch {}
  if (response.status === 401) message += " Enter the key under Settings.";
  throw new Error(message);
}

/** Yield the payloads of a stream of events. Throws if the stream ends before its last event. */
export async function* events(response) {
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new Error("The connection was lost before the end of the response.");
      }
      if (part.done) throw new Error("The connection was lost before the end of the response.");
      const pieces = (rest + decoder.decode(part.value, { stream: true })).split("\n\n");
      rest = pieces.pop();
      for (const piece of pieces) {
        const payload = piece.replace(/^data: /, "");
        if (payload === "[DONE]") return;
        const event = JSON.parse(payload);
        if (event.error) throw new Error(event.error.message);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
