//! One pass over a request's JSON object: where its fields and messages stand, and how much of them is text.

use std::borrow::Cow;
use std::ops::Range;

/// What a number takes, bytes.
const NUMBER_BYTES: usize = 8;
/// What a name or a list takes besides what is in it, bytes.
const VALUE_BYTES: usize = 32;

/// Fields of a message's parts that hold images, sounds and videos: engines put no text of theirs into the
/// prompt.
const MEDIA: [&str; 13] = [
    "audio",
    "audio_embeds",
    "audio_url",
    "file",
    "image",
    "image_embeds",
    "image_pil",
    "image_url",
    "input_audio",
    "input_image",
    // Of images and documents in Anthropic's Messages.
    "source",
    "video",
    "video_url",
];

/// Fields of tools and their calls: engines write all of them into the prompt, whatever names the tool's author chose.
const OF_TOOLS: [&str; 4] = ["arguments", "input", "input_schema", "parameters"];

/// Fields of a request that templates may write as they are, whatever names there are in them.
const WRITTEN: [&str; 3] = ["chat_template_kwargs", "documents", "tools"];

/// A field of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Field {
    /// Its name, unescaped.
    pub name: Box<str>,
    /// Where its value stands in the object.
    pub place: Range<usize>,
    /// Bytes of text in its value, images and the like left out; 8 for each number, 32 for each name and list, as
    /// much as they take when they are read.
    pub weight: usize,
    /// Values in it, at any depth, itself among them: reading it into memory takes some tens of bytes for each.
    pub values: usize,
}

impl Field {
    /// The weight of its value and its name.
    pub fn weight_with_name(&self) -> usize {
        VALUE_BYTES + self.name.len() + self.weight
    }
}

/// An object as it stands.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// Its fields, in their order; one that comes twice is here twice.
    pub fields: Vec<Field>,
    /// Where each element of the field `messages` stands, if that is a list.
    pub messages: Option<Vec<Range<usize>>>,
}

impl Scan {
    /// Find the fields of the object that `json` is. `None` for what is no object, or no JSON.
    ///
    /// # Cost
    /// One pass, some nanoseconds for 8 bytes; nothing is copied but the fields' names.
    pub fn of(json: &str) -> Option<Self> {
        let mut scanner =
            Scanner { json, at: 0, weight: 0, values: 0, settled: None, open: Vec::new() };
        let mut scan = Self::default();
        scanner.expect(b'{')?;
        if !scanner.skips(b'}') {
            loop {
                let name = unescaped(scanner.name()?)?;
                let messages = (name == "messages").then(Vec::new);
                let (place, messages) = scanner.value(messages, WRITTEN.contains(&&*name))?;
                let (weight, values) = (scanner.weight, scanner.values);
                scan.fields.push(Field { name: name.into(), place, weight, values });
                scan.messages = messages.or(scan.messages);
                if scanner.skips(b'}') {
                    break;
                }
                scanner.expect(b',')?;
            }
        }
        scanner.skip_space();
        (scanner.at == json.len()).then_some(scan)
    }
}

struct Scanner<'a> {
    json: &'a str,
    at: usize,
    /// Of the value that is being read.
    weight: usize,
    values: usize,
    /// How many lists and objects are open around a value in which further names change nothing, and the weight
    /// before it if it weighs nothing.
    settled: Option<(usize, Option<usize>)>,
    /// What is open: `[` or `{`.
    open: Vec<u8>,
}

impl<'a> Scanner<'a> {
    fn peek(&self) -> Option<u8> {
        self.json.as_bytes().get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    /// Whether `wanted` comes next, which is then passed.
    fn skips(&mut self, wanted: u8) -> bool {
        self.skip_space();
        let is_next = self.peek() == Some(wanted);
        self.at += usize::from(is_next);
        is_next
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        self.skips(wanted).then_some(())
    }

    /// A name, in its quotes, and the colon behind it.
    fn name(&mut self) -> Option<&'a str> {
        self.expect(b'"')?;
        let start = self.at;
        self.string()?;
        let raw = &self.json[start - 1..self.at];
        self.expect(b':')?;
        Some(raw)
    }

    /// A value of any depth, where it stands; its elements' places go into `elements` if it is a
    /// list. All of it counts if it `is_written`, images and the like too.
    fn value(&mut self, elements: Option<Vec<Range<usize>>>, is_written: bool) -> Option<Found> {
        self.skip_space();
        let start = self.at;
        let mut elements = elements.filter(|_| self.peek() == Some(b'['));
        (self.weight, self.values) = (0, 0);
        self.settled = is_written.then_some((0, None));
        self.open.clear();
        let mut element = start;
        loop {
            self.skip_space();
            if self.open.len() == 1 {
                element = self.at;
            }
            if self.opens()? {
                continue;
            }
            // Here a value has ended, and with it what it was the last part of.
            loop {
                if let Some((depth, before)) = self.settled
                    && self.open.len() == depth
                {
                    (self.weight, self.settled) = (before.unwrap_or(self.weight), None);
                }
                let Some(open) = self.open.last() else {
                    return Some((start..self.at, elements));
                };
                if let (1, Some(elements)) = (self.open.len(), &mut elements) {
                    elements.push(element..self.at);
                }
                let (is_object, close) = if *open == b'{' { (true, b'}') } else { (false, b']') };
                if self.skips(close) {
                    self.open.pop();
                    continue;
                }
                self.expect(b',')?;
                if is_object {
                    self.inner_name()?;
                }
                break;
            }
        }
    }

    /// Pass a value that has no parts, or the beginning of one that has: true if a part comes next.
    fn opens(&mut self) -> Option<bool> {
        let first = self.peek()?;
        self.values += 1;
        match first {
            b'"' => {
                self.at += 1;
                self.weight += self.string()?;
            }
            b'{' | b'[' => {
                self.at += 1;
                self.weight += VALUE_BYTES;
                let is_object = first == b'{';
                if !self.skips(if is_object { b'}' } else { b']' }) {
                    self.open.push(first);
                    if is_object {
                        self.inner_name()?;
                    }
                    return Some(true);
                }
            }
            _ => {
                self.weight += NUMBER_BYTES;
                match first {
                    b't' => self.word("true")?,
                    b'f' => self.word("false")?,
                    b'n' => self.word("null")?,
                    _ => self.number()?,
                }
            }
        }
        Some(false)
    }

    fn inner_name(&mut self) -> Option<()> {
        let raw = self.name()?;
        // Inside of a value a name may be no text: half a pair of surrogates.
        let name = unescaped(raw).unwrap_or(raw.into());
        let depth = self.open.len();
        self.skip_space();
        let rest = &self.json[self.at..];
        match (&*name, self.settled) {
            // Documents of Anthropic's Messages may be text.
            ("type", Some((around, Some(_)))) if around + 1 == depth => {
                let kind = rest.strip_prefix('"').and_then(|rest| rest.split('"').next());
                // A word with escapes may be either.
                let is_text = kind
                    .is_some_and(|kind| kind == "text" || kind == "content" || kind.contains('\\'));
                self.settled = self.settled.filter(|_| !is_text);
            }
            (_, Some(_)) => {}
            // Of search results it is an address.
            ("source", None) if !rest.starts_with('{') => {}
            (name, None) if MEDIA.contains(&name) => {
                self.settled = Some((depth, Some(self.weight)));
            }
            (name, None) if OF_TOOLS.contains(&name) => self.settled = Some((depth, None)),
            _ => {}
        }
        self.weight += VALUE_BYTES + name.len();
        Some(())
    }

    fn word(&mut self, word: &str) -> Option<()> {
        let is_it = self.json.as_bytes()[self.at..].starts_with(word.as_bytes());
        self.at += word.len();
        is_it.then_some(())
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        self.at += usize::from(self.peek() == Some(b'-'));
        match self.peek() {
            Some(b'0') => self.at += 1,
            _ => self.digits()?,
        }
        if self.peek() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            self.at += 1;
            self.at += usize::from(matches!(self.peek(), Some(b'+' | b'-')));
            self.digits()?;
        }
        Some(())
    }

    /// The rest of a string behind its quote; how many bytes it has when it is read.
    fn string(&mut self) -> Option<usize> {
        let bytes = self.json.as_bytes();
        let (start, mut saved) = (self.at, 0);
        loop {
            self.at = special(bytes, self.at)?;
            match bytes[self.at] {
                b'"' => {
                    self.at += 1;
                    return Some(self.at - 1 - start - saved);
                }
                b'\\' => match bytes.get(self.at + 1)? {
                    b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => {
                        self.at += 2;
                        saved += 1;
                    }
                    b'u' => {
                        let digits = bytes.get(self.at + 2..self.at + 6)?;
                        let code = digits.iter().try_fold(0, |code, digit| {
                            Some(code << 4 | char::from(*digit).to_digit(16)?)
                        })?;
                        self.at += 6;
                        saved += 6 - match code {
                            0..0x80 => 1,
                            // A character of four bytes takes two escapes.
                            0x80..0x800 | 0xd800..0xe000 => 2,
                            _ => 3,
                        };
                    }
                    _ => return None,
                },
                _ => return None,
            }
        }
    }
}

/// What stands in quotes; `None` where that is no text.
fn unescaped(raw: &str) -> Option<Cow<'_, str>> {
    match raw.contains('\\') {
        true => serde_json::from_str::<String>(raw).ok().map(Into::into),
        false => Some((&raw[1..raw.len() - 1]).into()),
    }
}

/// Where a value stands, and where its elements do.
type Found = (Range<usize>, Option<Vec<Range<usize>>>);

/// The first quote, backslash or control character at `from` or behind it.
fn special(bytes: &[u8], from: usize) -> Option<usize> {
    const BLOCK: usize = 64;
    let rest = bytes.get(from..)?;
    // Names end within these; texts go on, and whole blocks of them are checked with vector instructions.
    let (head, tail) = rest.split_at(rest.len().min(16));
    if let Some(at) = special_in_words(head) {
        return Some(from + at);
    }
    let is_clean = |block: &&[u8; BLOCK]| {
        block.iter().fold(0, |found, byte| found | u8::from(is_special(byte))) == 0
    };
    let clean = BLOCK * tail.as_chunks::<BLOCK>().0.iter().take_while(is_clean).count();
    special_in_words(&tail[clean..]).map(|at| from + head.len() + clean + at)
}

fn is_special(byte: &u8) -> bool {
    matches!(byte, b'"' | b'\\' | 0..0x20)
}

/// The first such byte, looking at eight bytes at a time.
fn special_in_words(bytes: &[u8]) -> Option<usize> {
    const ONES: u64 = u64::MAX / 255;
    // Bytes below `limit`; behind the first one it may name others, too.
    let below = |word: u64, limit: u64| word.wrapping_sub(ONES * limit) & !word & (ONES << 7);
    let (words, _) = bytes.as_chunks::<8>();
    let mut at = 0;
    for word in words {
        let word = u64::from_le_bytes(*word);
        let quote = below(word ^ (ONES * u64::from(b'"')), 1);
        let backslash = below(word ^ (ONES * u64::from(b'\\')), 1);
        let found = quote | backslash | below(word, 0x20);
        if found != 0 {
            return Some(at + found.trailing_zeros() as usize / 8);
        }
        at += 8;
    }
    bytes[at..].iter().position(is_special).map(|rest| at + rest)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use serde_json::value::RawValue;
    use serde_json::{Value, json};

    use super::*;

    /// Of the field `a`.
    fn weigh(json: &str) -> usize {
        Scan::of(&format!("{{\"a\":{json}}}")).unwrap().fields[0].weight
    }

    #[test]
    fn text_weighs_and_pictures_do_not() {
        assert_eq!(weigh(r#""four""#), 4);
        assert_eq!(weigh("[1, -2, 3.5, true, null]"), VALUE_BYTES + 5 * NUMBER_BYTES);
        let picture = format!(r#"{{"image_url": {{"url": ["{}", 1]}}}}"#, "a".repeat(1_000));
        assert_eq!(weigh(&picture), VALUE_BYTES);
        let part = r#"{"type": "text", "image": [[]], "text": "hello"}"#;
        assert_eq!(weigh(part), 3 * VALUE_BYTES + 17);
        assert_eq!(weigh(r#"{"im\u0061ge": "x"}"#), VALUE_BYTES);
    }

    #[test]
    fn values_are_counted_whatever_they_weigh() {
        let json = r#"{"a": 1, "b": [[], {}, {"image": [1, "x", null]}], "c": {"d": {"e": [2]}}}"#;
        let scan = Scan::of(json).unwrap();
        assert_eq!(scan.fields.iter().map(|field| field.values).collect::<Vec<_>>(), [1, 8, 4]);
    }

    #[test]
    fn text_weighs_whatever_tools_and_documents_call_it() {
        let text = "word ".repeat(200);
        for part in [
            json!({"type": "tool_use", "input": {"source": text}}),
            json!({"type": "tool_use", "input": {"edits": [{"file": {"image": text}}]}}),
            json!({"input_schema": {"properties": {"file": {"description": text}}}}),
            json!({"function": {"parameters": {"properties": {"video": {"title": text}}}}}),
            json!({"source": {"type": "text", "media_type": "text/plain", "data": text}}),
            json!({"source": {"data": text, "type": "text"}}),
            json!({"source": {"type": "content", "content": [{"type": "text", "text": text}]}}),
            json!({"type": "search_result", "source": text}),
        ] {
            assert!(weigh(&part.to_string()) > text.len(), "{part}");
        }
        let escaped = json!({"source": {"type": "text", "data": text}}).to_string();
        let escaped = escaped.replace("\"text\"", "\"\\u0074ext\"");
        assert!(weigh(&escaped) > text.len(), "{escaped}");
        for name in WRITTEN {
            let request = json!({name: [{"title": "a", "image": text}]}).to_string();
            let weight = Scan::of(&request).unwrap().fields[0].weight;
            assert!(weight > text.len(), "{request}");
        }
        for part in [
            json!({"source": {"type": "base64", "media_type": "image/png", "data": text}}),
            json!({"source": {"type": "url", "url": text}}),
            json!({"source": {"content": [], "parts": [{"type": "text", "text": text}]}}),
            json!([{"input": {"a": 1}}, {"image": text}]),
            json!([{"source": {"type": "text", "data": ""}}, {"input": "b"}, {"image": text}]),
            json!({"source": {"type": "content", "z": [{"source": {"type": "base64", "data": text}}]}}),
        ] {
            assert!(weigh(&part.to_string()) < text.len() / 2, "{part}");
        }
    }

    #[test]
    fn messages_are_found_wherever_they_stand() {
        let json =
            r#" { "x": [[1], {"messages": [2]}], "messages" : [ {"a": [1, 2]} ,"b"] , "y": 1}"#;
        let scan = Scan::of(json).unwrap();
        let at = |place: &Range<usize>| &json[place.clone()];
        let places: Vec<_> = scan.messages.as_ref().unwrap().iter().map(at).collect();
        assert_eq!(places, [r#"{"a": [1, 2]}"#, r#""b""#]);
        let fields: Vec<_> = scan.fields.iter().map(|one| (&*one.name, at(&one.place))).collect();
        assert_eq!(fields[0], ("x", r#"[[1], {"messages": [2]}]"#));
        assert_eq!(fields[1], ("messages", r#"[ {"a": [1, 2]} ,"b"]"#));
        assert_eq!(fields[2], ("y", "1"));
        assert_eq!(Scan::of(r#"{"messages": []}"#).unwrap().messages, Some(Vec::new()));
        assert_eq!(Scan::of(r#"{"messages": {"a": 1}}"#).unwrap().messages, None);
    }

    #[test]
    fn names_that_are_no_text_are_refused_where_they_are_read() {
        assert!(Scan::of(r#"{"a": {"\ud83d": 1}}"#).is_some());
        assert!(Scan::of(r#"{"\ud83d": 1}"#).is_none());
    }

    fn values() -> impl Strategy<Value = Value> {
        let text = "([a-z\"\\\\/\u{0}-\u{1f}é日😀]|image_url){0,12}|image|input";
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            text.prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, move |inner| {
            let named = prop::collection::vec((text, inner.clone()), 0..6);
            prop_oneof![
                prop::collection::vec(inner, 0..6).prop_map(Value::from),
                named.prop_map(|fields| fields.into_iter().collect::<Value>()),
            ]
        })
    }

    /// The weight of what was read, in a tool's field or elsewhere.
    fn weight(value: &Value, is_of_tool: bool) -> usize {
        match value {
            Value::String(text) => text.len(),
            Value::Array(items) => {
                VALUE_BYTES + items.iter().map(|item| weight(item, is_of_tool)).sum::<usize>()
            }
            Value::Object(fields) => fields.iter().fold(VALUE_BYTES, |sum, (name, value)| {
                let is_of_tool = is_of_tool || OF_TOOLS.contains(&&**name);
                let is_media = !is_of_tool && MEDIA.contains(&&**name);
                sum + if is_media {
                    0
                } else {
                    VALUE_BYTES + name.len() + weight(value, is_of_tool)
                }
            }),
            _ => NUMBER_BYTES,
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        /// Whatever is made of a text, this takes it if and only if serde does, and finds the same in it.
        #[test]
        fn it_reads_what_serde_reads(
            value in values(),
            is_escaped: bool,
            damage in prop::option::of((any::<prop::sample::Index>(), "[{}\\[\\],:\"\\\\ux0-9eE+.a\n -]{0,2}")),
        ) {
            let mut text = json!({"messages": [value.clone(), value], "n\\": 1}).to_string();
            if is_escaped {
                let escape = |c: char| match c.is_ascii() {
                    true => c.to_string(),
                    false => c.encode_utf16(&mut [0; 2]).iter().map(|u| format!("\\u{u:04X}")).collect(),
                };
                text = text.chars().map(escape).collect();
            }
            let is_damaged = damage.is_some();
            if let Some((at, other)) = damage {
                let places: Vec<_> = text.char_indices().collect();
                let (at, old) = places[at.index(places.len())];
                text.replace_range(at..at + old.len_utf8(), &other);
            }
            let wanted: Result<HashMap<String, &RawValue>, _> = serde_json::from_str(&text);
            let found = Scan::of(&text);
            prop_assert_eq!(found.is_some(), wanted.is_ok(), "{}", text);
            let (Some(found), Ok(wanted)) = (found, wanted) else { return Ok(()) };
            for Field { name, place, weight: found, .. } in &found.fields {
                prop_assert_eq!(wanted[&**name].get(), &text[place.clone()]);
                if !is_damaged {
                    let value: Value = serde_json::from_str(&text[place.clone()]).unwrap();
                    prop_assert_eq!(*found, weight(&value, false), "{}", text);
                }
            }
            let list = wanted.get("messages").map_or("", |raw| raw.get());
            if let (Some(places), Ok(items)) =
                (&found.messages, serde_json::from_str::<Vec<&RawValue>>(list))
            {
                let texts: Vec<_> = places.iter().map(|place| &text[place.clone()]).collect();
                let items: Vec<_> = items.iter().map(|item| item.get()).collect();
                prop_assert_eq!(texts, items);
            }
        }
    }
}
