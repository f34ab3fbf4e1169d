//! Properties of a prompt besides its tokens: multimodal items, prompt embeddings.

use kvflash_core::hash::engine::MediaItem;
use kvflash_core::hash::prompt_keys;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _};

/// Multimodal items, ascending by offset: `[{"identifier": "...", "offset": 5, "length": 16}, ...]`.
pub(super) fn media<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<MediaItem>, D::Error> {
    let items = Option::<Vec<MediaItem>>::deserialize(from)?.unwrap_or_default();
    prompt_keys::media(items).map_err(D::Error::custom)
}

/// Digests of a prompt's embeddings, one per hash block, in hexadecimal digits.
pub(super) fn embeds<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Vec<u8>>, D::Error> {
    let digests = Option::<Vec<String>>::deserialize(from)?.unwrap_or_default();
    prompt_keys::check_count("embeds", "digests", digests.len()).map_err(D::Error::custom)?;
    let digests = digests.iter().enumerate().map(|(at, text)| prompt_keys::digest(at, text));
    digests.collect::<Result<_, _>>().map_err(D::Error::custom)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn items_are_put_in_order() {
        let items = json!([{"identifier": "b", "offset": 9, "length": 1},
            {"identifier": "a", "offset": 2, "length": 4}]);
        let wanted = [("a", 2, 4), ("b", 9, 1)].map(|(identifier, offset, length)| MediaItem {
            identifier: identifier.to_owned(),
            offset,
            length,
        });
        assert_eq!(media(items).unwrap(), wanted);
        assert!(media(json!(null)).unwrap().is_empty());
    }

    #[test]
    fn digests_are_hexadecimal() {
        assert_eq!(embeds(json!(["00fF", "10"])).unwrap(), [vec![0, 255], vec![16]]);
        for digest in ["", "0", "0g", "é"] {
            let error = embeds(json!(["00", digest])).unwrap_err().to_string();
            assert!(error.contains("embeds[1] must be 1 to 1024 bytes"), "{error}");
        }
    }

    #[test]
    fn items_out_of_bounds_are_refused_by_name() {
        for (item, wanted) in [
            (json!({"identifier": "", "offset": 0, "length": 1}), "mm[0].identifier"),
            (
                json!({"identifier": "a", "offset": u32::MAX, "length": 1}),
                "mm[0] must end within 4294967295 tokens",
            ),
        ] {
            let error = media(json!([item])).unwrap_err().to_string();
            assert!(error.contains(wanted), "{error}");
        }
    }
}
