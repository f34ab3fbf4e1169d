//! Bookings of other routers, which count here like this router's own.

use hashbrown::HashMap;

use super::selector::Selector;
use crate::ids::Worker;
use crate::load::RequestId;

/// Maximum other routers with bookings.
const MAX_ROUTERS: usize = 1_024;
/// Maximum bookings of all of them together.
const MAX_REQUESTS: usize = 1 << 20;

/// Bookings of other routers, by router and by the name there.
#[derive(Debug, Default)]
pub(super) struct Remote {
    routers: HashMap<u64, Peer>,
    requests: usize,
    refused: u64,
}

#[derive(Debug, Default)]
struct Peer {
    requests: HashMap<String, RequestId>,
    /// When the router last reported that all of them are active.
    heard_ms: u64,
    /// When their expiry was last reset.
    touched_ms: u64,
}

/// Number of other routers' bookings.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RemoteStats {
    /// Routers with bookings.
    pub routers: usize,
    /// Bookings that count now.
    pub requests: usize,
    /// Bookings that were refused at a limit.
    pub refused_total: u64,
}

impl Selector {
    /// Books another router's request at `worker`: it counts in every decision from now on, but not
    /// against this router's own request limit. Repeating it changes nothing. False if it does not
    /// count: the worker is not known here, or a limit is reached.
    ///
    /// # Cost
    /// O(blocks).
    pub fn remote_add(
        &self,
        router_id: u64,
        request_id: &str,
        worker: Worker,
        hashes: Option<&[u64]>,
        isl_tokens: u64,
        overlap_blocks: u32,
    ) -> bool {
        if !self.router.has_worker(worker) {
            return false;
        }
        // Prompts may be the only source of the block size.
        self.block_size();
        let mut table = self.remote.lock();
        let table = &mut *table;
        let known = table.routers.get(&router_id).and_then(|peer| peer.requests.get(request_id));
        if known.is_some_and(|request| self.router.is_booked(*request)) {
            return true;
        }
        let is_new = known.is_none();
        let is_full = is_new && table.requests >= MAX_REQUESTS
            || table.routers.len() >= MAX_ROUTERS && !table.routers.contains_key(&router_id);
        if is_full {
            table.refused += 1;
            return false;
        }
        let booked = self.router.book_remote(worker, hashes, isl_tokens, overlap_blocks);
        let Ok(request) = booked else { return false };
        let now_ms = self.clock.now_ms();
        let peer = table.routers.entry(router_id).or_insert_with(|| Peer {
            heard_ms: now_ms,
            touched_ms: now_ms,
            ..Peer::default()
        });
        peer.requests.insert(request_id.to_owned(), request);
        table.requests += usize::from(is_new);
        true
    }

    /// Marks its prompt as prefilled. False if it is unknown.
    pub fn remote_prefilled(&self, router_id: u64, request_id: &str) -> bool {
        let table = self.remote.lock();
        let request = table.routers.get(&router_id).and_then(|peer| peer.requests.get(request_id));
        request.is_some_and(|request| self.router.mark_prefill_completed(*request))
    }

    /// Ends it. False if it is unknown.
    pub fn remote_free(&self, router_id: u64, request_id: &str) -> bool {
        let mut table = self.remote.lock();
        let Some(peer) = table.routers.get_mut(&router_id) else { return false };
        let Some(request) = peer.requests.remove(request_id) else { return false };
        if peer.requests.is_empty() {
            table.routers.remove(&router_id);
        }
        table.requests -= 1;
        self.router.free(request);
        true
    }

    /// Removes a router with all its requests; returns their number.
    pub fn remote_drop_router(&self, router_id: u64) -> usize {
        let mut table = self.remote.lock();
        let Some(peer) = table.routers.remove(&router_id) else { return 0 };
        table.requests -= peer.requests.len();
        for request in peer.requests.values() {
            self.router.free(*request);
        }
        peer.requests.len()
    }

    /// A router reports that all of its requests known here are active, so they do not expire.
    pub fn remote_heard(&self, router_id: u64) {
        let now_ms = self.clock.now_ms();
        if let Some(peer) = self.remote.lock().routers.get_mut(&router_id) {
            peer.heard_ms = now_ms;
        }
    }

    /// Current numbers.
    pub fn remote_stats(&self) -> RemoteStats {
        let table = self.remote.lock();
        RemoteStats {
            routers: table.routers.len(),
            requests: table.requests,
            refused_total: table.refused,
        }
    }

    /// Resets the expiry of reported requests from time to time.
    pub(super) fn touch_remote(&self, now_ms: u64) {
        let interval_ms = self.router.touch_interval_ms();
        for peer in self.remote.lock().routers.values_mut() {
            // The router may have been heard after `now_ms` was read.
            let age_ms = now_ms.saturating_sub(peer.touched_ms);
            if peer.heard_ms > peer.touched_ms && age_ms >= interval_ms {
                peer.touched_ms = now_ms;
                for request in peer.requests.values() {
                    self.router.touch(*request, peer.heard_ms);
                }
            }
        }
    }

    /// Forgets requests without a booking: it expired, or its worker left.
    pub(super) fn forget_gone_remote(&self) {
        let mut table = self.remote.lock();
        let table = &mut *table;
        table.routers.retain(|_, peer| {
            peer.requests.retain(|_, request| self.router.is_booked(*request));
            !peer.requests.is_empty()
        });
        table.requests = table.routers.values().map(|peer| peer.requests.len()).sum();
    }
}
