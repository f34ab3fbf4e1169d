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
    use super::approx_kv_indexer::ApproxKvIndexer;
    #[pymodule_export]
    use super::bookings::Bookings;
    #[pymodule_export]
    use super::catalog::{Catalog, CatalogDump};
    #[pymodule_export]
    use super::decider::{Decider, RouterWait};
    #[pymodule_export]
    use super::event_outbox::EventOutbox;
    #[pymodule_export]
    use super::found_workers::FoundWorkers;
    #[pymodule_export]
    use super::frontend::Frontend;
    #[pymodule_export]
    use super::hash::{
        compute_block_hash_array, compute_block_hash_for_seq, compute_sequence_hashes, item_hash,
    };
    #[pymodule_export]
    use super::indexer::Indexer;
    #[pymodule_export]
    use super::kv_indexer::KvIndexer;
    #[pymodule_export]
    use super::log::init_logging;
    #[pymodule_export]
    use super::overlap::OverlapScores;
    #[pymodule_export]
    use super::policies::{check_policy, check_shadow_policies};
    #[pymodule_export]
    use super::policy_desk::{
        PolicyCandidate, PolicyDesk, PolicyEnded, PolicyQuestion, PolicyRequest,
    };
    #[pymodule_export]
    use super::radix_tree::RadixTree;
    #[pymodule_export]
    use super::repair::Repair;
    #[pymodule_export]
    use super::router::Router;
    #[pymodule_export]
    use super::router_booking::RouterBooking;
    #[pymodule_export]
    use super::router_core::RouterCore;
    #[pymodule_export]
    use super::settings::{check_keys, settings_table};
    #[pymodule_export]
    use super::tokenizer::{Tokenizer, model_folder};
    #[pymodule_export]
    use super::zmq_drain::ZmqDrain;
}
