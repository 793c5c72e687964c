// Uses chat completions with the package openai.

import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const given = { model: "demo", max_tokens: 8, temperature: 0,
                messages: [{ role: "user", content: "Anna" }] };
const whole = (await client.chat.completions.create(given)).choices[0].message.content;
let text = "";
for await (const part of await client.chat.completions.create({ ...given, stream: true }))
  text += part.choices[0]?.delta?.content ?? "";
if (!whole || text !== whole) throw new Error(`${text} is not ${whole}`);
try {
  await client.chat.completions.create({ ...given, temperature: -1 });
} catch (error) {
  if (error instanceof OpenAI.BadRequestError && error.param === "temperature") console.log("done");
}
