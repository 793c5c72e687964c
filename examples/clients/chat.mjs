// A client of a Dovetail server in JavaScript without packages (Node 18 or later, or a browser).
//
//     dovetail serve --model demo &
//     node examples/clients/chat.mjs "What is 27 + 58?" http://127.0.0.1:8000/v1

const [message, url = "http://127.0.0.1:8000/v1"] = process.argv.slice(2);
const headers = {
  "Content-Type": "application/json",
  Authorization: `Bearer ${process.env.DOVETAIL_API_KEY ?? "none"}`,
};

/** Yield the payloads of server-sent events. Throw if the stream ends without its last event. */
async function* events(response) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const bytes of response.body) {
    const parts = (rest + decoder.decode(bytes, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const payload = part.replace(/^data: /, "");
      if (payload === "[DONE]") return;
      const event = JSON.parse(payload);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  throw new Error("the connection was lost before the end of the response");
}

/** Send a request. After the statuses 429 and 503, send it again at the time in Retry-After. */
async function post(path, body, attempts = 5) {
  for (let attempt = 1; ; attempt++) {
    const options = { method: "POST", headers, body: JSON.stringify(body) };
    const response = await fetch(url + path, options);
    if (response.ok) return response;
    const wait = Number(response.headers.get("Retry-After"));
    if (![429, 503].includes(response.status) || !wait || attempt === attempts) {
      const { error } = await response.json();
      throw new Error(`${response.status} ${error.message}`);
    }
    await new Promise((resume) => setTimeout(resume, wait * 1000));
  }
}

if (!message) {
  console.error('usage: node chat.mjs "MESSAGE" [URL]');
  process.exit(2);
}
try {
  const response = await post("/chat/completions", {
    messages: [{ role: "user", content: message }],
    max_tokens: 64,
    temperature: 0,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const event of events(response)) {
    process.stdout.write(event.choices[0]?.delta.content ?? "");
    if (event.usage) process.stdout.write(`\n[${event.usage.completion_tokens} tokens]\n`);
  }
} catch (error) {
  console.error(`The request failed: ${error.cause?.message ?? error.message}`);
  process.exitCode = 1;
}
