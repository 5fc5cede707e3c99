// openai-node and Vercel's AI SDK as judges. `python -m tests.conformance` starts this in the judges' own environment.
// REAL_URL serves the real small model, SCRIPTED_URL the scripted one, which says what a prompt dictates.

import assert from "node:assert/strict";
import { test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const { REAL_URL, REAL_MODEL, SCRIPTED_URL } = process.env;
const real = new OpenAI({ baseURL: REAL_URL, apiKey: "local", maxRetries: 0 });
const scripted = new OpenAI({ baseURL: SCRIPTED_URL, apiKey: "local", maxRetries: 0 });
const question = [{ role: "user", content: "Count to five." }];
const asked = { model: REAL_MODEL, messages: question, temperature: 0, max_tokens: 24 };

const dictated = (text) => `\x0e${text}\x0f`;
const call = (city) => `<tool_call>\n{"name": "weather", "arguments": {"city": "${city}"}}\n</tool_call>`;
const Weather = z.object({ city: z.string() });
const Person = z.object({ name: z.string(), age: z.number(), tags: z.array(z.enum(["a", "b"])).max(2) });
const rain = ({ city }) => dictated(`It rains in ${city}.`);

test("openai-node: models are listed", async () => {
  const ids = [];
  for await (const model of real.models.list()) ids.push(model.id);
  assert.deepEqual(ids, [REAL_MODEL]);
});

test("openai-node: a stream joins to the whole answer, with usage at the end", async () => {
  const whole = await real.chat.completions.create(asked);
  const stream = await real.chat.completions.create({
    ...asked,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "";
  let usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.deepEqual(usage.completion_tokens, whole.usage.completion_tokens);
});

test("openai-node: the stream helper accumulates several choices with their log probabilities", async () => {
  const several = { ...asked, n: 3, seed: 1, temperature: 1, logprobs: true, top_logprobs: 1 };
  const whole = await real.chat.completions.create(several);
  const final = await real.chat.completions.stream(several).finalChatCompletion();
  assert.equal(final.choices.length, 3);
  for (const [index, choice] of final.choices.entries()) {
    assert.equal(choice.message.content, whole.choices[index].message.content);
    assert.equal(choice.finish_reason, whole.choices[index].finish_reason);
    assert.deepEqual(choice.logprobs.content, whole.choices[index].logprobs.content);
  }
});

test("openai-node: parse with zod", async () => {
  const completion = await real.chat.completions.parse({
    ...asked,
    max_tokens: 400,
    response_format: zodResponseFormat(Person, "person"),
  });
  assert.equal(completion.choices[0].finish_reason, "stop");
  Person.parse(completion.choices[0].message.parsed);
});

test("openai-node: a demanded call of the real model has the arguments that zod wants", async () => {
  const completion = await real.chat.completions.parse({
    ...asked,
    messages: [{ role: "user", content: "What is the weather in Paris?" }],
    max_tokens: 400,
    parallel_tool_calls: false,
    tools: [zodFunction({ name: "weather", parameters: Weather })],
    tool_choice: "required",
  });
  const [one, ...others] = completion.choices[0].message.tool_calls;
  Weather.parse(one.function.parsed_arguments);
  assert.deepEqual(others, []);
  assert.equal(completion.choices[0].finish_reason, "tool_calls");
});

for (const stream of [false, true]) {
  test(`openai-node: the tools runner goes round, ${stream ? "streamed" : "whole"}`, async () => {
    const cities = [];
    const runner = scripted.chat.completions.runTools({
      model: "scripted",
      stream,
      messages: [{ role: "user", content: dictated(`${call("Paris")}\n${call("Tokyo")}`) }],
      tools: [
        {
          type: "function",
          function: {
            name: "weather",
            description: "The weather of a city.",
            parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
            parse: JSON.parse,
            function: (args) => {
              cities.push(args.city);
              return rain(args);
            },
          },
        },
      ],
    });
    assert.equal(await runner.finalContent(), "It rains in Tokyo.");
    assert.deepEqual(cities, ["Paris", "Tokyo"]);
  });
}

test("openai-node: an aborted stream ends, and the server goes on", async () => {
  const stream = await real.chat.completions.create({ ...asked, max_tokens: 800, ignore_eos: true, stream: true });
  let id = "";
  for await (const chunk of stream) {
    id = chunk.id;
    if (chunk.choices[0]?.delta?.content) break;
  }
  for (;;) {
    const state = await real.get(`/chat/completions/${id}`);
    if (state.status === "cancelled") break;
    assert.equal(state.status, "in_progress");
  }
  assert.ok((await real.chat.completions.create(asked)).choices[0].message.content);
});

test("openai-node: errors are of their classes", async () => {
  await assert.rejects(real.chat.completions.create({ ...asked, temperature: 3 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "temperature");
    return error.code === "invalid_value";
  });
  await assert.rejects(real.chat.completions.create({ ...asked, model: "nope" }), OpenAI.NotFoundError);
});

test("openai-node: a text is completed", async () => {
  const completion = await real.completions.create({
    model: REAL_MODEL,
    prompt: "The capital of France",
    max_tokens: 5,
    temperature: 0,
    echo: true,
  });
  assert.match(completion.choices[0].text, /^The capital of France./);
});

const provider = (baseURL, options) =>
  createOpenAICompatible({ name: "tokenferry", baseURL, apiKey: "local", includeUsage: true, ...options });
const weather = tool({ description: "The weather of a city.", inputSchema: Weather, execute: async (args) => rain(args) });

test("AI SDK: text is streamed, with usage", async () => {
  const whole = await real.chat.completions.create(asked);
  const result = streamText({
    model: provider(REAL_URL)(REAL_MODEL),
    messages: question,
    temperature: 0,
    maxOutputTokens: 24,
  });
  let text = "";
  for await (const part of result.textStream) text += part;
  assert.equal(text, whole.choices[0].message.content);
  assert.equal((await result.usage).outputTokens, whole.usage.completion_tokens);
});

test("AI SDK: tools are called in a stream and in a whole answer, and their results taken", async () => {
  const options = {
    model: provider(SCRIPTED_URL)("scripted"),
    prompt: dictated(call("Paris")),
    tools: { weather },
    stopWhen: stepCountIs(3),
  };
  const result = streamText(options);
  let text = "";
  for await (const part of result.textStream) text += part;
  assert.equal(text, "It rains in Paris.");
  assert.equal((await result.steps).length, 2);
  assert.equal((await generateText(options)).text, "It rains in Paris.");
});

test("AI SDK: an object follows its schema", async () => {
  const { object } = await generateObject({
    model: provider(REAL_URL, { supportsStructuredOutputs: true })(REAL_MODEL),
    prompt: "Ann is 40 years old.",
    schema: Person,
    temperature: 0,
    maxOutputTokens: 400,
  });
  Person.parse(object);
});
