// Uses Vercel's AI SDK with OpenAI's and Anthropic's API. Usage: ai_sdk.mjs http://HOST:PORT

import assert from "node:assert";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText, tool } from "ai";
import { z } from "zod";

const base = `${process.argv[2]}/v1`;
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
  execute: async ({ city }) => `rain in ${city}`,
});
for (const provider of [
  createOpenAICompatible({ name: "baton", baseURL: base, apiKey: "unused", includeUsage: true }),
  createAnthropic({ baseURL: base, apiKey: "unused" }),
]) {
  const model = provider("smollm2-135m");
  const asked = { model, maxOutputTokens: 100, maxRetries: 0 };
  const question = "What is the weather in Rome?";
  const called = await generateText({ ...asked, prompt: question, tools: { weather }, toolChoice: "required" });
  assert.equal(called.finishReason, "tool-calls");
  assert.ok(called.toolResults[0].output.startsWith("rain in "));
  const streamed = streamText({ ...asked, prompt: "What is the capital of France?" });
  let text = "";
  for await (const part of streamed.textStream) text += part;
  assert.ok(text.length > 0);
  assert.ok((await streamed.usage).outputTokens > 0);
}
console.log("ok");
