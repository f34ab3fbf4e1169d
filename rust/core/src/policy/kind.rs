//! The policies by name.

use std::fmt;
use std::str::FromStr;

use crate::error::Error;

/// How a worker is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Policy {
    /// Lowest cost: uncached and queued prompt blocks, plus active blocks.
    #[default]
    Kv,
    /// The candidate whose last booking is longest ago, so that all take turns however the
    /// candidates change from request to request.
    RoundRobin,
    /// Any candidate, all equally likely.
    Random,
    /// Fewest active blocks and blocks to prefill; then fewest active requests.
    LeastLoaded,
    /// Of two random candidates the less loaded one.
    PowerOfTwo,
}

impl Policy {
    /// All policies.
    pub const ALL: [Policy; 5] =
        [Self::Kv, Self::RoundRobin, Self::Random, Self::LeastLoaded, Self::PowerOfTwo];

    /// The name in configuration, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::RoundRobin => "round_robin",
            Self::Random => "random",
            Self::LeastLoaded => "least_loaded",
            Self::PowerOfTwo => "power_of_two",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Policy {
    type Err = Error;

    /// A policy by its name; `-` and `_` are the same.
    fn from_str(name: &str) -> Result<Self, Error> {
        let wanted = name.replace('-', "_");
        Self::ALL.into_iter().find(|policy| policy.name() == wanted).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("policy must be one of {names}; got {name:?}"))
        })
    }
}
