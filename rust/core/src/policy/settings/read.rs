//! Reads settings from variables.

use super::table::{Kind, VARIABLES, Variable};
use super::{
    PrefixSettings, PrefixSource, Profile, Settings, TimeUnit, TokenizerKind, VtcSettings,
};
use crate::error::{Error, Result};

/// Prefixes of a variable's name; the first one that is set counts.
const PREFIXES: [&str; 2] = ["KVFLASH_", "AIBRIX_"];

/// A variable's value, and where it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// Name of the variable, without its prefix.
    pub name: &'static str,
    /// The effective value.
    pub value: String,
    /// Full name of the variable that was read; `None` for the default.
    pub read_from: Option<String>,
}

struct Reader<'a> {
    profile: Profile,
    lookup: &'a dyn Fn(&str) -> Option<String>,
    origins: Vec<Origin>,
    warnings: Vec<String>,
}

impl Settings {
    /// Reads each variable with `lookup`, `KVFLASH_` before `AIBRIX_`, with the defaults of
    /// `profile` for the rest. An empty variable is unset.
    ///
    /// # Errors
    /// [`Error::Config`] with the name of the first variable that is out of range, what is legal
    /// and what came. In `aibrix-compat` the default is used instead, with a line in `warnings`.
    pub fn read(profile: Profile, lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut reader =
            Reader { profile, lookup: &lookup, origins: Vec::new(), warnings: Vec::new() };
        let is_compat = profile == Profile::AibrixCompat;
        for variable in &VARIABLES {
            let origin = reader.origin(variable)?;
            reader.origins.push(origin);
        }
        let tokenizer = TokenizerKind::from_name(reader.text("PREFIX_CACHE_TOKENIZER_TYPE"))
            .expect("only legal values are kept");
        if !is_compat && tokenizer != TokenizerKind::Character {
            reader.replace_default("PREFIX_CACHE_BLOCK_SIZE", "16");
        }
        let is_state_synced = flag(reader.text("STATESYNC_ENABLED")).unwrap_or(false);
        let hash_seed = match reader.text("PREFIX_CACHE_HASH_SEED").parse() {
            Ok(seed) => Some(seed),
            Err(_) => is_state_synced.then_some(0),
        };
        let source = match flag(reader.text("PREFIX_CACHE_KV_EVENT_SYNC_ENABLED")) {
            Some(true) => PrefixSource::Index,
            Some(false) => PrefixSource::Table,
            None => PrefixSource::Auto,
        };
        let time_unit = TimeUnit::from_name(reader.text("ROUTER_VTC_TOKEN_TRACKER_TIME_UNIT"))
            .expect("only legal values are kept");
        Ok(Self {
            profile,
            algorithm: Some(reader.text("ROUTING_ALGORITHM").to_owned()).filter(|a| !a.is_empty()),
            prefix: PrefixSettings {
                is_compat,
                tokenizer,
                block_size: reader.integer("PREFIX_CACHE_BLOCK_SIZE") as u32,
                max_blocks: reader.integer("PREFIX_CACHE_BLOCK_NUMBER") as usize,
                max_bytes: reader.integer("PREFIX_CACHE_MAX_BYTES") as u64,
                eviction_interval_ms: reader.integer("PREFIX_CACHE_EVICTION_INTERVAL_SECONDS")
                    as u64
                    * 1_000,
                eviction_duration_ms: reader.integer("PREFIX_CACHE_EVICTION_DURATION_MINS") as u64
                    * 60_000,
                imbalance_abs_count: reader
                    .integer("PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT"),
                standard_deviation_factor: reader.number("PREFIX_CACHE_STANDARD_DEVIATION_FACTOR"),
                hash_seed,
                source,
            },
            vtc: VtcSettings {
                is_compat,
                time_unit,
                window_size: reader.integer("ROUTER_VTC_TOKEN_TRACKER_WINDOW_SIZE") as u64,
                default_totals: (
                    reader.number("ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS"),
                    reader.number("ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS"),
                ),
                input_token_weight: reader.number("ROUTER_VTC_BASIC_INPUT_TOKEN_WEIGHT"),
                output_token_weight: reader.number("ROUTER_VTC_BASIC_OUTPUT_TOKEN_WEIGHT"),
                max_pod_load: reader.number("ROUTER_VTC_BASIC_MAX_POD_LOAD"),
                fairness_weight: reader.number("ROUTER_VTC_BASIC_FAIRNESS_WEIGHT"),
                utilization_weight: reader.number("ROUTER_VTC_BASIC_UTILIZATION_WEIGHT"),
                max_clients: reader.integer("ROUTER_VTC_MAX_CLIENTS") as usize,
            },
            max_sessions: reader.integer("SESSION_MAX_SESSIONS") as usize,
            origins: reader.origins,
            warnings: reader.warnings,
        })
    }

    /// Variables that are set without effect, each with the setting that would give it one.
    ///
    /// # Arguments
    /// * `strategies` - The strategy to route by, and those of shadows.
    /// * `has_events` - Whether engines' events are received.
    pub fn without_effect(&self, strategies: &[&str], has_events: bool) -> Vec<String> {
        // A strategy may weigh several policies, and a shadow may have settings of its own.
        let plain =
            |text: &&str| text.replace('_', "-").to_ascii_lowercase().replace("aware", "cache");
        let plain: Vec<String> = strategies.iter().map(plain).collect();
        let is_used = |policy: &str| plain.iter().any(|strategy| strategy.contains(policy));
        let is_indexed = match self.prefix.source {
            PrefixSource::Auto => has_events,
            PrefixSource::Table => false,
            PrefixSource::Index => true,
        };
        let is_compat = self.profile == Profile::AibrixCompat;
        let unused = |origin: &Origin| {
            let full = origin.read_from.as_ref()?;
            let prefix = full.strip_suffix(origin.name)?;
            if let Some(policy) = reader_of(origin.name).filter(|policy| !is_used(policy)) {
                let used = strategies.join(", ");
                return Some(format!(
                    "{full} has no effect without {prefix}ROUTING_ALGORITHM={policy} or --router-mode {policy}: \
                     the policy is {used}"
                ));
            }
            Some(match origin.name {
                "PREFIX_CACHE_BLOCK_SIZE" if is_indexed => format!(
                    "{full} has no effect on models with engines that publish KV events: prefix-cache counts \
                     the engines' own blocks there; {prefix}PREFIX_CACHE_KV_EVENT_SYNC_ENABLED=false makes \
                     it cut prompts by itself, with this block size"
                ),
                "ROUTER_VTC_TOKEN_TRACKER_MIN_TOKENS" | "ROUTER_VTC_TOKEN_TRACKER_MAX_TOKENS"
                    if !is_compat =>
                {
                    format!(
                        "{full} has no effect with the policy profile document: vtc-basic scores clients \
                         by their shares of all tokens there; --policy-profile aibrix-compat lets it count"
                    )
                }
                _ => return None,
            })
        };
        self.origins.iter().filter_map(unused).collect()
    }
}

/// The policy that reads a variable, if it is of one only.
fn reader_of(name: &str) -> Option<&'static str> {
    match name {
        "STATESYNC_ENABLED" => Some("prefix-cache"),
        "SESSION_MAX_SESSIONS" => Some("session-affinity"),
        _ if name.starts_with("PREFIX_CACHE_") => Some("prefix-cache"),
        _ if name.starts_with("ROUTER_VTC_") => Some("vtc-basic"),
        _ => None,
    }
}

impl Reader<'_> {
    /// The effective value for `variable`; it is legal.
    fn origin(&mut self, variable: &Variable) -> Result<Origin> {
        let name = variable.name;
        let default = match self.profile {
            Profile::Document => variable.document,
            Profile::AibrixCompat => variable.compat,
        };
        let by_default = Origin { name, value: default.into(), read_from: None };
        if name == "POLICY_PROFILE" {
            // The caller has read it: it selects the defaults of all others.
            return Ok(Origin { value: self.profile.name().into(), ..by_default });
        }
        let found = PREFIXES.into_iter().find_map(|prefix| {
            let full = format!("{prefix}{name}");
            let value = (self.lookup)(&full).filter(|value| !value.is_empty())?;
            Some((full, value))
        });
        let Some((full, value)) = found else { return Ok(by_default) };
        match fault(self.profile, variable, &value) {
            None => Ok(Origin { name, value, read_from: Some(full) }),
            Some(legal) if self.profile == Profile::Document => {
                Err(Error::Config(format!("{full} must be {legal}, got {value:?}")))
            }
            Some(legal) => {
                self.warnings
                    .push(format!("{full} must be {legal}, got {value:?}: {default:?} is used"));
                Ok(by_default)
            }
        }
    }

    /// Changes the default of an unset variable.
    fn replace_default(&mut self, name: &str, value: &str) {
        let found = self.origins.iter_mut().find(|origin| origin.name == name);
        if let Some(origin) = found.filter(|origin| origin.read_from.is_none()) {
            origin.value = value.into();
        }
    }

    fn text(&self, name: &str) -> &str {
        let found = self.origins.iter().find(|origin| origin.name == name);
        &found.expect("every name asked for is in the table").value
    }

    fn integer(&self, name: &str) -> i64 {
        self.text(name).parse().expect("only legal values are kept")
    }

    fn number(&self, name: &str) -> f64 {
        self.text(name).parse().expect("only legal values are kept")
    }
}

/// What is legal, if `value` is not.
pub(in crate::policy) fn fault(
    profile: Profile,
    variable: &Variable,
    value: &str,
) -> Option<String> {
    let is_compat = profile == Profile::AibrixCompat;
    match variable.kind {
        Kind::Integer { low, high } => {
            // AIBrix treats every value that is not above 0 as a mistake.
            let low = if is_compat { low.max(1) } else { low };
            let is_legal = value.parse().is_ok_and(|value| (low..=high).contains(&value));
            let above = format!("an integer of at least {low}");
            let within = format!("an integer in {low}..={high}");
            (!is_legal).then_some(if high == i64::MAX { above } else { within })
        }
        Kind::Number { .. } if is_compat && variable.name.ends_with("DEVIATION_FACTOR") => {
            let is_legal = value.parse::<i64>().is_ok_and(|value| value > 0);
            (!is_legal).then(|| "an integer of at least 1".into())
        }
        Kind::Number { is_zero_legal } => {
            let is_zero_legal = is_zero_legal && !is_compat;
            let is_legal = value.parse::<f64>().is_ok_and(|value| {
                value.is_finite() && (value > 0.0 || is_zero_legal && value == 0.0)
            });
            let legal = if is_zero_legal { "of at least 0" } else { "above 0" };
            (!is_legal).then(|| format!("a finite number {legal}"))
        }
        Kind::Word(words) => {
            let is_legal = |word: &&str| !is_compat || *word != "hours";
            let legal: Vec<&str> = words.iter().copied().filter(is_legal).collect();
            (!legal.contains(&value)).then(|| format!("one of {}", legal.join(", ")))
        }
        Kind::Flag => flag(value).is_none().then(|| "true or false".into()),
        Kind::Seed => {
            let is_legal = value.parse::<u64>().is_ok();
            (!is_legal).then(|| format!("an integer in 0..={}", u64::MAX))
        }
        Kind::Text if variable.name.ends_with("KV_EVENT_SYNC_ENABLED") => {
            let is_legal = value == "auto" || flag(value).is_some();
            (!is_legal).then(|| "auto, true or false".into())
        }
        Kind::Text => None,
    }
}

/// A boolean as Go's `strconv.ParseBool` reads it.
pub(in crate::policy) fn flag(value: &str) -> Option<bool> {
    match value {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Some(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Some(false),
        _ => None,
    }
}
