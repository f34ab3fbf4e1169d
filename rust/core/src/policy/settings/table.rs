//! The variables.

/// How a variable is read, and what is legal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// A decimal integer in `low..=high`.
    Integer {
        /// Lowest legal value.
        low: i64,
        /// Highest legal value.
        high: i64,
    },
    /// A finite number of at least 0, or above 0.
    Number {
        /// Whether 0 is legal.
        is_zero_legal: bool,
    },
    /// One of these words.
    Word(&'static [&'static str]),
    /// `1`, `t`, `true`, `0`, `f`, `false` and their capitals.
    Flag,
    /// A decimal integer of 64 bits, or empty.
    Seed,
    /// Anything.
    Text,
}

/// One variable, read with the prefix `KVFLASH_`, then with `AIBRIX_`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Variable {
    /// The name, without its prefix.
    pub name: &'static str,
    /// How it is read.
    pub kind: Kind,
    /// The default in `document`.
    pub document: &'static str,
    /// The default in `aibrix-compat`.
    pub compat: &'static str,
    /// Its meaning, with its unit.
    pub help: &'static str,
}

const fn integer(low: i64, high: i64) -> Kind {
    Kind::Integer { low, high }
}

const WEIGHT: Kind = Kind::Number { is_zero_legal: true };
const ABOVE_ZERO: Kind = Kind::Number { is_zero_legal: false };
const DAYS_365_MINUTES: i64 = 365 * 24 * 60;

macro_rules! variables {
    ($($name:literal: $kind:expr => $document:literal, $compat:literal, $help:literal;)+) => {
        /// Every variable, in the order shown.
        pub const VARIABLES: [Variable; [$($name),+].len()] = [$(Variable {
            name: $name,
            kind: $kind,
            document: $document,
            compat: $compat,
            help: $help,
        }),+];
    };
}

variables! {
    "ROUTING_ALGORITHM": Kind::Text => "", "", "strategy to route by";
    "STATESYNC_ENABLED": Kind::Flag => "false", "false", "routers share their state";
    "PREFIX_CACHE_TOKENIZER_TYPE": Kind::Word(&["character", "tiktoken", "model"])
        => "character", "character", "unit that prompts are split by";
    "PREFIX_CACHE_BLOCK_SIZE": integer(1, 1 << 20) => "128", "4",
        "tokens in a block (16 by default with tiktoken and model); bytes in aibrix-compat";
    "PREFIX_CACHE_BLOCK_NUMBER": integer(0, 1 << 30) => "200000", "200000",
        "maximum blocks in the table, over all models";
    "PREFIX_CACHE_MAX_BYTES": integer(0, i64::MAX) => "268435456", "268435456",
        "maximum bytes of the table; 0: no limit";
    "PREFIX_CACHE_EVICTION_INTERVAL_SECONDS": integer(0, 86_400) => "1", "1",
        "seconds between sweeps; the profile document needs none";
    "PREFIX_CACHE_EVICTION_DURATION_MINS": integer(0, DAYS_365_MINUTES) => "20", "20",
        "minutes after which an unused block is forgotten";
    "PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT": integer(0, i64::MAX) => "16", "8",
        "imbalanced when most and fewest active requests differ by more";
    "PREFIX_CACHE_STANDARD_DEVIATION_FACTOR": WEIGHT => "2", "1",
        "standard deviations above the mean that a match may be busy; an integer in aibrix-compat";
    "PREFIX_CACHE_HASH_SEED": Kind::Seed => "", "",
        "seed of hashes; drawn at the start, or 0 when routers share their state";
    "PREFIX_CACHE_KV_EVENT_SYNC_ENABLED": Kind::Text => "auto", "auto",
        "auto: engines' events where there are any; true: only these; false: only the table";
    "ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT":
        Kind::Word(&["hours", "minutes", "seconds", "milliseconds"]) => "minutes", "minutes",
        "unit of the window; aibrix-compat knows no hours";
    "ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE": integer(0, DAYS_365_MINUTES * 60) => "5", "5",
        "length of the window, in units";
    "ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS": WEIGHT => "1000", "1000",
        "assumed lowest total of a client while none is known";
    "ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS": WEIGHT => "8000", "8000",
        "assumed highest total of a client while none is known";
    "ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT": WEIGHT => "1", "1", "weight of a prompt token";
    "ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT": WEIGHT => "2", "2", "weight of a generated token";
    "ROUTER_VTC_BASIC_MAX_POD_LOAD": ABOVE_ZERO => "100", "100",
        "requests at which a worker counts as fully used";
    "ROUTER_VTC_BASIC_FAIRNESS_WEIGHT": WEIGHT => "1", "1", "weight of fairness in the score";
    "ROUTER_VTC_BASIC_UTILIZATION_WEIGHT": WEIGHT => "1", "1", "weight of utilization in the score";
    "ROUTER_VTC_MAX_CLIENTS": integer(1, 1 << 24) => "100000", "100000",
        "maximum clients in the window; further ones are not counted";
    "SESSION_MAX_SESSIONS": integer(1, 1 << 24) => "100000", "100000",
        "maximum conversations in memory";
    "POLICY_PROFILE": Kind::Word(&["document", "aibrix-compat"]) => "document", "aibrix-compat",
        "source of defaults";
}
