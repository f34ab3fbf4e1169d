//! How much of a request is prompt, told before any of it is built.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// What a number takes, bytes.
const NUMBER_BYTES: usize = 8;
/// What a name or a list takes besides what is in it, bytes.
const VALUE_BYTES: usize = 32;

/// Fields of a message's parts that hold images, sounds and videos: engines put no text of theirs into the
/// prompt.
const MEDIA: [&str; 12] = [
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
    "video",
    "video_url",
];

/// Bytes of text in a field of a request, images and the like left out; 8 for each number, 32 for each name
/// and list, as much as they take when they are read. Beyond `limit` it is not counted further. A text that is no
/// JSON weighs what was read of it: whoever parses it says what is wrong.
///
/// # Cost
/// At most one pass over the text; nothing is kept.
pub fn weigh(json: &str, limit: usize) -> usize {
    let mut weight = Weight { bytes: 0, limit };
    let _unreadable = Weigh(&mut weight).deserialize(&mut serde_json::Deserializer::from_str(json));
    weight.bytes
}

struct Weight {
    bytes: usize,
    limit: usize,
}

struct Weigh<'a>(&'a mut Weight);

impl Weigh<'_> {
    /// # Errors
    /// The weight is beyond its limit.
    fn add<E: Error>(self, bytes: usize) -> Result<(), E> {
        self.0.bytes += bytes;
        if self.0.bytes > self.0.limit { Err(E::custom("too much")) } else { Ok(()) }
    }
}

impl<'de> DeserializeSeed<'de> for Weigh<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Weigh<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<(), E> {
        self.add(NUMBER_BYTES)
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<(), E> {
        self.add(NUMBER_BYTES)
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<(), E> {
        self.add(NUMBER_BYTES)
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<(), E> {
        self.add(NUMBER_BYTES)
    }

    fn visit_unit<E: Error>(self) -> Result<(), E> {
        self.add(NUMBER_BYTES)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<(), E> {
        self.add(text.len())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        Weigh(self.0).add(VALUE_BYTES)?;
        while items.next_element_seed(Weigh(self.0))?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        Weigh(self.0).add(VALUE_BYTES)?;
        while let Some(name) = fields.next_key::<Cow<'_, str>>()? {
            if MEDIA.contains(&&*name) {
                fields.next_value::<IgnoredAny>()?;
                continue;
            }
            Weigh(self.0).add(VALUE_BYTES + name.len())?;
            fields.next_value_seed(Weigh(self.0))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_weighs_and_pictures_do_not() {
        let weigh = |json: &str| weigh(json, 10_000);
        assert_eq!(weigh(r#""four""#), 4);
        assert_eq!(weigh("[1, -2, 3.5, true, null]"), VALUE_BYTES + 5 * NUMBER_BYTES);
        let picture = format!(r#"{{"image_url": {{"url": "{}"}}}}"#, "a".repeat(1_000));
        assert_eq!(weigh(&picture), VALUE_BYTES);
        let part = r#"{"type": "text", "text": "hello"}"#;
        assert_eq!(weigh(part), 3 * VALUE_BYTES + 17);
        assert_eq!(weigh(r#"["abc", "#), VALUE_BYTES + 3);
    }

    #[test]
    fn nothing_is_counted_beyond_the_limit() {
        let many = format!("[{}1]", "1,".repeat(100_000));
        assert_eq!(weigh(&many, 100), VALUE_BYTES + 9 * NUMBER_BYTES);
        assert!(weigh(&many, usize::MAX) > 800_000);
    }
}
