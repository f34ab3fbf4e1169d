//! The built-in policies, by name.

use std::str::FromStr;

use crate::error::{Error, Result};

named! {
    /// How a worker is chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Policy {
        /// Lowest cost: uncached and queued prompt blocks, plus active blocks.
        #[default]
        Kv = "kv",
        /// The candidate with the oldest booking, so that all take turns even if the candidates
        /// change between requests.
        RoundRobin = "round_robin",
        /// Any candidate, all equally likely.
        Random = "random",
        /// Fewest active blocks and blocks to prefill; then fewest active requests.
        LeastLoaded = "least_loaded",
        /// The less loaded of two random candidates.
        PowerOfTwo = "power_of_two",
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// Parses a policy's name; `-` and `_` are equivalent.
    fn from_str(name: &str) -> Result<Self> {
        let wanted = name.replace('-', "_");
        Self::from_name(&wanted).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("policy must be one of {names}; got {name:?}"))
        })
    }
}
