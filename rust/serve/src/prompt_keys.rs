//! Properties of a prompt besides its tokens: multimodal items, prompt embeddings.

use kvflash_core::hash::engine::MediaItem;
use kvflash_core::hash::prompt_keys;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// Multimodal items, ascending by offset: `[{"identifier": "...", "offset": 5, "length": 16}, ...]`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Media(pub Vec<MediaItem>);

/// Digests of a prompt's embeddings, one per hash block, in hexadecimal digits.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Embeds(pub Vec<Vec<u8>>);

impl<'de> Deserialize<'de> for Media {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let items = Option::<Vec<MediaItem>>::deserialize(deserializer)?.unwrap_or_default();
        prompt_keys::media(items).map(Self).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Embeds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digests = Option::<Vec<String>>::deserialize(deserializer)?.unwrap_or_default();
        prompt_keys::check_count("embeds", "digests", digests.len()).map_err(D::Error::custom)?;
        let digests = digests.iter().enumerate().map(|(at, text)| prompt_keys::digest(at, text));
        digests.collect::<Result<_, _>>().map(Self).map_err(D::Error::custom)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn items_are_put_in_order() {
        let text = r#"[{"identifier": "b", "offset": 9, "length": 1},
            {"identifier": "a", "offset": 2, "length": 4}]"#;
        let media: Media = serde_json::from_str(text).unwrap();
        let wanted = [("a", 2, 4), ("b", 9, 1)].map(|(identifier, offset, length)| MediaItem {
            identifier: identifier.to_owned(),
            offset,
            length,
        });
        assert_eq!(media.0, wanted);
        assert_eq!(serde_json::from_str::<Media>("null").unwrap(), Media::default());
    }

    #[test]
    fn digests_are_hexadecimal() {
        let embeds: Embeds = serde_json::from_str(r#"["00fF", "10"]"#).unwrap();
        assert_eq!(embeds.0, [vec![0, 255], vec![16]]);
        for digest in ["", "0", "0g", "é"] {
            let error = serde_json::from_value::<Embeds>(serde_json::json!(["00", digest]));
            let error = error.unwrap_err().to_string();
            assert!(error.contains("embeds[1] must be 1 to 1024 bytes"), "{error}");
        }
    }

    #[test]
    fn items_out_of_bounds_are_refused_by_name() {
        for (item, wanted) in [
            (serde_json::json!({"identifier": "", "offset": 0, "length": 1}), "mm[0].identifier"),
            (
                serde_json::json!({"identifier": "a", "offset": u32::MAX, "length": 1}),
                "mm[0] must end within 4294967295 tokens",
            ),
        ] {
            let error = serde_json::from_value::<Media>(serde_json::json!([item]));
            let error = error.unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
