// Uses the AI SDK with its three providers: chat completions, the Responses API and the Messages API.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const given = { baseURL: process.argv[2], apiKey: "any" };
const compatible = { ...given, name: "dovetail", supportsStructuredOutputs: true };
const models = [
  createOpenAICompatible(compatible)("demo"),
  createOpenAI(given)("demo"),
  createAnthropic(given)("demo"),
];
const seen = [];
const add = tool({
  description: "Add two numbers.",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => { seen.push([a, b]); return a + b; },
});
const person = z.object({ name: z.string(), age: z.number().int() });

/** Return the whole text of a stream. */
async function textOf(stream) {
  let text = "";
  for await (const part of stream.textStream) text += part;
  return text;
}

for (const model of models) {
  const options = { model, temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
  const question = { ...options, prompt: "What is 27 + 58?" };
  const whole = await generateText(question);
  assert.deepEqual([whole.text, whole.finishReason], ["27 + 58 = 85.", "stop"]);
  assert.equal(whole.usage.outputTokens, 12);
  assert.equal(await textOf(streamText(question)), whole.text);

  const tools = { tools: { add }, stopWhen: stepCountIs(3), prompt: "What is 1234 + 4321?" };
  const answer = await generateText({ ...options, ...tools });
  assert.deepEqual([answer.text, answer.steps.length], ["1234 + 4321 = 5555.", 2]);
  assert.equal(await textOf(streamText({ ...options, ...tools })), answer.text);
  assert.deepEqual(seen.splice(0), [[1234, 4321], [1234, 4321]]);

  const json = { output: Output.object({ schema: person }) };
  const written = { ...options, ...json, prompt: "Write this as JSON: name Yuki, age 7" };
  assert.deepEqual((await generateText(written)).output, { name: "Yuki", age: 7 });

  const stop = new AbortController();
  const stopped = streamText({ ...question, maxOutputTokens: 400, abortSignal: stop.signal });
  for await (const part of stopped.fullStream) {
    if (part.type === "text-delta") stop.abort();
  }
  const tooLong = generateText({ ...question, prompt: "word ".repeat(2000) });
  await assert.rejects(
    tooLong,
    (error) => APICallError.isInstance(error) && error.statusCode === 400,
  );
}
console.log("done");
