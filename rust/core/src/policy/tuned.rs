//! A policy with its own settings: `kv:overlap_score_weight=8,temperature=0.5`.
//!
//! The load table and the weights of tiers belong to the router: settings here change how the
//! policy judges the router's counts.

use std::fmt::Write;
use std::sync::Arc;

use parking_lot::Mutex;
use rand::RngCore;

use super::contract::{Candidates, Context, Memo, RoutePolicy};
use super::cost::{Candidate, CandidateCost, RequestTerms};
use super::decision::Choice;
use super::price::AUTO;
use super::registry;
use super::settings::{Settings, VARIABLES, Variable, fault, flag};
use crate::error::{Error, Result};

/// What the router's load table counts. A policy can leave counts out, but not add them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counted {
    /// Blocks of active requests.
    pub active_blocks: bool,
    /// Prompt tokens of active requests until their first token.
    pub prefill_tokens: bool,
    /// Whether a block that several requests share counts once.
    pub kv_reuse: bool,
}

impl Default for Counted {
    fn default() -> Self {
        Self { active_blocks: true, prefill_tokens: true, kv_reuse: true }
    }
}

/// The policy of `text`: a strategy as for [`registry::build`], or `NAME:PARAMETER=VALUE,...`. Also
/// returns its canonical key, which is equal for equal parameters in any order.
///
/// # Errors
/// [`Error::InvalidArgument`], naming the parameter, what is legal and what came.
pub(super) fn build(
    text: &str,
    settings: &Settings,
    counted: Counted,
    rng: &mut dyn RngCore,
) -> Result<(Arc<dyn RoutePolicy>, String)> {
    let text = text.trim();
    let Some((name, given)) = text.split_once(':').filter(|(_, given)| given.contains('=')) else {
        let policy =
            registry::build(text, settings, rng).map_err(|error| match text.split_once(':') {
                Some(("python", _)) => Error::invalid("a policy in Python can't be a shadow"),
                Some(_) if !text.contains(',') => Error::invalid(format!(
                    "{error}; settings of a shadow are written NAME:PARAMETER=VALUE"
                )),
                _ => error,
            })?;
        let key = policy.name().to_owned();
        return Ok((policy, key));
    };
    let fault = |fault: String| Error::invalid(format!("{text:?}: {fault}"));
    let plain = registry::build(name, settings, rng)?;
    let parameters = parameters_of(plain.name());
    let mut values = Vec::new();
    for item in given.split(',') {
        let item = item.trim();
        let (key, value) = item.split_once('=').ok_or_else(|| {
            fault(format!("{item:?} is not PARAMETER=VALUE; a weighted strategy takes none"))
        })?;
        let at = parameters.iter().position(|one| one.is_called(key.trim()));
        let at = at.ok_or_else(|| fault(unknown(plain.name(), &parameters, key.trim())))?;
        if values.iter().any(|(known, _)| *known == at) {
            return Err(fault(format!("{} is given twice", parameters[at].name())));
        }
        values.push((at, value.trim()));
    }
    values.sort_unstable();
    let (mut changes, mut variables) = (Changes::default(), Vec::new());
    let mut key = plain.name().to_owned();
    for (at, value) in values {
        let parameter = parameters[at];
        let read = parameter.read(value, settings, counted, &mut changes);
        let read = read.map_err(|wanted| {
            fault(format!("{} must be {wanted}, got {value:?}", parameter.name()))
        })?;
        // Writing to a string can't fail.
        let _written = write!(key, " {}={read}", parameter.name());
        if let Parameter::Variable(variable) = parameter {
            variables.push((variable.name, read));
        }
    }
    let policy = match variables.as_slice() {
        [] => plain,
        variables => registry::build(name, &settings.with(variables)?, rng)?,
    };
    let scratch = Mutex::default();
    Ok((Arc::new(Tuned { name: text.into(), policy, changes, scratch }), key))
}

fn unknown(policy: &str, parameters: &[Parameter], key: &str) -> String {
    let names: Vec<String> = parameters.iter().map(Parameter::name).collect();
    match names.as_slice() {
        [] => format!("{policy} takes no parameters, got {key:?}"),
        names => format!("{policy} has no parameter {key:?}; it takes {}", names.join(", ")),
    }
}

type NumberOf = fn(&mut RequestTerms) -> &mut f64;

/// A parameter of one policy.
#[derive(Clone, Copy)]
enum Parameter {
    /// A finite number of at least 0.
    Number(&'static str, NumberOf),
    /// Whether the policy sees what the router counts.
    Switch(&'static str, fn(&mut Counted) -> &mut bool),
    /// One of the policies' variables.
    Variable(&'static Variable),
}

use Parameter::{Number, Switch};

const TEMPERATURE: Parameter = Number("temperature", |of| &mut of.temperature);

const KV: [Parameter; 9] = [
    Number("overlap_score_weight", |of| &mut of.overlap_score_weight),
    Number("overlap_score_credit", |of| &mut of.scale.overlap_score_credit),
    Number("overlap_score_credit_decay", |of| &mut of.scale.overlap_score_credit_decay),
    Number("prefill_load_scale", |of| &mut of.scale.prefill_load_scale),
    Number("active_request_weight", |of| &mut of.scale.active_request_weight),
    TEMPERATURE,
    Switch("track_active_blocks", |of| &mut of.active_blocks),
    Switch("track_prefill_tokens", |of| &mut of.prefill_tokens),
    Switch("assume_kv_reuse", |of| &mut of.kv_reuse),
];

fn parameters_of(policy: &str) -> Vec<Parameter> {
    let variables = |prefix: &str| {
        let own = VARIABLES.iter().filter(|variable| variable.name.starts_with(prefix));
        own.map(Parameter::Variable).collect()
    };
    match policy {
        "kv" => KV.to_vec(),
        AUTO => vec![TEMPERATURE],
        "prefix-cache" => variables("PREFIX_CACHE_"),
        "vtc-basic" => variables("ROUTER_VTC_"),
        "session-affinity" => variables("SESSION_"),
        _ => Vec::new(),
    }
}

impl Parameter {
    fn name(&self) -> String {
        match self {
            Self::Number(name, _) | Self::Switch(name, _) => (*name).into(),
            Self::Variable(variable) => variable.name.to_ascii_lowercase(),
        }
    }

    /// Whether `key` is its name, as in the router's flag or without the prefixes `router-` and
    /// `kv-`.
    fn is_called(&self, key: &str) -> bool {
        let key = key.replace('-', "_").to_ascii_lowercase();
        let short = key.strip_prefix("router_").unwrap_or(&key);
        let short = short.strip_prefix("kv_").unwrap_or(short);
        [key.as_str(), short].contains(&self.name().as_str())
    }

    /// Applies `value`; returns its canonical form. The error says what is legal.
    fn read(
        &self,
        value: &str,
        settings: &Settings,
        mut counted: Counted,
        changes: &mut Changes,
    ) -> Result<String, String> {
        match self {
            Self::Number(_, place) => {
                let number = value.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
                let number = number.ok_or("finite and at least 0")?;
                changes.numbers.push((*place, number));
                Ok(number.to_string())
            }
            Self::Switch(_, place) => {
                let switch = flag(value).ok_or("true or false")?;
                if switch && !*place(&mut counted) {
                    return Err("false, because the router does not count it".into());
                }
                *place(&mut changes.counted) = switch;
                Ok(switch.to_string())
            }
            Self::Variable(variable) => match fault(settings.profile, variable, value) {
                _ if value.is_empty() => Err("set".into()),
                Some(wanted) => Err(wanted),
                None => Ok(value.into()),
            },
        }
    }
}

/// Differences between its policy's view and the router's.
#[derive(Debug, Default)]
struct Changes {
    numbers: Vec<(NumberOf, f64)>,
    /// What it sees of the router's counts.
    counted: Counted,
}

impl Changes {
    fn request(&self, request: &RequestTerms) -> RequestTerms {
        let mut of = *request;
        for (place, number) in &self.numbers {
            *place(&mut of) = *number;
        }
        if !self.counted.active_blocks {
            of.tracked_blocks = 0;
        }
        of
    }

    /// Whether it sees different loads than the router.
    fn changes_loads(&self) -> bool {
        self.counted != Counted::default()
    }

    fn candidate(&self, candidate: &Candidate, block_size: u32) -> Candidate {
        let mut of = *candidate;
        let load = &mut of.load;
        if !self.counted.kv_reuse {
            of.shared_blocks = 0;
            // The full prompts of all requests, except for the unfilled part of each last block.
            load.blocks = load.context_tokens.checked_div(u64::from(block_size)).unwrap_or(0);
        }
        if !self.counted.active_blocks {
            (of.shared_blocks, load.blocks) = (0, 0);
        }
        if !self.counted.prefill_tokens {
            load.prefill_tokens = 0;
        }
        of
    }
}

#[derive(Debug)]
struct Tuned {
    /// As given.
    name: Box<str>,
    policy: Arc<dyn RoutePolicy>,
    changes: Changes,
    scratch: Mutex<Vec<Candidate>>,
}

impl RoutePolicy for Tuned {
    fn name(&self) -> &str {
        &self.name
    }

    fn members(&self) -> &[Arc<dyn RoutePolicy>] {
        std::slice::from_ref(&self.policy)
    }

    fn choose(
        &self,
        context: &Context<'_>,
        candidates: &Candidates<'_>,
        costs: &mut Vec<CandidateCost>,
        rng: &mut dyn RngCore,
    ) -> Option<Choice> {
        if self.changes.numbers.is_empty() && !self.changes.changes_loads() {
            return self.policy.choose(context, candidates, costs, rng);
        }
        let request = self.changes.request(&context.request);
        let own = Context { request, memo: Memo::default(), ..*context };
        if !self.changes.changes_loads() {
            return self.policy.choose(&own, candidates, costs, rng);
        }
        let mut list = self.scratch.lock();
        list.clear();
        let changed = |one| self.changes.candidate(one, request.block_size);
        list.extend(candidates.list.iter().map(changed));
        let seen = Candidates { list: &list, metrics: candidates.metrics };
        self.policy.choose(&own, &seen, costs, rng)
    }
}
