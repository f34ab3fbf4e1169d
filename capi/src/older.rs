//! Functions with one publisher per process, for engines written for older libraries. They return 0
//! or 1; `kvflash_last_error` has the reason.

#![allow(unsafe_code, reason = "pointers of C callers")]

use std::env;
use std::ffi::{c_char, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvflash_publish::blocks::{Blocks, CALL_TOKENS_MAX};
use kvflash_publish::outbox::Settings;

use crate::fault::{Code, Result, fault, guard, invalid};
use crate::ffi::{block_list, list, optional, place};
use crate::handle;
use crate::publisher::{self, Publisher};

/// Number of the default publisher; 0 without one.
static DEFAULT: Mutex<u64> = Mutex::new(0);

fn default_handle() -> MutexGuard<'static, u64> {
    DEFAULT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The handle, unless it is 0.
fn made(handle: u64) -> Result<u64> {
    match handle {
        0 => Err(fault(Code::NoPublisher, "kvflash_llm_init was not called, or undone")),
        handle => Ok(handle),
    }
}

fn default_publisher() -> Result<Arc<Publisher>> {
    handle::find(made(*default_handle())?)
}

/// Older functions have a single failure code, and treat partial publication as success.
fn guard_older(body: impl FnOnce() -> Result<()>) -> c_int {
    match guard(body) {
        0 => 0,
        code if code == Code::Partial as c_int => 0,
        _ => Code::Error as c_int,
    }
}

/// Creates the default publisher.
///
/// # Safety
/// Both strings are NULL or terminated by NUL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_llm_init(
    namespace: *const c_char,
    component: *const c_char,
    worker_id: i64,
    kv_block_size: u32,
) -> c_int {
    guard_older(|| {
        let mut default = default_handle();
        if *default != 0 {
            return Err(invalid("kvflash_llm_init was called before; call kvflash_llm_shutdown"));
        }
        let port = port_of("KVFLASH_EVENTS_PORT")?;
        let options = publisher::Options {
            host: value_of("KVFLASH_HOST").unwrap_or_else(|| "127.0.0.1".to_owned()),
            port,
            replay_port: port_of("KVFLASH_REPLAY_PORT")?,
            topic: "kv-events".to_owned(),
            settings: Settings { dp_rank: Some(0), ..Settings::default() },
        };
        let worker_id = u64::try_from(worker_id)
            .map_err(|_| invalid(format!("worker_id must be at least 0, got {worker_id}")))?;
        // SAFETY: as the caller promises.
        let place = unsafe { place(namespace, component, worker_id) }?;
        if place.is_none() && port == 0 {
            return Err(invalid(
                "namespace is NULL and KVFLASH_EVENTS_PORT is not set: no subscriber could find the events",
            ));
        }
        *default = handle::add(Publisher::start(kv_block_size, options, place)?)?;
        Ok(())
    })
}

fn port_of(name: &str) -> Result<u16> {
    let Some(value) = value_of(name) else { return Ok(0) };
    value.parse().map_err(|_| invalid(format!("{name} must be a port in 0..=65535, got {value:?}")))
}

/// A variable of the environment; an empty one counts as unset.
fn value_of(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

/// Destroys the default publisher.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_llm_shutdown() -> c_int {
    guard_older(|| {
        let handle = std::mem::take(&mut *default_handle());
        handle::take(made(handle)?)?.close()
    })
}

/// Publishes stored blocks with the default publisher.
///
/// # Safety
/// `num_block_tokens` and `block_ids` point to `num_blocks` numbers, `token_ids` to as many as the
/// first add up to; `parent_hash` is NULL or points to one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_kv_event_publish_stored(
    _event_id: u64,
    token_ids: *const u32,
    num_block_tokens: *const usize,
    block_ids: *const u64,
    num_blocks: usize,
    parent_hash: *const u64,
    lora_id: u64,
) -> c_int {
    guard_older(|| {
        let publisher = default_publisher()?;
        // SAFETY: as the caller promises; the tokens are as many as the sizes add up to.
        let blocks = unsafe {
            let sizes = block_list("num_block_tokens", num_block_tokens, num_blocks)?;
            let count = sizes
                .iter()
                .try_fold(0_usize, |sum, &size| sum.checked_add(size))
                .ok_or_else(|| invalid("num_block_tokens adds up to too many tokens"))?;
            Blocks {
                token_ids: list(
                    "token_ids",
                    token_ids,
                    "the sum of num_block_tokens",
                    count,
                    CALL_TOKENS_MAX,
                )?,
                sizes: Some(sizes),
                block_hashes: block_list("block_ids", block_ids, num_blocks)?,
                parent_hash: optional("parent_hash", parent_hash)?,
                lora_id,
                ..Blocks::default()
            }
        };
        publisher.store(&blocks)
    })
}

/// Publishes removed blocks with the default publisher.
///
/// # Safety
/// `block_ids` points to `num_blocks` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvflash_kv_event_publish_removed(
    _event_id: u64,
    block_ids: *const u64,
    num_blocks: usize,
) -> c_int {
    guard_older(|| {
        let publisher = default_publisher()?;
        // SAFETY: as the caller promises.
        let hashes = unsafe { block_list("block_ids", block_ids, num_blocks) }?;
        Ok(publisher.events.remove(hashes, None)?)
    })
}

/// Publishes that the cache is empty, with the default publisher.
#[unsafe(no_mangle)]
pub extern "C" fn kvflash_kv_event_publish_cleared(_event_id: u64) -> c_int {
    guard_older(|| Ok(default_publisher()?.events.clear()?))
}
