//! Publisher handles. A handle is never reused, so that a stale one is an error and never another
//! publisher.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::fault::{Code, Result, fault};
use crate::publisher::Publisher;

/// Maximum publishers of a process: each has two sockets and three threads.
const PUBLISHERS_MAX: usize = 4_096;

static TABLE: LazyLock<RwLock<HashMap<u64, Arc<Publisher>>>> = LazyLock::new(RwLock::default);
static NEXT: AtomicU64 = AtomicU64::new(1);

/// Assigns a handle to a publisher.
pub fn add(publisher: Publisher) -> Result<u64> {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    if table.len() >= PUBLISHERS_MAX {
        drop(table);
        publisher.close()?;
        return Err(fault(Code::Limit, format!("there are {PUBLISHERS_MAX} publishers")));
    }
    let handle = NEXT.fetch_add(1, Ordering::Relaxed);
    table.insert(handle, Arc::new(publisher));
    Ok(handle)
}

/// The publisher of a handle.
pub fn find(handle: u64) -> Result<Arc<Publisher>> {
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    table.get(&handle).cloned().ok_or_else(|| unknown(handle))
}

/// Removes the publisher: of several callers one gets it.
pub fn take(handle: u64) -> Result<Arc<Publisher>> {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    table.remove(&handle).ok_or_else(|| unknown(handle))
}

fn unknown(handle: u64) -> crate::fault::Fault {
    let is_past = handle != 0 && handle < NEXT.load(Ordering::Relaxed);
    let why = if is_past { "was destroyed" } else { "was never created" };
    fault(Code::NoPublisher, format!("publisher {handle} {why}"))
}
