//! The order of requests that no worker has room to prefill.

use std::cmp::Ordering;
use std::str::FromStr;

use crate::error::{Error, Result};

named! {
    /// The order of several waiting requests.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub enum LineOrder {
        /// First come, first served: best for the slowest request.
        #[default]
        Fcfs = "fcfs",
        /// Last come, first served: long waits are abandoned, which suits an overload.
        Lcfs = "lcfs",
        /// The shortest work first, weighted by priority: best for the mean.
        Wspt = "wspt",
    }
}

impl LineOrder {
    /// The position of a request of `isl_tokens`, of which the best worker holds `cached_tokens`,
    /// that arrived `arrival_s` seconds after a common origin.
    ///
    /// # Source
    /// The cases of `queue-policy` in `tests/vectors/queue_cases.json`.
    pub fn standing(
        self,
        wish: &Wish,
        arrival_s: f64,
        isl_tokens: u64,
        cached_tokens: u64,
    ) -> Standing {
        let jump = wish.priority_jump;
        let score = match self {
            Self::Fcfs => jump - arrival_s,
            Self::Lcfs => jump + arrival_s,
            Self::Wspt => {
                let work = isl_tokens.saturating_sub(cached_tokens).max(1);
                (1.0 + jump.max(0.0)) / work as f64
            }
        };
        Standing { strict_priority: wish.strict_priority, score }
    }
}

impl FromStr for LineOrder {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::from_name(text).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::invalid(format!("router_queue_policy must be one of {names}, got {text:?}"))
        })
    }
}

/// The priority of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Wish {
    /// Requests with a higher number go before all those with lower ones.
    pub strict_priority: u32,
    /// Within these: seconds that it is moved ahead (`fcfs`, `lcfs`), or the excess of its weight
    /// over 1 (`wspt`). Finite.
    pub priority_jump: f64,
}

impl Wish {
    /// From a request's values; missing and negative priorities count as 0.
    ///
    /// # Errors
    /// `InvalidArgument` for a priority that is not a number.
    pub fn of(priority: Option<f64>, strict_priority: Option<u32>) -> Result<Self> {
        let priority = priority.unwrap_or(0.0);
        if !priority.is_finite() {
            return Err(Error::invalid(format!("priority must be finite, got {priority}")));
        }
        let strict_priority = strict_priority.unwrap_or(0);
        Ok(Self { strict_priority, priority_jump: priority.max(0.0) })
    }
}

/// A request's rank: greater is earlier.
#[derive(Debug, Clone, Copy, Default)]
pub struct Standing {
    /// Compared first.
    pub strict_priority: u32,
    /// Compared within one strict priority.
    pub score: f64,
}

impl Ord for Standing {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_priority = self.strict_priority.cmp(&other.strict_priority);
        by_priority.then_with(|| self.score.total_cmp(&other.score))
    }
}

impl PartialOrd for Standing {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Standing {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Standing {}
