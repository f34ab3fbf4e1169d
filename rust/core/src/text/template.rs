//! A model's chat template, rendered as the engine renders it.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Environment, ErrorKind, Value};
use serde_json::Value as Json;
use serde_json::value::RawValue;

use super::config::{FolderConfig, NamedTemplate};
use super::content::{ContentFormat, detect};
use super::jinja::environment;
use super::known::MessageCache;
use super::message::{Stop, prepare_message, prepare_tools};
use super::request::{ChatRequest, Effort};
use super::source::{rewrite, unix_lines};
use crate::cache::{CacheStats, Key};
use crate::error::{Error, Result};

/// Put behind a message that is to be continued, and looked for in the rendered text.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Most steps of a template, its "fuel": a loop over all messages within a loop over all messages has some
/// thousand messages then.
const MAX_STEPS: u64 = 50_000_000;

/// The same for a quick try: below a millisecond.
const QUICK_STEPS: u64 = 20_000;

/// Template variables that transformers' own arguments occupy; vLLM refuses them as kwargs.
const RESERVED_KWARGS: [&str; 2] = ["chat_template", "tokenize"];

/// Today's date for templates that write it into the prompt: seconds since 1970, UTC.
#[derive(Clone)]
pub struct WallClock(pub(super) Arc<dyn Fn() -> u64 + Send + Sync>);

impl WallClock {
    pub(super) fn now(&self) -> u64 {
        (self.0)()
    }
}

impl Default for WallClock {
    /// The machine's.
    fn default() -> Self {
        Self(Arc::new(|| {
            SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
        }))
    }
}

impl std::fmt::Debug for WallClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WallClock")
    }
}

/// What rendering came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Rendered {
    /// The prompt.
    Text(String),
    /// The template takes more steps than a quick try allows.
    Costly,
    /// The prompt has more bytes than were allowed.
    TooLong,
    /// The prompt cannot be known here, and why: route without tokens and count it.
    Unsupported(String),
}

/// The chat templates of a model, compiled.
///
/// # Source
/// transformers `apply_chat_template`, called as vLLM calls it.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// The same for those who have no time.
    quick: Environment<'static>,
    formats: Vec<(String, ContentFormat)>,
    special_tokens: Vec<(String, Value)>,
    known: MessageCache,
}

impl ChatTemplate {
    /// Load the templates of a model's folder: `chat_template.jinja`, else those in
    /// `tokenizer_config.json`, else the one in `chat_template.json`. `None` if there is none.
    ///
    /// # Errors
    /// `Error::Config` naming the file that is invalid or the template that does not compile.
    pub fn from_folder(folder: impl AsRef<Path>) -> Result<Option<Self>> {
        Self::load(&FolderConfig::read(folder.as_ref())?, 0)
    }

    /// One template, the special tokens it may name, and where `strftime_now` gets the date.
    ///
    /// # Errors
    /// `Error::Config` if the template does not compile.
    pub fn from_source(
        source: &str,
        special_tokens: &[(&str, &str)],
        clock: WallClock,
    ) -> Result<Self> {
        let owned = |(name, text): &(&str, &str)| ((*name).to_owned(), (*text).to_owned());
        let (name, source) = ("default".to_owned(), source.to_owned());
        let config = FolderConfig {
            named_tokens: special_tokens.iter().map(owned).collect(),
            templates: vec![NamedTemplate { name, source, file: None }],
            ..FolderConfig::default()
        };
        Self::build(&config, clock, 0)
    }

    /// Load with the folder's configuration already read; `cache_bytes` are for messages that come again.
    pub(super) fn load(config: &FolderConfig, cache_bytes: usize) -> Result<Option<Self>> {
        if config.templates.is_empty() {
            return Ok(None);
        }
        Self::build(config, WallClock::default(), cache_bytes).map(Some)
    }

    fn build(config: &FolderConfig, clock: WallClock, cache_bytes: usize) -> Result<Self> {
        let known = MessageCache::new(cache_bytes);
        let mut environment = environment(clock);
        let mut formats = Vec::with_capacity(config.templates.len());
        for NamedTemplate { name, source, file } in &config.templates {
            let source = &unix_lines(source);
            formats.push((name.clone(), detect(source)));
            environment.add_template_owned(name.clone(), rewrite(source)).map_err(|error| {
                let file = file.as_ref().map(|file| format!("{}: ", file.display()));
                let file = file.unwrap_or_default();
                Error::Config(format!("{file}chat template {name:?}: {error}"))
            })?;
        }
        let special_tokens = config
            .named_tokens
            .iter()
            .map(|(name, text)| (name.clone(), Value::from(text.as_str())))
            .collect();
        let mut quick = environment.clone();
        environment.set_fuel(Some(MAX_STEPS));
        quick.set_fuel(Some(QUICK_STEPS));
        Ok(Self { environment, quick, formats, special_tokens, known })
    }

    /// The form of message content the template called `name` is given.
    pub fn content_format(&self, name: &str) -> Option<ContentFormat> {
        self.formats.iter().find(|(known, _)| known == name).map(|(_, format)| *format)
    }

    /// What the cache of messages has done so far; its pieces are messages.
    pub fn cache_stats(&self) -> CacheStats {
        self.known.stats()
    }

    /// The prompt of a chat request.
    ///
    /// # Errors
    /// `Error::InvalidArgument` for requests the engine would refuse too: malformed messages, or a
    /// template that raises.
    ///
    /// # Cost
    /// Parsing the messages that are not known, a hash over the others, and running the template: 10 to 20 us for
    /// six messages of 4,500 characters.
    pub fn render(&self, request: &ChatRequest<'_>) -> Result<Rendered> {
        self.render_within(request, Effort::FULL)
    }

    /// As [`render`](Self::render), within `effort`.
    ///
    /// # Errors
    /// As [`render`](Self::render).
    ///
    /// # Cost
    /// At most 50 million steps of the template, some seconds; 20,000 of a quick try, below a millisecond. A quick
    /// try of a conversation of which more than a little is new ends before anything is parsed.
    pub fn render_within(&self, request: &ChatRequest<'_>, effort: Effort) -> Result<Rendered> {
        match self.try_render(request, effort) {
            Ok(text) => Ok(Rendered::Text(text)),
            Err(Stop::Unsupported(reason)) => Ok(Rendered::Unsupported(reason)),
            Err(Stop::Invalid(reason)) => Err(Error::invalid(reason)),
            Err(Stop::Costly) => Ok(Rendered::Costly),
            Err(Stop::TooLong) => Ok(Rendered::TooLong),
        }
    }

    fn try_render(&self, request: &ChatRequest<'_>, effort: Effort) -> Result<String, Stop> {
        if request.chat_template.is_some() {
            return Err(Stop::Unsupported("the request has its own chat_template".to_owned()));
        }
        let arguments = [request.tools, request.documents, request.chat_template_kwargs];
        let bytes = arguments.into_iter().flatten().map(str::len).sum();
        if !effort.allows(bytes, bytes) {
            return Err(Stop::Costly);
        }
        // It changes nothing, but must be JSON.
        parse("tool_choice", request.tool_choice)?;
        let tools = prepare_tools(parse("tools", request.tools)?)?;
        let (name, format) = self.choose(&tools)?;
        let mut raw = messages(request)?;
        let generates = request.add_generation_prompt.unwrap_or(true);
        let (mut last, mut continued) = (None, None);
        if request.continue_final_message == Some(true) {
            let at = raw.len().saturating_sub(1);
            last = raw.pop().map(|json| self.prepare(at, json, format)).transpose()?;
            if generates {
                return Err(Stop::Invalid(
                    "continue_final_message: set add_generation_prompt to false; the two exclude each other"
                        .to_owned(),
                ));
            }
            continued = Some(tag_last(last.as_mut())?);
        }
        let mut messages = self.values(&raw, format, effort)?;
        messages.extend(last.map(Value::from_serialize));
        let context = self.context(request, messages, tools, generates)?;
        // Text is seldom longer than the JSON it comes from.
        let expected = request.messages.map_or(0, str::len) + 1_024;
        let mut text = self.run(name, context, effort, expected)?;
        if let Some(said) = continued {
            cut_at_tag(&mut text, &said)?;
        }
        Ok(text)
    }

    /// Message number `at`, which `json` is, as the template gets it.
    fn prepare(&self, at: usize, json: &str, format: ContentFormat) -> Result<Json, Stop> {
        let message = serde_json::from_str(json)
            .map_err(|error| Stop::Invalid(format!("messages[{at}]: {error}")))?;
        prepare_message(at, message, format)
    }

    /// The values of messages: those that are known are not parsed again.
    fn values(
        &self,
        messages: &[&str],
        format: ContentFormat,
        effort: Effort,
    ) -> Result<Vec<Value>, Stop> {
        let all = messages.iter().map(|json| json.len()).sum();
        let known = |json: &&str| {
            let key = self.known.key(json, format, all);
            (key, self.known.find(key))
        };
        let found: Vec<(Option<Key>, Option<Value>)> = messages.iter().map(known).collect();
        let pairs = messages.iter().zip(&found);
        let new = pairs.filter(|(_, (_, found))| found.is_none()).map(|(json, _)| json.len());
        if !effort.allows(all, new.sum()) {
            return Err(Stop::Costly);
        }
        let mut values = Vec::with_capacity(messages.len() + 1);
        for (at, (json, (key, found))) in messages.iter().zip(found).enumerate() {
            values.push(match found {
                Some(value) => value,
                None => self.known.keep(key, &self.prepare(at, json, format)?),
            });
        }
        Ok(values)
    }

    /// `tool_use` for requests with tools if there is such a template, else `default`.
    fn choose(&self, tools: &Json) -> Result<(&str, ContentFormat), Stop> {
        let find = |wanted: &str| self.formats.iter().find(|(name, _)| name == wanted);
        let special = if tools.is_null() { None } else { find("tool_use") };
        special
            .or_else(|| find("default"))
            .map(|(name, format)| (name.as_str(), *format))
            .ok_or_else(|| Stop::Unsupported("no template is named default".to_owned()))
    }

    /// The template's variables; later ones outrank earlier ones.
    fn context(
        &self,
        request: &ChatRequest<'_>,
        messages: Vec<Value>,
        tools: Json,
        generates: bool,
    ) -> Result<Value, Stop> {
        let mut context = self.special_tokens.clone();
        let mut put = |name: &str, value: Value| context.push((name.to_owned(), value));
        put("documents", Value::from(()));
        match parse("chat_template_kwargs", request.chat_template_kwargs)? {
            None => {}
            Some(Json::Object(kwargs)) => {
                for (name, value) in kwargs {
                    if RESERVED_KWARGS.contains(&name.as_str()) {
                        return Err(Stop::Invalid(format!(
                            "chat_template_kwargs: must not have {name:?}"
                        )));
                    }
                    put(&name, Value::from_serialize(value));
                }
            }
            Some(_) => {
                return Err(Stop::Invalid("chat_template_kwargs: must be an object".to_owned()));
            }
        }
        if let Some(effort) = parse("reasoning_effort", request.reasoning_effort)? {
            put("reasoning_effort", Value::from_serialize(effort));
        }
        // None of its own does not hide those of the kwargs.
        if let Some(documents) = parse("documents", request.documents)?.filter(|it| !it.is_null()) {
            put("documents", Value::from_serialize(documents));
        }
        put("add_generation_prompt", Value::from(generates));
        put("tools", Value::from_serialize(tools));
        put("messages", Value::from(messages));
        Ok(context.into_iter().collect())
    }

    fn run(
        &self,
        name: &str,
        context: Value,
        effort: Effort,
        expected_bytes: usize,
    ) -> Result<String, Stop> {
        let environment = if effort.is_quick { &self.quick } else { &self.environment };
        let bytes = Vec::with_capacity(expected_bytes.min(effort.text_bytes));
        let mut out = Bounded { bytes, left: effort.text_bytes };
        let template = environment.get_template(name);
        let done = template
            .and_then(|template| template.render_captured_to(context, &mut out).map(|_| ()));
        match done {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::OutOfFuel && effort.is_quick => {
                return Err(Stop::Costly);
            }
            Err(error) if error.kind() == ErrorKind::OutOfFuel => {
                let what = format!("the chat template takes more than {MAX_STEPS} steps");
                return Err(Stop::Unsupported(what));
            }
            Err(error) if error.kind() == ErrorKind::WriteFailure => return Err(Stop::TooLong),
            Err(error) => return Err(Stop::Invalid(format!("chat template: {error}"))),
        }
        String::from_utf8(out.bytes)
            .map_err(|error| Stop::Invalid(format!("chat template: {error}")))
    }
}

/// Takes so many bytes and no more.
struct Bounded {
    bytes: Vec<u8>,
    left: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.left = self.left.checked_sub(text.len()).ok_or(io::ErrorKind::FileTooLarge)?;
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn parse(field: &str, raw: Option<&str>) -> Result<Option<Json>, Stop> {
    let Some(raw) = raw else { return Ok(None) };
    serde_json::from_str(raw).map(Some).map_err(|error| Stop::Invalid(format!("{field}: {error}")))
}

/// The JSON of each message.
fn messages<'a>(request: &ChatRequest<'a>) -> Result<Vec<&'a str>, Stop> {
    let Some(list) = request.messages else {
        return Err(Stop::Invalid("messages: is required".to_owned()));
    };
    if let Some(places) = request.places {
        return Ok(places.iter().map(|place| &list[place.clone()]).collect());
    }
    if !list.trim_ascii_start().starts_with('[') {
        return Err(Stop::Invalid("messages: must be a list".to_owned()));
    }
    let raw: Vec<&RawValue> =
        serde_json::from_str(list).map_err(|error| Stop::Invalid(format!("messages: {error}")))?;
    Ok(raw.into_iter().map(RawValue::get).collect())
}

/// Mark the end of the last message; the text it had.
fn tag_last(last: Option<&mut Json>) -> Result<String, Stop> {
    let content = last.and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Json::Array(parts)) => parts.last_mut().and_then(|part| part.get_mut("text")),
        other => other,
    };
    let Some(Json::String(text)) = text else {
        return Err(Stop::Invalid("continue_final_message: needs a last message with text".into()));
    };
    let said = text.clone();
    text.push_str(CONTINUE_TAG);
    Ok(said)
}

/// Drop everything from the mark on; if the template trimmed the message, whitespace before it too.
fn cut_at_tag(text: &mut String, said: &str) -> Result<(), Stop> {
    let Some(at) = text.rfind(CONTINUE_TAG.trim()).filter(|_| text.contains(said.trim())) else {
        return Err(Stop::Invalid(
            "continue_final_message: the template omits the last message".to_owned(),
        ));
    };
    let is_kept = text[at..].starts_with(CONTINUE_TAG);
    text.truncate(at);
    if !is_kept {
        text.truncate(text.trim_end().len());
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A loop over all messages within a loop over all messages, as gpt-oss has one.
    const SQUARE: &str = "{% for a in messages %}{% for b in messages %}{% if b.content == 'z' %}\
                          {{ b.content }}{% endif %}{% endfor %}{% endfor %}done";

    #[test]
    fn a_template_has_an_end() {
        let mut template = ChatTemplate::from_source(SQUARE, &[], WallClock::default()).unwrap();
        assert_eq!(template.environment.fuel(), Some(MAX_STEPS));
        // So many take seconds where nothing is optimised.
        template.environment.set_fuel(Some(50 * QUICK_STEPS));
        let render = |count: usize, is_quick, text_bytes| {
            let messages = vec![json!({"role": "user", "content": "a"}); count];
            let messages = json!(messages).to_string();
            let request = ChatRequest { messages: Some(&messages), ..ChatRequest::default() };
            template.render_within(&request, Effort { text_bytes, is_quick }).unwrap()
        };
        let done = || Rendered::Text("done".to_owned());
        assert_eq!(render(10, true, 100), done());
        assert_eq!(render(10, true, 3), Rendered::TooLong);
        assert_eq!(render(200, true, 100), Rendered::Costly);
        assert_eq!(render(200, false, 100), done());
        let Rendered::Unsupported(why) = render(800, false, 100) else { panic!("it has no end") };
        assert!(why.contains("50000000 steps"), "{why}");
    }
}
