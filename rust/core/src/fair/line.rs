//! An ordered, bounded queue of requests.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

use super::order::Standing;
use crate::error::{Error, Result};

/// A request's position: lower is earlier. Equal positions leave in order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    standing: Reverse<Standing>,
    number: u64,
}

/// Queued requests, in the order in which they are to leave. It has no clock, no lock and no
/// randomness.
///
/// # Cost
/// Every call is O(log length).
#[derive(Debug)]
pub struct Line<T> {
    limit: usize,
    came: u64,
    isl_tokens: u64,
    waiting: BTreeMap<Place, (T, u64)>,
}

impl<T> Line<T> {
    /// A queue of at most `limit` requests.
    pub fn new(limit: usize) -> Self {
        Self { limit, came: 0, isl_tokens: 0, waiting: BTreeMap::new() }
    }

    /// Adds a request with a prompt of `isl_tokens`.
    ///
    /// # Errors
    /// [`Error::Overloaded`] if the queue is full.
    pub fn push(&mut self, standing: Standing, isl_tokens: u64, item: T) -> Result<Place> {
        let limit = self.limit;
        if self.waiting.len() >= limit {
            return Err(Error::Overloaded(format!(
                "{limit} requests wait for a worker with room to prefill, the limit \
                 (router_queue_limit)"
            )));
        }
        let place = Place { standing: Reverse(standing), number: self.came };
        self.came += 1;
        self.isl_tokens = self.isl_tokens.saturating_add(isl_tokens);
        self.waiting.insert(place, (item, isl_tokens));
        Ok(place)
    }

    /// Removes a request; `None` if it is no longer queued.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let (item, isl_tokens) = self.waiting.remove(&place)?;
        self.isl_tokens = self.isl_tokens.saturating_sub(isl_tokens);
        Some(item)
    }

    /// The first request.
    pub fn first(&self) -> Option<(Place, &T)> {
        self.waiting.first_key_value().map(|(place, (item, _))| (*place, item))
    }

    /// The next request after `place`, which may have left.
    pub fn after(&self, place: Place) -> Option<(Place, &T)> {
        let rest = (Bound::Excluded(place), Bound::Unbounded);
        self.waiting.range(rest).next().map(|(place, (item, _))| (*place, item))
    }

    /// Number of queued requests.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Tokens of the queued prompts.
    pub fn isl_tokens(&self) -> u64 {
        self.isl_tokens
    }
}
