// OpenAI's client for JavaScript.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { idle, metric, text, tools } from "./servers.mjs";

const client = (server) => new OpenAI({ baseURL: server.api, apiKey: server.key, maxRetries: 0 });
const talker = client(text);
const caller = client(tools);

const FRANCE = [{ role: "user", content: "What is the capital of France?" }];
const WEATHER = [{ role: "user", content: "What is the weather in Paris?" }];
const BOB = [{ role: "user", content: "Bob is 42 years old. Answer with his name and age as JSON." }];
const Person = z.object({ name: z.string(), age: z.number().int() });
const City = z.object({ city: z.string().describe("The city, such as Rome") });
const ask = (server, messages, more) => ({
  model: server.model, messages, temperature: 0, max_tokens: 64, ...more,
});

test("create and stream say the same", async () => {
  const request = ask(text, FRANCE, { max_tokens: 16 });
  const whole = await talker.chat.completions.create(request);
  assert.match(whole.choices[0].message.content, /Paris/);
  const stream = talker.chat.completions.stream({ ...request, stream_options: { include_usage: true } });
  let joined = "";
  stream.on("content", (delta) => (joined += delta));
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  assert.equal(joined, whole.choices[0].message.content);
  assert.equal((await stream.totalUsage()).completion_tokens, whole.usage.completion_tokens);
});

test("parse makes an object by zod", async () => {
  const response_format = zodResponseFormat(Person, "person");
  const answer = await caller.chat.completions.parse(ask(tools, BOB, { response_format }));
  assert.deepEqual(answer.choices[0].message.parsed, { name: "Bob", age: 42 });
  const stream = caller.chat.completions.stream(ask(tools, BOB, { response_format }));
  const final = await stream.finalChatCompletion();
  assert.deepEqual(final.choices[0].message.parsed, { name: "Bob", age: 42 });
});

test("parse makes arguments by zod", async () => {
  const tool = zodFunction({ name: "get_weather", description: "The weather of a city", parameters: City });
  const request = ask(tools, WEATHER, { tools: [tool], tool_choice: "required", parallel_tool_calls: false });
  const answer = await caller.chat.completions.parse(request);
  assert.deepEqual(answer.choices[0].message.tool_calls[0].function.parsed_arguments, { city: "Paris" });
});

for (const stream of [false, true]) {
  for (const choice of ["auto", "required"]) {
    test(`runTools, tool_choice ${choice}, stream ${stream}`, async () => {
      const asked = [];
      const get_weather = ({ city }) => (asked.push(city), '{"temperature": 17, "sky": "light rain"}');
      const tool = zodFunction({
        name: "get_weather", description: "The weather of a city", parameters: City, function: get_weather,
      });
      const request = ask(tools, WEATHER, { tools: [tool], tool_choice: choice, stream });
      // So small a model calls again and again, as long as it is shown the function.
      const runner = caller.chat.completions.runTools(request, { maxChatCompletions: 2 });
      await runner.done();
      assert.equal(asked[0], "Paris");
      const roles = runner.messages.map((message) => message.role);
      assert.deepEqual(roles.slice(0, 4), ["user", "assistant", "tool", "assistant"]);
    });
  }
}

test("aborting ends the work in the server", async () => {
  const controller = new AbortController();
  const request = ask(text, FRANCE, { max_tokens: 2000, stream: true, ignore_eos: true });
  const stream = await talker.chat.completions.create(request, { signal: controller.signal });
  await stream[Symbol.asyncIterator]().next();
  assert.equal(await metric(text, "num_requests_running"), 1);
  controller.abort();
  await idle(text);
});

test("aborting a request that does not stream ends its work too", async () => {
  const controller = new AbortController();
  const request = ask(text, FRANCE, { max_tokens: 2000, ignore_eos: true });
  const answer = talker.chat.completions.create(request, { signal: controller.signal });
  while ((await metric(text, "num_requests_running")) === 0);
  controller.abort();
  await assert.rejects(answer, OpenAI.APIUserAbortError);
  await idle(text);
});

test("completions and models", async () => {
  const prompt = "The capital of France is";
  const answer = await talker.completions.create({ model: text.model, prompt, max_tokens: 8, temperature: 0 });
  assert.match(answer.choices[0].text, /Paris/);
  const models = [];
  for await (const model of talker.models.list()) models.push(model.id);
  assert.ok(models.includes(text.model));
});

test("errors are the client's own classes", async () => {
  await assert.rejects(talker.chat.completions.create(ask(text, FRANCE, { temperature: -1 })), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return true;
  });
  const nobody = new OpenAI({ baseURL: text.api, apiKey: "wrong", maxRetries: 0 });
  await assert.rejects(nobody.models.list(), OpenAI.AuthenticationError);
  await assert.rejects(talker.models.retrieve("none"), OpenAI.NotFoundError);
});

test("an error inside a stream", async () => {
  const request = ask(text, FRANCE, { stream: true, max_tokens: 4000, ignore_eos: true, timeout: 3 });
  let content = "";
  await assert.rejects(async () => {
    for await (const chunk of await talker.chat.completions.create(request)) {
      content += chunk.choices[0].delta.content ?? "";
    }
  }, OpenAI.APIError);
  assert.notEqual(content, "");
});

const respond = (server, input, more) => ({
  model: server.model, input, temperature: 0, max_output_tokens: 64, ...more,
});

test("responses: create and stream", async () => {
  const request = respond(tools, FRANCE[0].content);
  const whole = await caller.responses.create(request);
  assert.match(whole.output_text, /Paris/);
  const stream = caller.responses.stream(request);
  let joined = "";
  stream.on("response.output_text.delta", (event) => (joined += event.delta));
  assert.equal((await stream.finalResponse()).output_text, whole.output_text);
  assert.equal(joined, whole.output_text);
});

test("responses: objects and arguments by zod", async () => {
  const format = zodTextFormat(Person, "person");
  const answer = await caller.responses.parse(respond(tools, BOB[0].content, { text: { format } }));
  assert.deepEqual(answer.output_parsed, { name: "Bob", age: 42 });
  const tool = zodResponsesFunction({ name: "get_weather", description: "The weather", parameters: City });
  const called = await caller.responses.parse(
    respond(tools, WEATHER[0].content, { tools: [tool], tool_choice: "required", parallel_tool_calls: false }),
  );
  assert.deepEqual(called.output[0].parsed_arguments, { city: "Paris" });
});
