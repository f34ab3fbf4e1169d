//! What the policies are told: one table of variables, their defaults by profile and their ranges.

mod read;
mod table;

use std::fmt;
use std::str::FromStr;

use rand::{Rng, RngCore};

pub use read::Origin;
pub(super) use read::flag;
pub use table::{Kind, VARIABLES, Variable};

use crate::error::{Error, Result};

/// Where defaults come from, and what becomes of values that are out of range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Profile {
    /// The values that AIBrix documents. A value out of range is an error; 0 is legal.
    #[default]
    Document,
    /// What AIBrix's code does: its values, its units, and the default with a warning for a value
    /// that can't be read or is not above 0.
    AibrixCompat,
}

impl Profile {
    /// All profiles.
    pub const ALL: [Self; 2] = [Self::Document, Self::AibrixCompat];

    /// The name in configuration, logs and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Document => "document",
            Self::AibrixCompat => "aibrix-compat",
        }
    }
}

impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|profile| profile.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("policy profile must be one of {names}; got {name:?}"))
        })
    }
}

/// What a prompt is cut into for `prefix-cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TokenizerKind {
    /// Bytes of UTF-8.
    Character,
    /// Tokens of `cl100k_base`.
    Tiktoken,
    /// The model's own tokens.
    Model,
}

/// Where `prefix-cache` knows from who holds what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefixSource {
    /// Engines' events where there are any, else the table.
    Auto,
    /// What was routed where.
    Table,
    /// Engines' events only.
    Index,
}

/// Settings of `prefix-cache`.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixSettings {
    /// Table and match walk as AIBrix has them, with their weaknesses.
    pub is_compat: bool,
    /// What a prompt is cut into.
    pub tokenizer: TokenizerKind,
    /// Tokens in a block; bytes of the tokenizer's output in `aibrix-compat`. At least 1.
    pub block_size: u32,
    /// Most blocks in the table, over all models.
    pub max_blocks: usize,
    /// Most bytes of the table, estimated; 0 for no limit but that of blocks.
    pub max_bytes: u64,
    /// Between two sweeps (`aibrix-compat`).
    pub eviction_interval_ms: u64,
    /// What was not used for longer is forgotten.
    pub eviction_duration_ms: u64,
    /// The load is imbalanced when most and fewest active requests differ by more.
    pub imbalance_abs_count: i64,
    /// A worker that holds some of the prompt may have so many standard deviations more active
    /// requests than the mean.
    pub standard_deviation_factor: f64,
    /// Where hashes start; `None` draws one.
    pub hash_seed: Option<u64>,
    /// Who knows who holds what.
    pub source: PrefixSource,
}

/// Unit of the window of `vtc-basic`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TimeUnit {
    /// 3,600 seconds.
    Hours,
    /// 60 seconds.
    Minutes,
    /// Seconds.
    Seconds,
    /// Thousandths of a second.
    Milliseconds,
}

/// Settings of `vtc-basic`.
#[derive(Debug, Clone, PartialEq)]
pub struct VtcSettings {
    /// Score and window as AIBrix has them, with their weaknesses.
    pub is_compat: bool,
    /// Unit of the window.
    pub time_unit: TimeUnit,
    /// Length of the window, in units.
    pub window_size: u64,
    /// Lowest and highest total of a client while none is known.
    pub default_totals: (f64, f64),
    /// What a prompt token weighs.
    pub input_token_weight: f64,
    /// What a generated token weighs.
    pub output_token_weight: f64,
    /// Requests at which a worker counts as fully used; above 0.
    pub max_pod_load: f64,
    /// What fairness weighs in the score.
    pub fairness_weight: f64,
    /// What utilization weighs in the score.
    pub utilization_weight: f64,
    /// Most clients in the window; further ones are not counted.
    pub max_clients: usize,
}

/// Settings of `session-affinity`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionSettings {
    /// Most conversations remembered; the longest unused ones are forgotten.
    pub max_sessions: usize,
}

/// Settings of all policies.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where defaults came from.
    pub profile: Profile,
    /// The strategy that was asked for, if any.
    pub algorithm: Option<String>,
    /// Routers that share state use the same hash seed.
    pub is_state_synced: bool,
    /// `prefix-cache`.
    pub prefix: PrefixSettings,
    /// `vtc-basic`.
    pub vtc: VtcSettings,
    /// `session-affinity`.
    pub session: SessionSettings,
    /// Value and origin of every variable, in the order of [`VARIABLES`].
    pub origins: Vec<Origin>,
    /// What was wrong and replaced by a default (`aibrix-compat`).
    pub warnings: Vec<String>,
}

impl Settings {
    /// The defaults of `profile`.
    pub fn new(profile: Profile) -> Self {
        Self::read(profile, |_| None).expect("the defaults in the table are legal")
    }

    /// What `lookup` says of each variable, `KVFLASH_` before `AIBRIX_`, and the defaults of
    /// `profile` for the rest. A variable that is empty is not set.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first variable that is out of range, what is legal
    /// and what came. In `aibrix-compat` it gets its default and a line in `warnings` instead.
    pub fn read(profile: Profile, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        read::settings(profile, &lookup)
    }

    /// The same, but for these variables by name, whose values are legal.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn with(&self, variables: &[(&str, String)]) -> Result<Self> {
        Self::read(self.profile, |full| {
            let name = full.strip_prefix("KVFLASH_")?;
            let given = variables.iter().find(|(known, _)| *known == name);
            let known = || {
                let mut set = self.origins.iter().filter(|origin| origin.read_from.is_some());
                Some(set.find(|origin| origin.name == name)?.value.clone())
            };
            given.map(|(_, value)| value.clone()).or_else(known)
        })
    }

    /// What is legal for a variable, when `value` is not.
    pub(super) fn fault(&self, variable: &Variable, value: &str) -> Option<String> {
        read::fault(self.profile, variable, value)
    }

    /// Which of the variables that were set change nothing, each with the setting that would let it count.
    ///
    /// # Arguments
    /// * `has_events` - Engines' events are listened to.
    pub fn without_effect(&self, has_events: bool) -> Vec<String> {
        read::without_effect(self, has_events)
    }

    /// The seed of the prefix hashes: the given one, or one from `rng`.
    pub fn hash_seed(&self, rng: &mut dyn RngCore) -> u64 {
        self.prefix.hash_seed.unwrap_or_else(|| rng.random())
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new(Profile::default())
    }
}
