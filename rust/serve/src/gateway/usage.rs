//! Reads the engine's own token counts out of an answer that streams by, without parsing it.

use kvflash_core::select::Usage;

/// Scans an answer's bytes for `"prompt_tokens":N`, `"cached_tokens":N` and
/// `"completion_tokens":N`; the last ones count. Counts the events of a stream meanwhile.
///
/// Inside a generated text the quotes are escaped, so a model that writes these words fools nobody.
#[derive(Debug, Default)]
pub(crate) struct UsageScanner {
    /// End of the previous chunk, so that a name or number cut in two is still found.
    carry: Vec<u8>,
    pub prompt_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    /// Events with an object in them, most of which are a token each. One that is cut within its
    /// first bytes is missed.
    pub events: u64,
}

/// Longer than any name, separator and number it could be cut in.
const CARRY: usize = 48;
const PROMPT: &[u8] = b"\"prompt_tokens\"";
const CACHED: &[u8] = b"\"cached_tokens\"";
const COMPLETION: &[u8] = b"\"completion_tokens\"";
/// Inside a generated text the quote would be escaped.
const EVENT: &[u8] = b"data: {\"";

impl UsageScanner {
    pub fn feed(&mut self, chunk: &[u8]) {
        self.events += memchr::memmem::find_iter(chunk, EVENT).count() as u64;
        if self.carry.is_empty() {
            self.scan(chunk);
        } else {
            // Only the seam is scanned twice.
            let mut seam = std::mem::take(&mut self.carry);
            seam.extend_from_slice(&chunk[..chunk.len().min(CARRY)]);
            self.scan(&seam);
            self.scan(chunk);
            if chunk.len() < CARRY {
                let from = seam.len().saturating_sub(CARRY);
                self.carry = seam.split_off(from);
                return;
            }
            self.carry = seam;
        }
        self.carry.clear();
        self.carry.extend_from_slice(&chunk[chunk.len().saturating_sub(CARRY)..]);
    }

    fn scan(&mut self, bytes: &[u8]) {
        // Nearly every chunk has no usage at all: one search decides.
        if memchr::memmem::find(bytes, b"_tokens\"").is_none() {
            return;
        }
        if let Some(found) = last_number(bytes, PROMPT) {
            self.prompt_tokens = Some(found);
        }
        if let Some(found) = last_number(bytes, CACHED) {
            self.cached_tokens = Some(found);
        }
        if let Some(found) = last_number(bytes, COMPLETION) {
            self.completion_tokens = Some(found);
        }
    }

    /// What the engine said, and generated tokens as they were counted where it said nothing.
    pub fn usage(&self) -> Usage {
        Usage {
            input_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            output_tokens: self.completion_tokens.or(Some(self.events)),
        }
    }
}

/// The complete number behind the last `name:`; `None` when it is cut off, null or absent.
fn last_number(bytes: &[u8], name: &[u8]) -> Option<u64> {
    let at = memchr::memmem::rfind(bytes, name)?;
    let rest = &bytes[at + name.len()..];
    let colon = rest.iter().position(|b| *b == b':')?;
    let rest = &rest[colon + 1..];
    let start = rest.iter().position(|b| !b.is_ascii_whitespace())?;
    let digits = rest[start..].iter().position(|b| !b.is_ascii_digit())?;
    std::str::from_utf8(&rest[start..start + digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANSWER: &str = r#"{"usage":{"prompt_tokens":302,"total_tokens":326,"completion_tokens":24,"prompt_tokens_details":{"cached_tokens":288}}}"#;

    #[test]
    fn found_however_the_answer_is_cut() {
        for size in 1..=ANSWER.len() {
            let mut scanner = UsageScanner::default();
            for chunk in ANSWER.as_bytes().chunks(size) {
                scanner.feed(chunk);
            }
            assert_eq!(
                (scanner.prompt_tokens, scanner.cached_tokens, scanner.completion_tokens),
                (Some(302), Some(288), Some(24)),
                "chunks of {size}"
            );
        }
    }

    #[test]
    fn tokens_are_events_until_the_engine_says_more() {
        let mut scanner = UsageScanner::default();
        scanner.feed(b"data: {\"a\": \"data: {\\\"\"}\n\ndata: {\"b\": 1}\n\ndata: [DONE]\n\n");
        assert_eq!(scanner.usage().output_tokens, Some(2));
        scanner.feed(b"data: {\"usage\": {\"completion_tokens\": 7}}\n\n");
        assert_eq!(scanner.usage().output_tokens, Some(7));
    }

    #[test]
    fn text_and_nulls_are_not_counts() {
        let mut scanner = UsageScanner::default();
        scanner.feed(br#"{"content":"\"cached_tokens\": 7,","prompt_tokens_details":null}"#);
        scanner.feed(br#"{"prompt_tokens":12,"prompt_tokens_details":{"cached_tokens": null}}"#);
        assert_eq!((scanner.prompt_tokens, scanner.cached_tokens), (Some(12), None));
    }
}
