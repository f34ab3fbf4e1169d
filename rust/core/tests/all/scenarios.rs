//! Scenario files: events in, decisions out. The files say what happens in words that can be
//! reviewed; this file only plays them.
//!
//! One line is one event; ` -> ` separates what happens from what must come of it; `#` starts a
//! comment. Workers are `instance` or `instance:rank`. The events:
//!
//! - `router key=value ...`: a new router; `policy`, `block_size`, `weight`, `temperature`, `seed`,
//!   `track_blocks`, `kv_reuse`, `expiry_ms`, `max_requests`
//! - `workers W ...`: these are registered from now on
//! - `route NAME isl=N [hashes=H,..] [overlaps=W=BLOCKS,..] [allowed=W,..] [weight=F]
//!   [temperature=F]` books; `preview` with the same arguments (and no name) does not. Expected:
//!   a worker, `any`, or an error (`no_worker`, `invalid`, `overloaded`); then any of `overlap=N`,
//!   `cost=F`, `ties=N`, `margin=F`, `reason=R`, `candidates=N`
//! - `first NAME`, `touch NAME`, `free NAME`: first token, any token, end of the request
//! - `output NAME FRACTION`: one more block generated
//! - `block_size N`
//! - `advance MS`: time passes
//! - `expire -> NAME ...`: the requests taken for leaked, longest idle first
//! - `loads -> W=REQUESTS/PREFILL_TOKENS/BLOCKS ...`: of all workers

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use kvflash_core::clock::ManualClock;
use kvflash_core::error::Error;
use kvflash_core::ids::Worker;
use kvflash_core::load::ActiveLoad;
use kvflash_core::policy::{Decision, Settings, registry};
use kvflash_core::select::{
    self, Considered, Known, Policies, Prompt, Reservation, RouteOverride, Router, RouterConfig,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;

/// Events of all files together, at least: a check that reads nothing proves nothing.
const EVENTS_MIN: usize = 100;

#[test]
fn every_scenario_comes_out_as_written() {
    let folder = Path::new("tests/scenarios");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the folder of scenarios")
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    files.sort();
    let mut events = 0;
    for file in &files {
        let text = std::fs::read_to_string(file).expect("a readable scenario");
        let mut stage = Stage::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            events += 1;
            if let Err(fault) = stage.play(line) {
                panic!("{}:{number}: {fault}\n  {line}", file.display());
            }
        }
    }
    assert!(files.len() >= 7, "only {} scenario files", files.len());
    assert!(events >= EVENTS_MIN, "only {events} events were played");
}

type Outcome<T> = Result<T, String>;

struct Stage {
    clock: Arc<ManualClock>,
    router: Option<Arc<Router>>,
    bookings: BTreeMap<String, Reservation>,
    /// Names by request number, for `expire`.
    names: BTreeMap<u64, String>,
}

/// The arguments of a `route` or `preview`.
#[derive(Default)]
struct Ask {
    prompt: Prompt,
    overlaps: Vec<(Worker, u32)>,
    allowed: Option<Vec<Worker>>,
    overrides: RouteOverride,
}

impl Stage {
    fn new() -> Self {
        Self {
            clock: Arc::default(),
            router: None,
            bookings: BTreeMap::new(),
            names: BTreeMap::new(),
        }
    }

    fn play(&mut self, line: &str) -> Outcome<()> {
        let (event, expected) = line.split_once("->").map_or((line, ""), |(e, x)| (e, x.trim()));
        let words: Vec<&str> = event.split_whitespace().collect();
        let wants_none = |got: Outcome<()>| match expected {
            "" => got,
            other => Err(format!("this event has no outcome, but {other:?} is expected")),
        };
        match words.as_slice() {
            ["router", settings @ ..] => wants_none(self.start(settings)),
            ["workers", workers @ ..] => {
                let workers: Outcome<Vec<_>> = workers.iter().map(|text| worker(text)).collect();
                self.router()?.set_workers(&workers?).map_err(|error| error.to_string())?;
                wants_none(Ok(()))
            }
            ["route", name, arguments @ ..] => self.route(Some(name), arguments, expected),
            ["preview", arguments @ ..] => self.route(None, arguments, expected),
            ["first", name] => wants_none(self.booking(name).map(Reservation::first_token)),
            ["touch", name] => wants_none(self.booking(name).map(Reservation::touch)),
            ["free", name] => {
                let booking = self.bookings.remove(*name).ok_or("no such request")?;
                drop(booking);
                wants_none(Ok(()))
            }
            ["output", name, fraction] => {
                self.booking(name)?.add_output_blocks(1, number(fraction)?);
                wants_none(Ok(()))
            }
            ["block_size", size] => {
                self.router()?.correct_block_size(number(size)?);
                wants_none(Ok(()))
            }
            ["advance", by_ms] => {
                self.clock.advance(number(by_ms)?);
                wants_none(Ok(()))
            }
            ["expire"] => {
                let expired = self.router()?.expire();
                let names: Vec<&str> =
                    expired.iter().map(|request| self.names[&request.0].as_str()).collect();
                same(&names.join(" "), expected)
            }
            ["loads"] => {
                let loads = self.router()?.loads();
                let loads: Vec<String> = loads
                    .iter()
                    .map(|load| {
                        let ActiveLoad { requests, prefill_tokens, blocks, .. } = load.active;
                        format!("{}={requests}/{prefill_tokens}/{blocks}", name_of(load.worker))
                    })
                    .collect();
                same(&loads.join(" "), expected)
            }
            _ => Err("no such event".into()),
        }
    }

    fn start(&mut self, settings: &[&str]) -> Outcome<()> {
        let (mut config, mut policies) = (RouterConfig::default(), Policies::default());
        for setting in settings {
            let (key, value) = setting.split_once('=').ok_or("key=value is wanted")?;
            match key {
                "policy" => {
                    let mut rng = SmallRng::seed_from_u64(1);
                    policies.active = registry::build(value, &Settings::default(), &mut rng)
                        .map_err(|error| error.to_string())?;
                }
                "block_size" => config.load.block_size = number(value)?,
                "weight" => config.overlap_score_weight = number(value)?,
                "temperature" => config.temperature = number(value)?,
                "seed" => config.seed = number(value)?,
                "track_blocks" => config.track_active_blocks = number(value)?,
                "kv_reuse" => config.assume_kv_reuse = number(value)?,
                "expiry_ms" => config.load.expiry_ms = number(value)?,
                "max_requests" => config.load.max_requests = number(value)?,
                _ => return Err(format!("no such setting: {key}")),
            }
        }
        self.bookings.clear();
        self.names.clear();
        let router = Router::with_policies(config, policies, self.clock.clone())
            .map_err(|error| error.to_string())?;
        self.router = Some(Arc::new(router));
        Ok(())
    }

    fn route(&mut self, name: Option<&str>, arguments: &[&str], expected: &str) -> Outcome<()> {
        let ask = Ask::parse(arguments)?;
        let is_allowed = |worker: Worker| match &ask.allowed {
            Some(allowed) => allowed.contains(&worker),
            None => true,
        };
        let request = select::Ask {
            known: Known { overlaps: &ask.overlaps, ..Known::default() },
            allowed: ask.allowed.as_ref().map(|_| &is_allowed as &dyn Fn(Worker) -> bool),
            overrides: ask.overrides,
            ..select::Ask::new(&ask.prompt)
        };
        let mut considered = Considered::default();
        let router = Arc::clone(self.router()?);
        let got = match name {
            None => router.preview(&request, &mut considered),
            Some(name) => router.route(&request, &mut considered).map(|(booking, decision)| {
                self.names.insert(booking.request().0, name.to_owned());
                self.bookings.insert(name.to_owned(), booking);
                decision
            }),
        };
        match (got, expected.split_whitespace().collect::<Vec<_>>().as_slice()) {
            (_, []) => Err("a decision is expected: write it behind ->".into()),
            (Err(error), [wanted]) => same(&kind(&error), wanted),
            (Err(error), _) => Err(format!("got {error:?}")),
            (Ok(decision), [wanted, facts @ ..]) => {
                if *wanted != "any" {
                    same(&name_of(decision.worker), wanted)?;
                }
                facts.iter().try_for_each(|fact| check(&decision, fact))
            }
        }
    }

    fn router(&self) -> Outcome<&Arc<Router>> {
        self.router.as_ref().ok_or_else(|| "a scenario starts with a router".into())
    }

    fn booking(&self, name: &str) -> Outcome<&Reservation> {
        self.bookings.get(name).ok_or_else(|| "no such request".into())
    }
}

impl Ask {
    fn parse(arguments: &[&str]) -> Outcome<Self> {
        let mut ask = Self::default();
        for argument in arguments {
            let (key, value) = argument.split_once('=').ok_or("key=value is wanted")?;
            let list = || value.split(',').filter(|item| !item.is_empty());
            match key {
                "isl" => ask.prompt.isl_tokens = number(value)?,
                "hashes" => {
                    ask.prompt.sequence_hashes = list().map(number).collect::<Outcome<_>>()?
                }
                "overlaps" => {
                    let pair = |item: &str| -> Outcome<(Worker, u32)> {
                        let (name, blocks) = item.split_once('=').ok_or("W=BLOCKS is wanted")?;
                        Ok((worker(name)?, number(blocks)?))
                    };
                    ask.overlaps = list().map(pair).collect::<Outcome<_>>()?;
                }
                "allowed" => ask.allowed = Some(list().map(worker).collect::<Outcome<_>>()?),
                "weight" => ask.overrides.overlap_score_weight = Some(number(value)?),
                "temperature" => ask.overrides.temperature = Some(number(value)?),
                _ => return Err(format!("no such argument: {key}")),
            }
        }
        Ok(ask)
    }
}

fn check(decision: &Decision<'_>, fact: &str) -> Outcome<()> {
    let (key, wanted) = fact.split_once('=').ok_or("key=value is wanted")?;
    let got = match key {
        "overlap" => decision.overlap_blocks.to_string(),
        "cost" => decision.terms().cost.to_string(),
        "ties" => decision.choice.ties.to_string(),
        "margin" => decision.choice.margin.map_or("none".into(), |margin| margin.to_string()),
        "reason" => decision.choice.reason.to_string(),
        "candidates" => decision.candidates.len().to_string(),
        _ => return Err(format!("no such fact: {key}")),
    };
    same(&got, wanted).map_err(|fault| format!("{key}: {fault}"))
}

fn same(got: &str, wanted: &str) -> Outcome<()> {
    if got == wanted { Ok(()) } else { Err(format!("got {got:?}, expected {wanted:?}")) }
}

fn kind(error: &Error) -> String {
    let kind = match error {
        Error::NoWorker(_) => "no_worker",
        Error::InvalidArgument(_) => "invalid",
        Error::Overloaded(_) => "overloaded",
        Error::Conflict(_) => "conflict",
        other => return format!("{other:?}"),
    };
    kind.to_owned()
}

fn worker(text: &str) -> Outcome<Worker> {
    let (instance, rank) = text.split_once(':').unwrap_or((text, "0"));
    Ok(Worker::new(number(instance)?, number(rank)?))
}

/// The rank only where there is one.
fn name_of(worker: Worker) -> String {
    match worker.dp_rank {
        0 => worker.instance_id.to_string(),
        _ => worker.to_string(),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Outcome<T> {
    text.parse().map_err(|_| format!("not a value: {text:?}"))
}
