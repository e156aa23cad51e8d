// The AI SDK, by its provider for servers of OpenAI's kind and by OpenAI's own.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

import { idle, text, tools } from "./servers.mjs";

const steps = isStepCount ?? stepCountIs;

const compatible = (server) =>
  createOpenAICompatible({
    name: "trioserve", baseURL: server.api, apiKey: server.key, includeUsage: true,
    supportsStructuredOutputs: true,
  });
const openai = (server) => createOpenAI({ baseURL: server.api, apiKey: server.key });

const MODELS = {
  "openai-compatible, chat": (server) => compatible(server).chatModel(server.model),
  "openai, chat": (server) => openai(server).chat(server.model),
  "openai, responses": (server) => openai(server).responses(server.model),
};
const SETTINGS = { temperature: 0, maxOutputTokens: 64, maxRetries: 0 };
const FRANCE = "What is the capital of France?";
const WEATHER = "What is the weather in Paris?";
const BOB = "Bob is 42 years old. Answer with his name and age as JSON.";
const Person = z.object({ name: z.string(), age: z.number().int() });

const weatherTool = (asked) =>
  tool({
    description: "The weather of a city",
    inputSchema: z.object({ city: z.string().describe("The city, such as Rome") }),
    execute: async ({ city }) => (asked.push(city), "Say to the user: it is 17 degrees in Paris."),
  });

// As long as so small a model is shown the function, it calls it again and again.
const offerOnce = ({ stepNumber }) => (stepNumber === 0 ? {} : { activeTools: [] });

for (const [name, of] of Object.entries(MODELS)) {
  test(`${name}: generateText and streamText`, async () => {
    const request = { model: of(tools), prompt: FRANCE, ...SETTINGS };
    const whole = await generateText(request);
    assert.match(whole.text, /Paris/);
    assert.ok(whole.usage.outputTokens > 0);
    const stream = streamText(request);
    let joined = "";
    for await (const piece of stream.textStream) joined += piece;
    assert.equal(joined, whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
    assert.equal(await stream.finishReason, whole.finishReason);
  });

  test(`${name}: an object`, async () => {
    const output = Output.object({ schema: Person });
    const whole = await generateText({ model: of(tools), prompt: BOB, output, ...SETTINGS });
    assert.deepEqual(whole.output, { name: "Bob", age: 42 });
    const stream = streamText({ model: of(tools), prompt: BOB, output, ...SETTINGS });
    assert.deepEqual(await stream.output, { name: "Bob", age: 42 });
  });

  for (const run of [generateText, streamText]) {
    test(`${name}: a tool and its result, ${run.name}`, async () => {
      const asked = [];
      const result = await run({
        model: of(tools), prompt: WEATHER, tools: { get_weather: weatherTool(asked) },
        stopWhen: steps(3), prepareStep: offerOnce, ...SETTINGS,
      });
      assert.match(await result.text, /17/);
      assert.deepEqual(asked, ["Paris"]);
    });

    test(`${name}: a tool that is demanded, ${run.name}`, async () => {
      const asked = [];
      const result = await run({
        model: of(tools), prompt: WEATHER, tools: { get_weather: weatherTool(asked) },
        toolChoice: "required", ...SETTINGS,
      });
      assert.equal(await result.finishReason, "tool-calls");
      assert.equal(asked[0], "Paris");
    });
  }
}

test("aborting ends the work in the server", async () => {
  const controller = new AbortController();
  const stream = streamText({
    model: MODELS["openai-compatible, chat"](text), prompt: "Count to 1000.",
    ...SETTINGS, maxOutputTokens: 2000, abortSignal: controller.signal,
  });
  await stream.textStream[Symbol.asyncIterator]().next();
  controller.abort();
  await idle(text);
});
