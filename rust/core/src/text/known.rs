//! Messages that came before, as the template gets them: bounded in bytes.

use minijinja::Value;
use serde_json::Value as Json;

use super::content::ContentFormat;
use crate::cache::{CacheStats, ClockCache, Key, Weighed};

/// Shorter messages are read each time, which takes less than a microsecond.
const SHORT_BYTES: usize = 64;

/// Messages of shorter chats are read each time: tokenizing what is new costs more.
const SHORT_CHAT_BYTES: usize = 16 * 1_024;

/// What a value takes beside its text, bytes: its place in a list or a map, and its counters.
const VALUE_BYTES: usize = 96;

/// A message, found by its JSON.
#[derive(Debug)]
struct Prepared {
    heap_bytes: usize,
    value: Value,
}

impl Weighed for Prepared {
    fn heap_bytes(&self) -> usize {
        self.heap_bytes
    }
}

/// The cache. A message is found wherever it stands, for its value depends on no other.
///
/// # Consistency
/// A message's value never changes, so a reader sees either nothing or the truth.
#[derive(Debug)]
pub(super) struct MessageCache {
    values: ClockCache<Prepared>,
}

impl MessageCache {
    /// An empty cache that holds at most `capacity_bytes`, bookkeeping included; 0 turns it off.
    pub(super) fn new(capacity_bytes: usize) -> Self {
        Self { values: ClockCache::new(capacity_bytes) }
    }

    /// The key of the message that `json` is, for templates that want `format`; `None` for one that is not kept, as
    /// those of short chats.
    ///
    /// # Cost
    /// A hash over its bytes.
    pub(super) fn key(&self, json: &str, format: ContentFormat, chat_bytes: usize) -> Option<Key> {
        let is_kept = json.len() >= SHORT_BYTES && chat_bytes >= SHORT_CHAT_BYTES;
        let is_kept = is_kept && !self.values.is_off();
        is_kept.then(|| self.values.key(json.as_bytes(), format as u64))
    }

    /// The value of a message, if it is known.
    pub(super) fn find(&self, key: Option<Key>) -> Option<Value> {
        self.values.find(key?, |one| one.value.clone())
    }

    /// The value of a message that was prepared just now; others are dropped as needed.
    pub(super) fn keep(&self, key: Option<Key>, message: &Json) -> Value {
        let value = Value::from_serialize(message);
        if let Some(key) = key {
            let heap_bytes = heap_bytes(message);
            self.values.insert(key, Prepared { heap_bytes, value: value.clone() });
        }
        value
    }

    /// Counters and sizes.
    pub(super) fn stats(&self) -> CacheStats {
        self.values.stats()
    }
}

/// What the template's value of `message` has on the heap, rather more than less.
fn heap_bytes(message: &Json) -> usize {
    VALUE_BYTES
        + match message {
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().map(heap_bytes).sum(),
            Json::Object(fields) => {
                let field =
                    |(name, value): (&String, _)| VALUE_BYTES + name.len() + heap_bytes(value);
                fields.iter().map(field).sum()
            }
            _ => 0,
        }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    const LONG: usize = SHORT_CHAT_BYTES;

    fn message(content: &str) -> (String, Json) {
        let message = json!({"role": "user", "content": content});
        (message.to_string(), message)
    }

    #[test]
    fn messages_are_found_by_what_they_are() {
        let cache = MessageCache::new(1 << 20);
        let (json, prepared) = message(&"a".repeat(2_000));
        let key = cache.key(&json, ContentFormat::String, LONG);
        assert!(cache.find(key).is_none());
        let value = cache.keep(key, &prepared);
        assert_eq!(cache.find(key), Some(value));
        let other = cache.key(&json, ContentFormat::Parts, LONG);
        assert!(cache.find(other).is_none(), "forms of content stay apart");
        let (short, prepared) = message("sh");
        let key = cache.key(&short, ContentFormat::String, LONG);
        cache.keep(key, &prepared);
        assert!(cache.find(key).is_none());
        let key = cache.key(&json, ContentFormat::String, LONG - 1);
        assert!(cache.find(key).is_none(), "a short chat");
        let stats = cache.stats();
        assert_eq!((stats.hits_total, stats.misses_total, stats.held_entries), (1, 2, 1));
        assert!(stats.held_bytes > 2_000);
    }

    #[test]
    fn it_stays_under_its_limit() {
        let cache = MessageCache::new(1 << 20);
        for n in 0..2_000 {
            let (json, prepared) = message(&format!("{n} ").repeat(1_000));
            let key = cache.key(&json, ContentFormat::String, LONG);
            cache.keep(key, &prepared);
            assert!(cache.stats().held_bytes <= 1 << 20);
        }
        let (json, prepared) = message(&"x".repeat(1 << 20));
        let huge = cache.key(&json, ContentFormat::String, LONG);
        cache.keep(huge, &prepared);
        assert!(cache.find(huge).is_none(), "it is too large");
        let stats = cache.stats();
        assert!(stats.evictions_total > 1_000, "{stats:?}");
        let zeros = json!({"role": "user", "content": [], "n": vec![0; 1_000]});
        assert!(heap_bytes(&zeros) > 96_000);
    }
}
