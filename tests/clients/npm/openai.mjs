// The openai package against a frontend: node openai.mjs BASE_URL FOLDER, where FOLDER has node_modules.
import assert from "node:assert/strict";
import { client, messages, openai, run } from "./checks.mjs";

const { NotFoundError, BadRequestError } = openai;
const model = "m";
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", parameters } }];

const checks = {
  async chat() {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 7 });
    assert.equal(answer.choices[0].message.content.length, 7);
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.equal(typeof answer.usage.prompt_tokens_details.cached_tokens, "number");
  },
  async streamedChat() {
    const stream_options = { include_usage: true };
    const body = { model, messages, max_tokens: 7, stream: true, stream_options };
    let [text, usage] = ["", null];
    for await (const chunk of await client.chat.completions.create(body)) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.deepEqual([text.length, usage.completion_tokens], [7, 7]);
  },
  async tools() {
    let calls = 0;
    const weather = { ...tools[0].function, parse: JSON.parse, function: () => `${++calls}: 18 C` };
    const runner = client.chat.completions.runTools({
      model,
      messages,
      tools: [{ type: "function", function: weather }],
    });
    assert.ok((await runner.finalContent()).length > 10);
    assert.equal(calls, 1);
  },
  async streamedTools() {
    const runner = client.chat.completions.stream({ model, messages, tools });
    const [call] = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
    assert.equal(typeof JSON.parse(call.function.arguments).city, "string");
  },
  async structuredOutput() {
    const json_schema = { name: "place", schema: parameters, strict: true };
    const response_format = { type: "json_schema", json_schema };
    const answer = await client.chat.completions.parse({ model, messages, response_format });
    assert.equal(typeof answer.choices[0].message.parsed.city, "string");
  },
  async responses() {
    const first = await client.responses.create({ model, input: "hi", max_output_tokens: 5 });
    assert.equal(first.output_text.length, 5);
    const next = { model, input: "go on", previous_response_id: first.id };
    for (let turn = 0; turn < 4; turn++) {
      assert.ok((await client.responses.create(next)).output_text);
    }
  },
  async streamedResponses() {
    const kinds = [];
    const functions = [{ type: "function", name: "weather", parameters, strict: true }];
    const body = { model, input: "hi", tools: functions, stream: true };
    for await (const event of await client.responses.create(body)) kinds.push(event.type);
    assert.equal(kinds.at(0), "response.created");
    assert.equal(kinds.at(-1), "response.completed");
    assert.ok(kinds.includes("response.function_call_arguments.done"));
  },
  async embeddings() {
    const { data } = await client.embeddings.create({ model, input: ["a", "b"] });
    assert.deepEqual(data.map((one) => one.embedding.length), [16, 16]);
  },
  async models() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.ok(names.includes(model));
  },
  async errors() {
    const unknown = client.chat.completions.create({ model: "nobody", messages });
    await assert.rejects(unknown, (error) => error instanceof NotFoundError && /nobody/.test(error.message));
    await assert.rejects(client.responses.create({ model, input: [] }), BadRequestError);
  },
};

await run(checks);
