//! Settings of the policies: one table of variables, with defaults by profile and ranges.

mod read;
mod table;

use std::str::FromStr;

use rand::{Rng, RngCore};

pub use read::Origin;
pub(super) use read::{fault, flag};
pub use table::{Kind, VARIABLES, Variable};

use crate::error::{Error, Result};

named! {
    /// The source of defaults, and the treatment of values out of range.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub enum Profile {
        /// The values that AIBrix documents. A value out of range is an error; 0 is legal.
        #[default]
        Document = "document",
        /// The behavior of AIBrix's code: its values, its units, and the default with a warning for a
        /// value that is invalid or not above 0.
        AibrixCompat = "aibrix-compat",
    }
}

impl FromStr for Profile {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::from_name(name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::Config(format!("policy profile must be one of {names}; got {name:?}"))
        })
    }
}

named! {
    /// How `prefix-cache` cuts a prompt.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum TokenizerKind {
        /// Bytes of UTF-8.
        Character = "character",
        /// Tokens of `cl100k_base`.
        Tiktoken = "tiktoken",
        /// The model's own tokens.
        Model = "model",
    }
}

/// The source of holders for `prefix-cache`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PrefixSource {
    /// Engines' events if there are any, else the table.
    Auto,
    /// The table of routed prompts.
    Table,
    /// Engines' events only.
    Index,
}

/// Settings of `prefix-cache`.
#[derive(Debug, Clone, PartialEq)]
pub struct PrefixSettings {
    /// Table and match walk behave like AIBrix's, including their weaknesses.
    pub is_compat: bool,
    /// How a prompt is cut.
    pub tokenizer: TokenizerKind,
    /// Tokens in a block; bytes of the tokenizer's output in `aibrix-compat`. At least 1.
    pub block_size: u32,
    /// Maximum blocks in the table, over all models.
    pub max_blocks: usize,
    /// Maximum bytes of the table, estimated; 0: limited by blocks only.
    pub max_bytes: u64,
    /// Time between two sweeps (`aibrix-compat`).
    pub eviction_interval_ms: u64,
    /// Time after which unused blocks are dropped.
    pub eviction_duration_ms: u64,
    /// The load is imbalanced if the most and the fewest active requests differ by more than this.
    pub imbalance_abs_count: i64,
    /// Active requests that a worker holding some of the prompt may have above the mean, in
    /// standard deviations.
    pub standard_deviation_factor: f64,
    /// Seed of the hashes; `None` draws one.
    pub hash_seed: Option<u64>,
    /// The source of holders.
    pub source: PrefixSource,
}

named! {
    /// Unit of the window of `vtc-basic`.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum TimeUnit {
        /// 3,600 seconds.
        Hours = "hours",
        /// 60 seconds.
        Minutes = "minutes",
        /// Seconds.
        Seconds = "seconds",
        /// Thousandths of a second.
        Milliseconds = "milliseconds",
    }
}

/// Settings of `vtc-basic`.
#[derive(Debug, Clone, PartialEq)]
pub struct VtcSettings {
    /// Score and window behave like AIBrix's, including their weaknesses.
    pub is_compat: bool,
    /// Unit of the window.
    pub time_unit: TimeUnit,
    /// Length of the window, in units.
    pub window_size: u64,
    /// Lowest and highest total of a client until one is known.
    pub default_totals: (f64, f64),
    /// Weight of a prompt token.
    pub input_token_weight: f64,
    /// Weight of a generated token.
    pub output_token_weight: f64,
    /// Requests at which a worker counts as fully used; above 0.
    pub max_pod_load: f64,
    /// Weight of fairness in the score.
    pub fairness_weight: f64,
    /// Weight of utilization in the score.
    pub utilization_weight: f64,
    /// Maximum clients in the window; further ones are not counted.
    pub max_clients: usize,
}

/// Settings of all policies.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// The source of the defaults.
    pub profile: Profile,
    /// The selected strategy, if any.
    pub algorithm: Option<String>,
    /// `prefix-cache`.
    pub prefix: PrefixSettings,
    /// `vtc-basic`.
    pub vtc: VtcSettings,
    /// `session-affinity`: maximum remembered conversations; the least recently used are dropped.
    pub max_sessions: usize,
    /// Value and origin of every variable, in the order of [`VARIABLES`].
    pub origins: Vec<Origin>,
    /// Invalid values that were replaced by a default (`aibrix-compat`).
    pub warnings: Vec<String>,
}

impl Settings {
    /// The defaults of `profile`.
    pub fn new(profile: Profile) -> Self {
        Self::read(profile, |_| None).expect("the defaults in the table are legal")
    }

    /// The same settings with these variables replaced by legal values.
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

    /// The seed of the prefix hashes: the configured one, or one from `rng`.
    pub fn hash_seed(&self, rng: &mut dyn RngCore) -> u64 {
        self.prefix.hash_seed.unwrap_or_else(|| rng.random())
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self::new(Profile::default())
    }
}
