//! A request's JSON object: its fields are located once, and read or replaced individually; and those
//! that routing reads.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use bytestring::ByteString;
use kvflash_core::text::{ChatRequest, Field, Scan};
use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{Deserializer, IntoDeserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::Reject;
use crate::body::Rest;

/// Most values of a field that is read into memory, where each takes some tens of bytes.
pub(crate) const MAX_VALUES: usize = 1 << 20;

/// The field of a completion whose prompt is not text: thousands of bytes stand for a token.
pub(super) const EMBEDS: &str = "prompt_embeds";

/// A JSON object as received, with the position of each field's value.
#[derive(Debug, Clone)]
pub(crate) struct Body {
    bytes: Bytes,
    /// The same as text; empty if it is not JSON.
    text: ByteString,
    fields: Vec<Field>,
    /// Position of each message in its field.
    messages: Option<Vec<Range<usize>>>,
    /// What its client still sends.
    rest: Option<Arc<Rest>>,
}

impl Body {
    /// Locates the fields of an object. Their values are only checked for syntax.
    ///
    /// # Errors
    /// 400 for anything but a JSON object.
    ///
    /// # Cost
    /// One pass over the bytes.
    pub fn parse(bytes: Bytes) -> Result<Self, Reject> {
        if bytes.trim_ascii_start().first() == Some(&b'[') {
            return Err(Reject::bad_request("the body must be a JSON object, got a list"));
        }
        let text = ByteString::try_from(bytes.clone()).unwrap_or_default();
        let Some(Scan { fields, mut messages }) = Scan::of(&text) else {
            return Err(complaint(&bytes));
        };
        let field = fields.iter().rfind(|field| &*field.name == "messages");
        let start = field.map_or(0, |field| field.place.start);
        for place in messages.iter_mut().flatten() {
            *place = place.start - start..place.end - start;
        }
        Ok(Self { bytes, text, fields, messages, rest: None })
    }

    /// A body that is not JSON: it has no fields.
    pub fn opaque(bytes: Bytes) -> Self {
        let (text, fields, messages) = (ByteString::new(), Vec::new(), None);
        Self { bytes, text, fields, messages, rest: None }
    }

    /// An upload that begins with `bytes`.
    pub fn upload(bytes: Bytes, rest: Arc<Rest>) -> Self {
        Self { rest: Some(rest), ..Self::opaque(bytes) }
    }

    /// What its client still sends, of an upload.
    pub fn rest(&self) -> Option<&Arc<Rest>> {
        self.rest.as_ref()
    }

    /// Bytes that the length of its prompt is guessed from: its text, or all of an upload, with what is still to come
    /// as far as that is declared.
    pub fn prompt_bytes(&self) -> usize {
        match self.text.is_empty() {
            true => self.bytes.len() + self.rest.as_ref().map_or(0, |rest| rest.declared_bytes()),
            false => {
                let text = self.fields.iter().filter(|field| &*field.name != EMBEDS);
                text_bytes(self.bytes.len(), text)
            }
        }
    }

    /// The object as received.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Reads the fields that `T` has.
    ///
    /// # Errors
    /// 400 naming the field, what was expected and what came.
    pub fn read<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Reject> {
        let reader = || {
            let text = |field: &'a Field| (&*field.name, JsonText(self.text(&field.place)));
            MapDeserializer::<_, serde_json::Error>::new(self.fields.iter().map(text))
        };
        T::deserialize(reader()).map_err(|error| {
            let again: Result<T, _> = serde_path_to_error::deserialize(reader());
            let path = again.err().map(|error| error.path().to_string());
            match path.filter(|path| path != ".") {
                None => Reject::bad_request(named(error.to_string())),
                Some(path) => Reject::bad_request(format!("{path}: {}", without_place(&error))),
            }
        })
    }

    fn text(&self, place: &Range<usize>) -> &str {
        &self.text[place.clone()]
    }

    /// The object with changed values: `None` removes a field.
    pub fn with(&self, changes: &[(&str, Option<Value>)]) -> Bytes {
        let mut out = Vec::with_capacity(self.bytes.len() + 256);
        let mut put = |name: &str, value: &[u8]| {
            out.push(if out.is_empty() { b'{' } else { b',' });
            out.extend_from_slice(Value::from(name).to_string().as_bytes());
            out.push(b':');
            out.extend_from_slice(value);
        };
        let is_changed = |name: &str| changes.iter().any(|(changed, _)| *changed == name);
        for Field { name, place, .. } in self.fields.iter().filter(|one| !is_changed(&one.name)) {
            put(name, &self.bytes[place.clone()]);
        }
        for (name, value) in changes {
            if let Some(value) = value {
                put(name, value.to_string().as_bytes());
            }
        }
        if out.is_empty() {
            out.push(b'{');
        }
        out.push(b'}');
        out.into()
    }

    /// The object with this JSON as the value of one field: in its place, or appended. Of several
    /// fields of that name the last one is replaced, which is the one that engines read. `name`
    /// must not need escapes.
    pub fn with_json(&self, name: &str, json: &[u8]) -> Bytes {
        let known = self.fields.iter().rfind(|field| *field.name == *name);
        let end = self.bytes.iter().rposition(|byte| *byte == b'}').unwrap_or(self.bytes.len());
        let place = known.map_or(end..end, |field| field.place.clone());
        let mut out = Vec::with_capacity(self.bytes.len() + json.len() + name.len() + 4);
        out.extend_from_slice(&self.bytes[..place.start]);
        if known.is_none() {
            let comma = if self.fields.is_empty() { "" } else { "," };
            out.extend_from_slice(format!("{comma}\"{name}\":").as_bytes());
        }
        out.extend_from_slice(json);
        out.extend_from_slice(&self.bytes[place.end..]);
        out.into()
    }

    /// Whether the object has this field.
    pub fn has(&self, name: &str) -> bool {
        self.fields.iter().any(|field| *field.name == *name)
    }

    /// All fields with their JSON, in the order in which they came.
    pub fn fields(&self) -> impl Iterator<Item = (&str, &str)> {
        self.fields.iter().map(|field| (&*field.name, self.text(&field.place)))
    }

    /// The JSON of a field, the last one of that name.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().rfind(|field| *field.name == *name);
        field.map(|field| self.text(&field.place))
    }

    /// The JSON of a field that may come once: an engine may read another one of that name.
    ///
    /// # Errors
    /// 400 naming the field, if it comes twice.
    pub fn text_of_one(&self, name: &str) -> Result<Option<&str>, Reject> {
        match self.fields.iter().filter(|field| *field.name == *name).nth(1) {
            Some(_) => Err(Reject::bad_request(twice(name))),
            None => Ok(self.text_of(name)),
        }
    }

    /// The value of a field; `None` for null.
    ///
    /// # Errors
    /// 400 naming the field, if it comes twice, or has a value of another type or one that is
    /// nested too deeply.
    pub fn value<'a, T: Deserialize<'a>>(&'a self, name: &str) -> Result<Option<T>, Reject> {
        let value = self.text_of_one(name)?.map(serde_json::from_str::<Option<T>>);
        let wrong = |error| Reject::bad_request(format!("{name}: {}", without_place(&error)));
        Ok(value.transpose().map_err(wrong)?.flatten())
    }

    /// Bytes of text in these fields; see [`Field::weight`].
    pub fn weight(&self, names: &[&str]) -> usize {
        let fields = self.fields.iter().filter(|field| names.contains(&&*field.name));
        fields.map(|field| field.weight).sum()
    }

    /// Checks that the fields `is_read` selects can be read into memory.
    ///
    /// # Errors
    /// 400 naming a field with too many values, their number and the limit.
    ///
    /// # Cost
    /// None: values were counted when the fields were located.
    pub fn check_values(&self, is_read: impl Fn(&str) -> bool) -> Result<(), Reject> {
        let is_large = |field: &&Field| field.values > MAX_VALUES && is_read(&field.name);
        let Some(Field { name, values, .. }) = self.fields.iter().find(is_large) else {
            return Ok(());
        };
        Err(Reject::bad_request(format!(
            "{name}: it has {values} values, more than {MAX_VALUES}, the limit: send fewer"
        )))
    }

    /// Position of each message in the field `messages`, if that is a list.
    pub fn messages(&self) -> Option<&[Range<usize>]> {
        self.messages.as_deref()
    }
}

/// Bytes of text in an object of `bytes` bytes: images and the like left out.
fn text_bytes<'a>(bytes: usize, fields: impl IntoIterator<Item = &'a Field>) -> usize {
    // What is short weighs more than it is long.
    bytes.min(fields.into_iter().map(Field::weight_with_name).sum())
}

/// Bytes of text in the JSON of a message.
pub(super) fn message_bytes(json: &str) -> usize {
    Scan::of(json).map_or(json.len(), |scan| text_bytes(json.len(), &scan.fields))
}

/// The error of an object, with the field at its beginning if that came twice.
fn named(error: String) -> String {
    let name = error.strip_prefix("duplicate field `").and_then(|rest| rest.strip_suffix('`'));
    name.map(twice).unwrap_or(error)
}

fn twice(name: &str) -> String {
    format!("{name}: is given twice; send it once")
}

/// The error without its line and column: they count from the start of a field, not of the body.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    text.strip_suffix(&place).unwrap_or(&text).to_owned()
}

/// The error for a body that is not a JSON object, with its position.
fn complaint(bytes: &[u8]) -> Reject {
    type Fields<'a> = Object<BTreeMap<Box<str>, &'a RawValue>>;
    let mut json = serde_json::Deserializer::from_slice(bytes);
    let Err(error) = Fields::deserialize(&mut json) else {
        return Reject::bad_request("the body has characters after its JSON object");
    };
    let again = &mut serde_json::Deserializer::from_slice(bytes);
    let found: Result<Fields<'_>, _> = serde_path_to_error::deserialize(again);
    let path = found.err().map(|error| error.path().to_string());
    // "?" is the position at which a truncated body ends.
    match path.filter(|path| path != "." && path != "?") {
        None => Reject::bad_request(format!("the body is not a JSON object: {error}")),
        Some(path) => Reject::bad_request(format!("{path}: {error}")),
    }
}

/// The JSON of a value that is not parsed yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Raw<'a>(&'a str);

impl<'a> Raw<'a> {
    pub fn of(json: &'a str) -> Self {
        Self(json)
    }

    pub fn get(self) -> &'a str {
        self.0
    }
}

/// The name by which [`Raw`] requests the text from [`JsonText`].
const RAW: &str = "kvflash::Raw";

impl<'de: 'a, 'a> Deserialize<'de> for Raw<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl<'de> Visitor<'de> for Text {
            type Value = Raw<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field of a body")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
                Ok(Raw(text))
            }
        }
        deserializer.deserialize_newtype_struct(RAW, Text)
    }
}

/// An object. Without it serde takes a list for the fields of a struct in their order.
pub(super) struct Object<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Object<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Read<T> {
            type Value = Object<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                T::deserialize(MapAccessDeserializer::new(map)).map(Object)
            }
        }
        deserializer.deserialize_map(Read(PhantomData))
    }
}

/// Reads a field that is an [`Object`], or null.
pub(super) fn object<'de, T, D>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(value)| value))
}

/// The same, with a default in place of null.
pub(super) fn object_or_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    object(deserializer).map(Option::unwrap_or_default)
}

/// Reads the JSON of one field; a field that is kept as text or skipped is not scanned again.
struct JsonText<'a>(&'a str);

impl<'de> IntoDeserializer<'de, serde_json::Error> for JsonText<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for JsonText<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        serde_json::Deserializer::from_str(self.0).deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        if self.0 == "null" { visitor.visit_none() } else { visitor.visit_some(self) }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        match name {
            RAW => visitor.visit_borrowed_str(self.0),
            _ => visitor.visit_newtype_struct(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Self::Error> {
        serde_json::Deserializer::from_str(self.0).deserialize_enum(name, variants, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Self::Error> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier
    }
}

/// The fields that routing reads. All others are left to the engine.
#[derive(Debug, Default, Deserialize)]
#[serde(expecting = "an object")]
pub(crate) struct Envelope<'a> {
    #[serde(borrow)]
    pub model: Option<Cow<'a, str>>,
    pub messages: Option<Raw<'a>>,
    pub prompt: Option<Raw<'a>>,
    pub stream: Option<Raw<'a>>,
    pub tools: Option<Raw<'a>>,
    pub documents: Option<Raw<'a>>,
    pub chat_template: Option<Raw<'a>>,
    pub chat_template_kwargs: Option<Raw<'a>>,
    pub cache_salt: Option<Cow<'a, str>>,
    pub tool_choice: Option<Raw<'a>>,
    pub reasoning_effort: Option<Raw<'a>>,
    pub truncate_prompt_tokens: Option<Raw<'a>>,
    pub user: Option<Raw<'a>>,
    pub priority: Option<Raw<'a>>,
    pub add_generation_prompt: Option<bool>,
    pub continue_final_message: Option<bool>,
    pub add_special_tokens: Option<bool>,
    pub prompt_logprobs: Option<Raw<'a>>,
    pub echo: Option<Raw<'a>>,
    pub logprobs: Option<Raw<'a>>,
    pub n: Option<Raw<'a>>,
    pub best_of: Option<Raw<'a>>,
    pub use_beam_search: Option<Raw<'a>>,
    pub skip_reading_prefix_cache: Option<Raw<'a>>,
    pub kv_transfer_params: Option<Raw<'a>>,
    pub nvext: Option<Raw<'a>>,
}

impl<'a> Envelope<'a> {
    /// Whether the engine looks the prompt up in its prefix cache: not if it must compute the
    /// logprobs of the prompt, or skips its cache.
    pub fn reads_cache(&self) -> bool {
        let is_off = |field: Option<Raw<'_>>| is_off(field.map(Raw::get), "false");
        let echoes_logprobs = !is_off(self.echo) && !is_off(self.logprobs);
        !echoes_logprobs && is_off(self.prompt_logprobs) && is_off(self.skip_reading_prefix_cache)
    }

    /// Whether the engine uses its prefix cache, and reports that for a single prompt: not if it
    /// does not read its cache, generates several answers or receives the blocks from elsewhere.
    pub fn reuses_prefix(&self) -> bool {
        let are_off = |fields: &[Option<Raw<'_>>], off: &str| {
            fields.iter().all(|field| is_off(field.map(Raw::get), off))
        };
        self.reads_cache()
            && are_off(&[self.echo, self.use_beam_search, self.kv_transfer_params], "false")
            && are_off(&[self.n, self.best_of], "1")
    }

    /// The fields that determine a chat's tokens; `places` of its messages, if its body was scanned
    /// for them.
    pub fn chat(&self, places: Option<&'a [Range<usize>]>) -> ChatRequest<'a> {
        ChatRequest {
            messages: self.messages.map(Raw::get),
            places,
            tools: self.tools.map(Raw::get),
            tool_choice: self.tool_choice.map(Raw::get),
            documents: self.documents.map(Raw::get),
            chat_template_kwargs: self.chat_template_kwargs.map(Raw::get),
            chat_template: self.chat_template.map(Raw::get),
            reasoning_effort: self.reasoning_effort.map(Raw::get),
            truncate_prompt_tokens: self.truncate_prompt_tokens.map(Raw::get),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            add_special_tokens: self.add_special_tokens,
        }
    }
}

/// Whether a field's JSON is missing, null, or its value `off`.
pub(super) fn is_off(json: Option<&str>, off: &str) -> bool {
    json.is_none_or(|json| json == "null" || json == off)
}

/// What an engine is asked about a prompt: the fields that determine its tokens as they came, and
/// `more` of them.
pub(crate) fn ask_body(
    envelope: &Envelope<'_>,
    model: &str,
    prompt: Option<String>,
    more: &[(&str, Option<&str>)],
) -> Vec<u8> {
    let flag = |flag: Option<bool>| flag.map(|flag| if flag { "true" } else { "false" });
    let prompt = prompt.map(|prompt| json!(prompt).to_string());
    let fields = [
        ("prompt", prompt.as_deref()),
        ("messages", envelope.messages.map(Raw::get)),
        ("tools", envelope.tools.map(Raw::get)),
        ("chat_template", envelope.chat_template.map(Raw::get)),
        ("chat_template_kwargs", envelope.chat_template_kwargs.map(Raw::get)),
        ("add_generation_prompt", flag(envelope.add_generation_prompt)),
        ("continue_final_message", flag(envelope.continue_final_message)),
        ("add_special_tokens", flag(envelope.add_special_tokens)),
    ];
    let mut out = format!("{{\"model\":{}", json!(model));
    for (name, json) in fields.iter().chain(more) {
        if let Some(json) = json {
            [",\"", name, "\":", json].iter().for_each(|part| out.push_str(part));
        }
    }
    out.push('}');
    out.into_bytes()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
