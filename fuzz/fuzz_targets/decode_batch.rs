//! Any bytes decode to a batch within the limits, or to a decode error within the frame.
//!
//! `RUSTC_BOOTSTRAP=1 cargo fuzz run decode_batch`; the corpus begins with the batches of
//! tests/vectors/engine_wire.json.
#![no_main]

use kvflash_core::codec::{Limits, decode_batch};
use kvflash_core::error::Error;
use kvflash_core::event::Event;
use kvflash_core::ids::Tier;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    check(payload, &Limits::default());
    let tight = Limits {
        max_payload_bytes: 512,
        max_events: 3,
        max_blocks_per_event: 2,
        max_tokens_per_event: 8,
        max_text_bytes: 8,
        max_extra_keys: 2,
        max_depth: 5,
    };
    check(payload, &tight);
});

fn check(payload: &[u8], limits: &Limits) {
    let batch = match decode_batch(payload, limits) {
        Ok(batch) => batch,
        Err(Error::Decode { offset, .. }) => {
            assert!(offset <= payload.len());
            return;
        }
        Err(error) => panic!("not a decode error: {error}"),
    };
    assert!(payload.len() <= limits.max_payload_bytes);
    let dropped = batch.skipped as usize + batch.malformed as usize;
    assert!(batch.events.len() + dropped <= limits.max_events);
    let check_text = |text: &Option<String>| {
        assert!(text.as_ref().is_none_or(|text| text.len() <= limits.max_text_bytes));
    };
    let mut extra_keys = 0;
    for event in &batch.events {
        match event {
            Event::Stored(event) => {
                let (blocks, tokens) = (event.block_hashes.len(), event.token_ids.len());
                assert!(blocks <= limits.max_blocks_per_event);
                assert!(tokens <= limits.max_tokens_per_event);
                // Only these hold every block of their part of a prompt; the catalog counts others.
                if event.is_full_attention() && event.tier() == Some(Tier::Device) {
                    assert!(tokens == 0 || tokens == blocks * event.block_size as usize);
                    assert!(event.extra_keys.is_empty() || event.extra_keys.len() == blocks);
                }
                extra_keys += event.extra_keys.iter().flatten().map(Vec::len).sum::<usize>();
                for text in [&event.medium, &event.lora_name, &event.cache_salt, &event.spec_kind] {
                    check_text(text);
                }
            }
            Event::Removed(event) => {
                assert!(event.block_hashes.len() <= limits.max_blocks_per_event);
                check_text(&event.medium);
            }
            Event::Cleared => {}
        }
    }
    assert!(extra_keys <= limits.max_extra_keys);
}
