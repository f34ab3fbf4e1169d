//! Converts Responses and Messages to chats, as engines do before they apply their template.
//!
//! Other engine versions may convert differently: the parity probe compares the tokens of both
//! APIs, and requests without a certain conversion are left to the engine.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::api::Api;
use super::body::Body;

/// Claude Code begins its system prompt with a line that differs between requests; engines drop it.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// The body of the equivalent chat; `None` if engines may convert it differently.
///
/// # Cost
/// Reads and writes the body once.
pub(crate) fn chat_of(api: Api, body: &Body) -> Option<Body> {
    let chat = match api {
        Api::Messages => of_messages(body.read().ok()?)?,
        Api::Responses => of_response(body.read().ok()?)?,
        _ => return None,
    };
    Body::parse(Bytes::from(chat.to_string())).ok()
}

/// The fields that determine the chat of a Messages request.
#[derive(Deserialize)]
struct Messages {
    #[serde(default)]
    model: Value,
    system: Option<Content>,
    messages: Vec<Turn>,
    tools: Option<Vec<Tool>>,
    tool_choice: Option<ToolChoice>,
    #[serde(default, rename = "thinking")]
    _thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    #[serde(default)]
    chat_template_kwargs: Value,
}

#[derive(Deserialize)]
struct Turn {
    role: Role,
    content: Content,
}

/// Some engines merge a system message among the others, others do not.
#[derive(Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    User,
    Assistant,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

/// Other blocks, including images, are left to the engine.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block {
    Text { text: String },
    Thinking { thinking: String },
    RedactedThinking {},
    ToolUse { id: String, name: String, input: Map<String, Value> },
    ToolResult { tool_use_id: String, content: Option<Content> },
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    description: Option<String>,
    input_schema: Map<String, Value>,
    strict: Option<bool>,
    defer_loading: Option<bool>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ToolChoice {
    Auto,
    Any,
    None,
    Tool { name: String },
}

/// If it is missing, the engine finds out by trial how its template disables thinking.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Thinking {
    Enabled {},
    Adaptive {},
}

#[derive(Deserialize)]
struct OutputConfig {
    #[serde(default)]
    effort: Value,
}

fn of_messages(request: Messages) -> Option<Value> {
    let mut messages = Vec::with_capacity(request.messages.len() + 1);
    let system = match request.system {
        None => String::new(),
        Some(Content::Text(text)) => text,
        Some(Content::Blocks(blocks)) => system_text(blocks)?,
    };
    if !system.is_empty() {
        messages.push(json!({ "role": "system", "content": system }));
    }
    for Turn { role, content } in request.messages {
        match content {
            Content::Text(text) => messages.push(json!({ "role": role, "content": text })),
            Content::Blocks(blocks) if role == Role::User => user(blocks, &mut messages)?,
            Content::Blocks(blocks) => messages.push(assistant(blocks)?),
        }
    }
    let tools = match request.tools {
        None => Value::Null,
        Some(tools) => Value::Array(tools.into_iter().map(tool).collect::<Option<_>>()?),
    };
    let tool_choice = match request.tool_choice {
        None if tools.is_null() => Value::Null,
        None | Some(ToolChoice::Auto) => json!("auto"),
        Some(ToolChoice::Any) => json!("required"),
        Some(ToolChoice::None) => json!("none"),
        Some(ToolChoice::Tool { name }) => named_tool(&name),
    };
    Some(json!({
        "model": request.model,
        "messages": messages,
        "tools": tools,
        "tool_choice": tool_choice,
        "reasoning_effort": request.output_config.map(|config| config.effort),
        "chat_template_kwargs": request.chat_template_kwargs,
    }))
}

fn system_text(blocks: Vec<Block>) -> Option<String> {
    let mut joined = String::new();
    for block in blocks {
        let Block::Text { text } = block else { return None };
        if !text.starts_with(BILLING_HEADER) {
            joined.push_str(&text);
        }
    }
    Some(joined)
}

/// Tool results become separate messages, before the user's text.
fn user(blocks: Vec<Block>, messages: &mut Vec<Value>) -> Option<()> {
    let mut texts = Vec::new();
    for block in blocks {
        match block {
            Block::Text { text } => texts.push(text),
            Block::ToolResult { tool_use_id, content } => messages.push(json!({
                "role": "tool",
                "tool_call_id": tool_use_id,
                "content": result_text(content)?,
            })),
            _ => return None,
        }
    }
    if let Some(content) = content(texts) {
        messages.push(json!({ "role": "user", "content": content }));
    }
    Some(())
}

fn result_text(content: Option<Content>) -> Option<String> {
    let blocks = match content {
        None => return Some(String::new()),
        Some(Content::Text(text)) => return Some(text),
        Some(Content::Blocks(blocks)) => blocks,
    };
    let text = |block| match block {
        Block::Text { text } => Some(text),
        _ => None,
    };
    Some(blocks.into_iter().map(text).collect::<Option<Vec<_>>>()?.join("\n"))
}

fn assistant(blocks: Vec<Block>) -> Option<Value> {
    let (mut texts, mut calls, mut reasoning) = (Vec::new(), Vec::new(), None::<String>);
    for block in blocks {
        match block {
            Block::Text { text } => texts.push(text),
            Block::Thinking { thinking } => reasoning.get_or_insert_default().push_str(&thinking),
            Block::RedactedThinking {} => {}
            Block::ToolUse { id, name, input } => {
                calls.push(call(&id, &name, &Value::Object(input).to_string()));
            }
            Block::ToolResult { .. } => return None,
        }
    }
    let mut message = Map::new();
    message.insert("role".to_owned(), json!("assistant"));
    let calls = (!calls.is_empty()).then(|| Value::Array(calls));
    for (name, value) in [
        ("reasoning", reasoning.map(Value::String)),
        ("tool_calls", calls),
        ("content", content(texts)),
    ] {
        if let Some(value) = value {
            message.insert(name.to_owned(), value);
        }
    }
    // A message without any content is rare, and templates differ on it.
    (message.len() > 1).then_some(Value::Object(message))
}

/// One text is a string, several are a list; empty ones are dropped.
fn content(texts: Vec<String>) -> Option<Value> {
    let mut texts: Vec<_> = texts.into_iter().filter(|text| !text.is_empty()).collect();
    match texts.len() {
        0 => None,
        1 => texts.pop().map(Value::String),
        _ => Some(texts.into_iter().map(|text| json!({ "type": "text", "text": text })).collect()),
    }
}

fn tool(tool: Tool) -> Option<Value> {
    let Tool { name, description, input_schema: mut parameters, strict, defer_loading } = tool;
    if defer_loading.is_some() {
        return None;
    }
    parameters.entry("type").or_insert_with(|| json!("object"));
    let mut function =
        json!({ "name": name, "description": description, "parameters": parameters });
    if let Some(strict) = strict {
        function["strict"] = json!(strict);
    }
    Some(json!({ "type": "function", "function": function }))
}

fn named_tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name } })
}

fn call(id: &str, name: &str, arguments: &str) -> Value {
    let function = json!({ "name": name, "arguments": arguments });
    json!({ "id": id, "type": "function", "function": function })
}

/// The fields that determine the chat of a Responses request.
#[derive(Deserialize)]
struct Response {
    #[serde(default)]
    model: Value,
    instructions: Option<String>,
    input: Input,
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Value,
    reasoning: Option<ReasoningConfig>,
    truncation: Option<String>,
    #[serde(default)]
    prompt: Value,
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Map<String, Value>>),
}

#[derive(Deserialize)]
struct ReasoningConfig {
    effort: Option<String>,
}

fn of_response(request: Response) -> Option<Value> {
    let is_cut = request.truncation.is_some_and(|how| how != "disabled");
    if is_cut || !request.prompt.is_null() {
        return None;
    }
    let mut messages = Vec::new();
    if let Some(text) = request.instructions.filter(|text| !text.is_empty()) {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match request.input {
        Input::Text(text) => messages.push(json!({ "role": "user", "content": text })),
        Input::Items(items) => {
            let is_continued = items.last().is_some_and(|item| {
                matches!(text_of(item, "status"), Some("in_progress" | "incomplete"))
            });
            if is_continued {
                return None;
            }
            let start = messages.len();
            for item in &items {
                push_item(item, &mut messages, start)?;
            }
        }
    }
    let tools = request.tools.unwrap_or_default();
    let tools: Vec<_> = tools.into_iter().map(flat_tool).collect::<Option<_>>()?;
    let effort = request.reasoning.and_then(|reasoning| reasoning.effort);
    let mut kwargs = request.chat_template_kwargs;
    if let Some(effort) = &effort {
        // Templates that think only on request are also enabled by an effort.
        let kwargs = kwargs.get_or_insert_default();
        kwargs.entry("enable_thinking").or_insert_with(|| json!(effort != "none"));
    }
    let tool_choice = match &request.tool_choice {
        Value::Object(choice) => named_tool(text_of(choice, "name")?),
        choice => choice.clone(),
    };
    Some(json!({
        "model": request.model,
        "messages": messages,
        "tool_choice": if tools.is_empty() { Value::Null } else { tool_choice },
        "tools": if tools.is_empty() { Value::Null } else { tools.into() },
        "reasoning_effort": effort,
        "chat_template_kwargs": kwargs,
    }))
}

/// Tools other than functions belong to the engine, which may convert them.
fn flat_tool(tool: Value) -> Option<Value> {
    let Value::Object(mut function) = tool else { return None };
    let is_function = function.shift_remove("type")? == "function";
    is_function.then(|| json!({ "type": "function", "function": function }))
}

/// Adds one item; consecutive text, reasoning and calls of the assistant form one message. Messages
/// before `start` do not come from items.
fn push_item(item: &Map<String, Value>, messages: &mut Vec<Value>, start: usize) -> Option<()> {
    let role = text_of(item, "role");
    let part = match (text_of(item, "type").unwrap_or("message"), role) {
        ("message", Some("assistant")) => ("content", json!(first_text(item.get("content")?)?)),
        ("message", Some(role @ ("user" | "system" | "developer"))) => {
            let content = item.get("content")?;
            if !is_text(content) {
                return None;
            }
            messages.push(json!({ "role": role, "content": content }));
            return Some(());
        }
        ("reasoning", _) => {
            if item.get("encrypted_content").is_some_and(|value| !value.is_null()) {
                return None;
            }
            let first = |name| item.get(name).and_then(|list| list.get(0)?.get("text")?.as_str());
            ("reasoning", json!(first("content").or_else(|| first("summary")).unwrap_or_default()))
        }
        ("function_call", _) if item.get("namespace").is_none_or(Value::is_null) => {
            let [id, name, arguments] =
                ["call_id", "name", "arguments"].map(|name| text_of(item, name));
            ("tool_calls", call(id?, name?, arguments?))
        }
        ("function_call_output", _) => {
            let (id, output) = (text_of(item, "call_id")?, text_of(item, "output")?);
            messages.push(json!({ "role": "tool", "tool_call_id": id, "content": output }));
            return Some(());
        }
        _ => return None,
    };
    let (name, value) = part;
    let last = messages[start..].last_mut().filter(|message| message["role"] == "assistant");
    match (last, name) {
        (Some(message), "tool_calls") => match message[name].as_array_mut() {
            Some(calls) => calls.push(value),
            None => message[name] = json!([value]),
        },
        (Some(message), _) if message.get(name).is_none() => message[name] = value,
        _ => {
            let value = if name == "tool_calls" { json!([value]) } else { value };
            messages.push(json!({ "role": "assistant", (name): value }));
        }
    }
    Some(())
}

/// The text of an answer: engines take only its first part.
fn first_text(content: &Value) -> Option<&str> {
    content.as_str().or_else(|| content.get(0)?.get("text")?.as_str())
}

fn is_text(content: &Value) -> bool {
    let is_text_part = |part: &Value| {
        let kind = part.get("type").and_then(Value::as_str);
        kind.is_some_and(|kind| kind == "input_text" || kind == "text")
    };
    content.is_string() || content.as_array().is_some_and(|parts| parts.iter().all(is_text_part))
}

fn text_of<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    object.get(name).and_then(Value::as_str)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn chat(api: Api, request: &Value) -> Option<Value> {
        let body = Body::parse(Bytes::from(request.to_string())).unwrap();
        let chat = chat_of(api, &body)?;
        let mut chat: Map<String, Value> = serde_json::from_slice(chat.bytes()).unwrap();
        chat.retain(|_, value| !value.is_null());
        Some(Value::Object(chat))
    }

    #[test]
    fn a_messages_request_is_the_chat_that_engines_make_of_it() {
        let request = json!({
            "model": "m",
            "max_tokens": 10,
            "system": [
                { "type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=5f;" },
                { "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } },
                { "type": "text", "text": " Use tools." },
            ],
            "messages": [
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "content": [
                    { "type": "thinking", "thinking": "A tool.", "signature": "s" },
                    { "type": "redacted_thinking", "data": "x" },
                    { "type": "text", "text": "" },
                    { "type": "tool_use", "id": "t1", "name": "w", "input": { "b": 1, "a": [2.5] } },
                ] },
                { "role": "user", "content": [
                    { "type": "tool_result", "tool_use_id": "t1", "content": [
                        { "type": "text", "text": "sunny" }, { "type": "text", "text": "warm" },
                    ] },
                    { "type": "text", "text": "And" },
                    { "type": "text", "text": "Rome?" },
                ] },
                { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t2" }] },
            ],
            "tools": [{ "name": "w", "input_schema": { "properties": {} } }],
            "thinking": { "type": "enabled", "budget_tokens": 2000 },
            "output_config": { "effort": "low" },
        });
        let wanted = json!({
            "model": "m",
            "messages": [
                { "role": "system", "content": "Be brief. Use tools." },
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "reasoning": "A tool.", "tool_calls": [{
                    "id": "t1",
                    "type": "function",
                    "function": { "name": "w", "arguments": "{\"b\":1,\"a\":[2.5]}" },
                }] },
                { "role": "tool", "tool_call_id": "t1", "content": "sunny\nwarm" },
                { "role": "user", "content": [
                    { "type": "text", "text": "And" }, { "type": "text", "text": "Rome?" },
                ] },
                { "role": "tool", "tool_call_id": "t2", "content": "" },
            ],
            "tools": [{ "type": "function", "function": {
                "name": "w",
                "description": null,
                "parameters": { "properties": {}, "type": "object" },
            } }],
            "tool_choice": "auto",
            "reasoning_effort": "low",
        });
        assert_eq!(chat(Api::Messages, &request), Some(wanted));
    }

    #[test]
    fn a_response_is_the_chat_that_engines_make_of_its_items() {
        let request = json!({
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                { "role": "developer", "content": "Politely." },
                { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
                { "type": "reasoning", "id": "r", "summary": [{ "type": "summary_text", "text": "Hm." }] },
                { "type": "message", "role": "assistant", "content": [
                    { "type": "output_text", "text": "Hello." }, { "type": "output_text", "text": "Lost." },
                ] },
                { "type": "function_call", "call_id": "c1", "name": "w", "arguments": "{}" },
                { "type": "function_call", "call_id": "c2", "name": "w", "arguments": "{}" },
                { "type": "function_call_output", "call_id": "c1", "output": "1" },
                { "role": "assistant", "content": "One." },
                { "role": "assistant", "content": "Two." },
            ],
            "tools": [{ "type": "function", "name": "w", "parameters": {}, "strict": true }],
            "tool_choice": { "type": "function", "name": "w" },
            "reasoning": { "effort": "low" },
        });
        let wanted = json!({
            "model": "m",
            "messages": [
                { "role": "system", "content": "Be brief." },
                { "role": "developer", "content": "Politely." },
                { "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
                { "role": "assistant", "reasoning": "Hm.", "content": "Hello.", "tool_calls": [
                    { "id": "c1", "type": "function", "function": { "name": "w", "arguments": "{}" } },
                    { "id": "c2", "type": "function", "function": { "name": "w", "arguments": "{}" } },
                ] },
                { "role": "tool", "tool_call_id": "c1", "content": "1" },
                { "role": "assistant", "content": "One." },
                { "role": "assistant", "content": "Two." },
            ],
            "tools": [{ "type": "function", "function": { "name": "w", "parameters": {}, "strict": true } }],
            "tool_choice": { "type": "function", "function": { "name": "w" } },
            "reasoning_effort": "low",
            "chat_template_kwargs": { "enable_thinking": true },
        });
        assert_eq!(chat(Api::Responses, &request), Some(wanted));
        let plain = chat(Api::Responses, &json!({ "model": "m", "input": "Hi" })).unwrap();
        assert_eq!(plain["messages"], json!([{ "role": "user", "content": "Hi" }]));
        assert!(plain.get("tools").is_none());
    }

    #[test]
    fn what_engines_may_take_otherwise_is_left_to_them() {
        let image = json!({ "type": "image", "source": { "type": "url", "url": "http://h/i" } });
        let said = |role: &str, block: Value| json!([{ "role": role, "content": [block] }]);
        for messages in [
            json!([{ "role": "system", "content": "in between" }]),
            said("user", image.clone()),
            said("user", json!({ "type": "tool_result", "tool_use_id": "t", "content": [image] })),
            said("user", json!({ "type": "tool_use", "id": "t", "name": "w", "input": {} })),
            said("assistant", json!({ "type": "tool_result", "tool_use_id": "t" })),
            said("assistant", json!({ "type": "text", "text": "" })),
            said("assistant", json!({ "type": "tool_use", "name": "w", "input": {} })),
            json!("text"),
        ] {
            let request = json!({ "model": "m", "messages": messages });
            assert_eq!(chat(Api::Messages, &request), None, "{messages}");
        }
        let hello = json!([{ "role": "user", "content": "hello" }]);
        for (field, value) in [
            ("thinking", json!({ "type": "disabled" })),
            ("tools", json!([{ "type": "web_search_20250305", "name": "web_search" }])),
            ("tools", json!([{ "name": "w", "input_schema": {}, "defer_loading": true }])),
        ] {
            let request = json!({ "model": "m", "messages": hello, field: value });
            assert_eq!(chat(Api::Messages, &request), None, "{field}");
        }
        for (field, value) in [
            ("input", json!([{ "type": "item_reference", "id": "i" }])),
            ("input", json!([{ "type": "reasoning", "summary": [], "encrypted_content": "x" }])),
            ("input", json!([{ "role": "user", "content": [{ "type": "input_image" }] }])),
            (
                "input",
                json!([{ "role": "assistant", "content": "to go on", "status": "incomplete" }]),
            ),
            (
                "input",
                json!([{ "type": "function_call", "call_id": "c", "name": "n",
                "arguments": "{}", "namespace": "s" }]),
            ),
            ("tools", json!([{ "type": "custom", "name": "apply_patch" }])),
            ("truncation", json!("auto")),
            ("prompt", json!({ "id": "p" })),
        ] {
            let mut request = json!({ "model": "m", "input": "hello" });
            request[field] = value;
            assert_eq!(chat(Api::Responses, &request), None, "{request}");
        }
        assert_eq!(chat(Api::Chat, &json!({ "model": "m", "messages": hello })), None);
    }
}
