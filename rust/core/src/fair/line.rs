//! A line of requests, ordered, with an end.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

use super::order::Standing;
use crate::error::{Error, Result};

/// Where a request stands: lower is earlier. Equal standings leave in the order in which they came.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    standing: Reverse<Standing>,
    number: u64,
}

/// Requests that wait, in the order in which they are to leave. There is no clock, no lock and no
/// chance in it.
///
/// # Cost
/// Every call takes time in the logarithm of the line's length.
#[derive(Debug)]
pub struct Line<T> {
    limit: usize,
    came: u64,
    isl_tokens: u64,
    waiting: BTreeMap<Place, (T, u64)>,
}

impl<T> Line<T> {
    /// A line of at most `limit` requests.
    pub fn new(limit: usize) -> Self {
        Self { limit, came: 0, isl_tokens: 0, waiting: BTreeMap::new() }
    }

    /// Take a request with a prompt of `isl_tokens` in.
    ///
    /// # Errors
    /// [`Error::Overloaded`] when as many wait as may.
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

    /// It has left; `None` when it was not there any more.
    pub fn remove(&mut self, place: Place) -> Option<T> {
        let (item, isl_tokens) = self.waiting.remove(&place)?;
        self.isl_tokens = self.isl_tokens.saturating_sub(isl_tokens);
        Some(item)
    }

    /// Who is first.
    pub fn first(&self) -> Option<(Place, &T)> {
        self.waiting.first_key_value().map(|(place, (item, _))| (*place, item))
    }

    /// Who is next after `place`, whether that is still there or not.
    pub fn after(&self, place: Place) -> Option<(Place, &T)> {
        let rest = (Bound::Excluded(place), Bound::Unbounded);
        self.waiting.range(rest).next().map(|(place, (item, _))| (*place, item))
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Tokens of their prompts.
    pub fn isl_tokens(&self) -> u64 {
        self.isl_tokens
    }
}
