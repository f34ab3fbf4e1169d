//! The fence to Python: releases the GIL, calls, converts, nothing else. One class per file.

mod approx_kv_indexer;
mod bookings;
mod buffer;
mod catalog;
mod decider;
mod error;
mod event_outbox;
mod found_workers;
mod frontend;
mod hash;
mod index;
mod indexer;
mod kv_indexer;
mod log;
mod overlap;
mod policies;
mod policy_desk;
mod prompt_keys;
mod query;
mod radix_tree;
mod repair;
mod router;
mod router_ask;
mod router_booking;
mod router_core;
mod select;
mod service;
mod settings;
mod snapshot;
mod time;
mod tokenizer;
mod zmq_drain;

/// The extension module `kvflash._core`, documented in `_core.pyi`.
#[pyo3::pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        approx_kv_indexer::ApproxKvIndexer,
        bookings::Bookings,
        catalog::{Catalog, CatalogDump},
        decider::{Decider, RouterWait},
        event_outbox::EventOutbox,
        found_workers::FoundWorkers,
        frontend::Frontend,
        hash::{compute_block_hash_array, compute_block_hash_for_seq, compute_sequence_hashes},
        indexer::Indexer,
        kv_indexer::KvIndexer,
        log::init_logging,
        overlap::OverlapScores,
        policies::{check_policy, check_shadow_policies},
        policy_desk::{PolicyCandidate, PolicyDesk, PolicyEnded, PolicyQuestion, PolicyRequest},
        radix_tree::RadixTree,
        repair::Repair,
        router::Router,
        router_booking::RouterBooking,
        router_core::RouterCore,
        settings::{check_key, check_keys, settings_table},
        tokenizer::{Tokenizer, model_folder},
        zmq_drain::ZmqDrain,
    };
}
