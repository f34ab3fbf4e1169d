//! Any bytes load as a snapshot, in whole or in part, or are refused; the index stays consistent.
//!
//! `RUSTC_BOOTSTRAP=1 cargo fuzz run load_snapshot`. Checksums would keep every change away from what
//! is behind them, so each input is tried as it is and with its checksums mended.
#![no_main]

use kvflash_core::index::snapshot::{load, save};
use kvflash_core::index::{CountMode, Limits, Options, RadixIndex};
use libfuzzer_sys::fuzz_target;
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|bytes: &[u8]| {
    let tight = Limits { max_blocks: 6, max_workers: 2, ..Limits::default() };
    let evicting = Limits { capacity_blocks: 4, ..Limits::default() };
    let mended = mend(bytes);
    check(bytes, Options::default());
    for limits in [Limits::default(), tight, evicting] {
        check(&mended, Options { limits, count_mode: CountMode::Copies, hash_seed: 1 });
    }
});

fn check(mut bytes: &[u8], options: Options) {
    let index = RadixIndex::new(options);
    let Ok(loaded) = load(&index, &mut bytes, None) else {
        assert!(index.workers().is_empty());
        return;
    };
    index.audit();
    for lost in &loaded.lost {
        assert!(!index.workers().contains(&lost.worker), "{lost:?}");
    }
    if options.limits != Limits::default() {
        return;
    }
    // What was taken is what the next snapshot says.
    let mut again = Vec::new();
    save(&index, &loaded.meta, |_| None, &mut again).expect("a list takes everything");
    let copy = RadixIndex::new(options);
    let second = load(&copy, &mut &again[..], None).expect("it was just saved");
    assert!(second.lost.is_empty() && !second.cut, "{second:?}");
    assert_eq!(second.meta, loaded.meta);
    for worker in index.workers() {
        assert_eq!(copy.memberships(worker), index.memberships(worker));
    }
}

const HEAD: usize = 56;
const SECTION: usize = 88;

fn number(bytes: &[u8], at: usize) -> usize {
    bytes[at..at + 8].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

/// The same with right checksums, as far as its lengths lead anywhere.
fn mend(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.len() < HEAD {
        return bytes;
    }
    // More than these would be refused, or need longer inputs.
    let workers = number(&bytes, 40) & 0xffff;
    let key = number(&bytes, 48) & 0xffff;
    let end = HEAD + key.next_multiple_of(8) + workers * 16;
    set_checksum(&mut bytes, 0, end, end);
    let mut at = end + 8;
    while at + SECTION <= bytes.len() {
        let [steps, names, labels] = [48, 56, 64].map(|field| number(&bytes, at + field) & 0xffff);
        let body = at + SECTION;
        let end = body + steps * 24 + (names + labels) * 8;
        set_checksum(&mut bytes, body, end, at + 72);
        set_checksum(&mut bytes, at, at + 80, at + 80);
        at = end;
    }
    bytes
}

fn set_checksum(bytes: &mut [u8], from: usize, to: usize, place: usize) {
    if to <= bytes.len() && place + 8 <= bytes.len() {
        let checksum = xxh3_64(&bytes[from..to]);
        bytes[place..place + 8].copy_from_slice(&checksum.to_le_bytes());
    }
}
