// The openai package against real engines: node real.mjs BASE_URL FOLDER MODEL, where FOLDER has node_modules.
import assert from "node:assert/strict";
import { client, messages, openai, run } from "./checks.mjs";

const { NotFoundError } = openai;
const model = process.argv[4];

const checks = {
  async chat() {
    const body = { model, messages, max_tokens: 7, temperature: 0 };
    const whole = await client.chat.completions.create(body);
    assert.equal(whole.usage.completion_tokens, 7);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    assert.equal(text, whole.choices[0].message.content);
  },
  async structuredOutput() {
    const schema = {
      type: "object",
      properties: { city: { enum: ["Bern", "Basel"] } },
      required: ["city"],
      additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { name: "place", schema, strict: true } };
    const answer = await client.chat.completions.parse({ model, messages, max_tokens: 99, response_format });
    assert.match(answer.choices[0].message.parsed.city, /^(Bern|Basel)$/);
  },
  async responses() {
    const first = await client.responses.create({ model, input: "hi", max_output_tokens: 5 });
    const next = { model, input: "go on", previous_response_id: first.id, max_output_tokens: 5 };
    for (let turn = 0; turn < 4; turn++) {
      const { usage } = await client.responses.create(next);
      assert.ok(usage.input_tokens > first.usage.input_tokens);
    }
  },
  async streamedResponses() {
    const kinds = [];
    const body = { model, input: "hi", max_output_tokens: 5, stream: true };
    for await (const event of await client.responses.create(body)) kinds.push(event.type);
    assert.equal(kinds.at(0), "response.created");
    assert.match(kinds.at(-1), /^response\.(completed|incomplete)$/);
  },
  async errors() {
    const unknown = client.chat.completions.create({ model: "nobody", messages });
    await assert.rejects(unknown, (error) => error instanceof NotFoundError && /nobody/.test(error.message));
  },
};

await run(checks);
