//! Messages and tools as vLLM hands them to the template: not as the client sent them.

use serde_json::{Map, Value, json};

use super::content::ContentFormat;

/// Why a conversation cannot be prepared.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Not reproducible here: route without tokens.
    Unsupported(String),
    /// Wrong for the engine too: refuse.
    Invalid(String),
    /// More steps than a quick try allows.
    Costly,
    /// More bytes than were allowed.
    TooLong,
}

type Object = Map<String, Value>;

/// Message number `at` as the template gets it; it depends on no other.
///
/// # Source
/// vLLM `parse_chat_messages`: text parts are joined by a line feed, and fields it does not know are left out.
pub(super) fn prepare_message(
    at: usize,
    message: Value,
    format: ContentFormat,
) -> Result<Value, Stop> {
    let Value::Object(mut message) = message else {
        return Err(Stop::Invalid(format!("messages[{at}]: must be an object")));
    };
    let Some(role) = message.get("role").and_then(Value::as_str).map(str::to_owned) else {
        return Err(Stop::Invalid(format!("messages[{at}].role: must be a string")));
    };
    parse_arguments(&mut message, &role);
    let content = message.get_mut("content").map(Value::take).unwrap_or_default();
    let content = prepare_content(content, format, role == "tool").map_err(|stop| match stop {
        Stop::Invalid(why) => Stop::Invalid(format!("messages[{at}].content: {why}")),
        other => other,
    })?;
    Ok(Value::Object(known_fields(message, &role, content)))
}

/// The fields vLLM carries over, in its order.
fn known_fields(mut message: Object, role: &str, content: Value) -> Object {
    let mut out = Object::new();
    let mut take = |key: &str| message.get_mut(key).map(Value::take).filter(|v| !v.is_null());
    out.insert("role".to_owned(), role.into());
    out.insert("content".to_owned(), content);
    match role {
        "assistant" => {
            let calls = take("tool_calls").filter(|calls| *calls != json!([]));
            out.extend(calls.map(|calls| ("tool_calls".to_owned(), calls)));
            let old_name = take("reasoning_content");
            if let Some(reasoning) = take("reasoning").or(old_name) {
                out.insert("reasoning".to_owned(), reasoning.clone());
                out.insert("reasoning_content".to_owned(), reasoning);
            }
        }
        "tool" => out.extend(take("tool_call_id").map(|id| ("tool_call_id".to_owned(), id))),
        _ => {}
    }
    for key in ["name", "task"] {
        let text = take(key).filter(Value::is_string);
        out.extend(text.map(|text| (key.to_owned(), text)));
    }
    if role == "developer" {
        out.insert("tools".to_owned(), take("tools").unwrap_or_default());
    }
    out
}

fn prepare_content(content: Value, format: ContentFormat, is_tool: bool) -> Result<Value, Stop> {
    // Most templates take tool results as a string only, so vLLM joins them in any format.
    let is_string = format == ContentFormat::String || is_tool;
    let parts = match content {
        Value::Null => Vec::new(),
        Value::String(text) if is_string => return Ok(text.into()),
        Value::String(text) => vec![Value::String(text)],
        Value::Array(parts) => parts,
        _ => return Err(bad_content()),
    };
    let texts = parts.into_iter().filter_map(|part| part_text(part).transpose());
    let texts: Vec<String> = texts.collect::<Result<_, Stop>>()?;
    Ok(match is_string {
        false => texts.into_iter().map(|text| json!({"type": "text", "text": text})).collect(),
        true => texts.join("\n").into(),
    })
}

/// The text of a part; `None` for a text part without text, which vLLM skips.
fn part_text(mut part: Value) -> Result<Option<String>, Stop> {
    if let Value::String(text) = part {
        return Ok(Some(text));
    }
    let kind = part_kind(&part)?;
    let field = match kind.as_str() {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        _ => return Err(Stop::Unsupported(format!("content part of type {kind:?}"))),
    };
    match part.get_mut(field).map(Value::take).unwrap_or_default() {
        Value::String(text) => Ok(Some(text)),
        Value::Null if matches!(kind.as_str(), "text" | "refusal") => Ok(None),
        _ => Err(Stop::Invalid(format!("a part of type {kind:?} needs a string {field:?}"))),
    }
}

fn part_kind(part: &Value) -> Result<String, Stop> {
    // Without a type it is an image or audio in a short form.
    match part.get("type") {
        Some(Value::String(kind)) => Ok(kind.clone()),
        _ if part.is_object() => Err(Stop::Unsupported("content part without type".to_owned())),
        _ => Err(bad_content()),
    }
}

fn bad_content() -> Stop {
    Stop::Invalid("must be a string, a list of parts or null".to_owned())
}

/// Clients send the arguments of past tool calls as a JSON string, templates want the object.
fn parse_arguments(message: &mut Object, role: &str) {
    if role != "assistant" {
        return;
    }
    let Some(Value::Array(calls)) = message.get_mut("tool_calls") else { return };
    for call in calls {
        let Some(Value::Object(function)) = call.get_mut("function") else { continue };
        match function.get_mut("arguments") {
            Some(Value::Object(_) | Value::Array(_)) => {}
            Some(Value::String(text)) => {
                // vLLM takes broken JSON for no arguments.
                let parsed = serde_json::from_str(text).unwrap_or_else(|_| json!({}));
                function.insert("arguments".to_owned(), parsed);
            }
            _ => {
                function.insert("arguments".to_owned(), json!({}));
            }
        }
    }
}

/// The tools as the template gets them; null if there are none.
///
/// # Source
/// The request model that vLLM (`ChatCompletionToolsParam`) dumps: its field order, and null for
/// what is not given.
pub(super) fn prepare_tools(tools: Option<Value>) -> Result<Value, Stop> {
    let tools = match tools {
        None | Some(Value::Null) => return Ok(Value::Null),
        Some(Value::Array(tools)) => tools,
        Some(_) => return Err(Stop::Invalid("tools: must be a list".to_owned())),
    };
    let mut out = Vec::with_capacity(tools.len());
    for mut tool in tools {
        let kind = tool.get("type").cloned().unwrap_or_else(|| "function".into());
        let Some(Value::Object(mut function)) = tool.get_mut("function").map(Value::take) else {
            return Err(Stop::Unsupported("tool that is not a function".to_owned()));
        };
        let mut ordered = Object::new();
        for key in ["name", "description", "parameters"] {
            ordered.insert(key.to_owned(), function.shift_remove(key).unwrap_or_default());
        }
        // Fields beyond its own are kept, behind them.
        ordered.extend(function);
        out.push(json!({"type": kind, "function": ordered}));
    }
    Ok(Value::Array(out))
}
