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
use super::settings::{Settings, VARIABLES, Variable, flag};
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
        let policy = registry::build(text, settings, rng)?;
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

/// A parameter of one policy.
#[derive(Clone, Copy)]
enum Parameter {
    /// A finite number of at least 0.
    Number(&'static str, fn(&mut Changes) -> &mut Option<f64>),
    /// A boolean, and whether the router counts what it controls.
    Switch(&'static str, fn(&mut Changes) -> &mut Option<bool>, fn(Counted) -> bool),
    /// One of the policies' variables.
    Variable(&'static Variable),
}

use Parameter::{Number, Switch};

const TEMPERATURE: Parameter = Number("temperature", |changes| &mut changes.temperature);

const KV: [Parameter; 9] = [
    Number("overlap_score_weight", |changes| &mut changes.overlap_score_weight),
    Number("overlap_score_credit", |changes| &mut changes.overlap_score_credit),
    Number("overlap_score_credit_decay", |changes| &mut changes.overlap_score_credit_decay),
    Number("prefill_load_scale", |changes| &mut changes.prefill_load_scale),
    Number("active_request_weight", |changes| &mut changes.active_request_weight),
    TEMPERATURE,
    Switch("track_active_blocks", |of| &mut of.track_active_blocks, |of| of.active_blocks),
    Switch("track_prefill_tokens", |of| &mut of.track_prefill_tokens, |of| of.prefill_tokens),
    Switch("assume_kv_reuse", |of| &mut of.assume_kv_reuse, |of| of.kv_reuse),
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
            Self::Number(name, _) | Self::Switch(name, ..) => (*name).into(),
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
        counted: Counted,
        changes: &mut Changes,
    ) -> Result<String, String> {
        match self {
            Self::Number(_, place) => {
                let number = value.parse().ok().filter(|n: &f64| n.is_finite() && *n >= 0.0);
                let number = number.ok_or("finite and at least 0")?;
                *place(changes) = Some(number);
                Ok(number.to_string())
            }
            Self::Switch(_, place, is_counted) => {
                let switch = flag(value).ok_or("true or false")?;
                if switch && !is_counted(counted) {
                    return Err("false, because the router does not count it".into());
                }
                *place(changes) = Some(switch);
                Ok(switch.to_string())
            }
            Self::Variable(variable) => match settings.fault(variable, value) {
                _ if value.is_empty() => Err("set".into()),
                Some(wanted) => Err(wanted),
                None => Ok(value.into()),
            },
        }
    }
}

/// Differences between its policy's view and the router's.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Changes {
    overlap_score_weight: Option<f64>,
    overlap_score_credit: Option<f64>,
    overlap_score_credit_decay: Option<f64>,
    prefill_load_scale: Option<f64>,
    active_request_weight: Option<f64>,
    temperature: Option<f64>,
    track_active_blocks: Option<bool>,
    track_prefill_tokens: Option<bool>,
    assume_kv_reuse: Option<bool>,
}

impl Changes {
    fn request(&self, request: &RequestTerms) -> RequestTerms {
        let mut of = *request;
        let scale = &mut of.scale;
        for (place, value) in [
            (&mut of.overlap_score_weight, self.overlap_score_weight),
            (&mut of.temperature, self.temperature),
            (&mut scale.overlap_score_credit, self.overlap_score_credit),
            (&mut scale.overlap_score_credit_decay, self.overlap_score_credit_decay),
            (&mut scale.prefill_load_scale, self.prefill_load_scale),
            (&mut scale.active_request_weight, self.active_request_weight),
        ] {
            *place = value.unwrap_or(*place);
        }
        if self.track_active_blocks == Some(false) {
            of.tracked_blocks = 0;
        }
        of
    }

    /// Whether it sees different loads than the router.
    fn changes_loads(&self) -> bool {
        [self.track_active_blocks, self.track_prefill_tokens, self.assume_kv_reuse]
            .contains(&Some(false))
    }

    fn candidate(&self, candidate: &Candidate, block_size: u32) -> Candidate {
        let mut of = *candidate;
        let Some(load) = &mut of.load else { return of };
        if self.assume_kv_reuse == Some(false) {
            load.shared_blocks = 0;
            // The full prompts of all requests, except for the unfilled part of each last block.
            load.blocks = load.context_tokens.checked_div(u64::from(block_size)).unwrap_or(0);
        }
        if self.track_active_blocks == Some(false) {
            (load.shared_blocks, load.blocks) = (0, 0);
        }
        if self.track_prefill_tokens == Some(false) {
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
        if self.changes == Changes::default() {
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
