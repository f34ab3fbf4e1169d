//! The policies that are built in, by name.

use std::str::FromStr;

use crate::error::{Error, Result};

named! {
    /// How a worker is chosen.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Policy {
        /// Lowest cost: uncached and queued prompt blocks, plus active blocks.
        #[default]
        Kv = "kv",
        /// The candidate whose last booking is longest ago, so that all take turns however the
        /// candidates change from request to request.
        RoundRobin = "round_robin",
        /// Any candidate, all equally likely.
        Random = "random",
        /// Fewest active blocks and blocks to prefill; then fewest active requests.
        LeastLoaded = "least_loaded",
        /// Of two random candidates the less loaded one.
        PowerOfTwo = "power_of_two",
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// A policy by its name; `-` and `_` are the same.
    fn from_str(name: &str) -> Result<Self> {
        let wanted = name.replace('-', "_");
        Self::from_name(&wanted).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("policy must be one of {names}; got {name:?}"))
        })
    }
}
