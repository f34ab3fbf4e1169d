//! Scenarios of the fleet: changes in, effects out, as `tests/vectors/fleet_cases.json` has them.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use kvflash_core::catalog::ModelKey;
use kvflash_core::fleet::{Card, Change, Effect, EventSpec, Hearing, Roster, WorkerState};
use kvflash_core::ids::Worker;
use kvflash_core::select::Report;
use serde::Deserialize;

#[derive(Deserialize)]
struct Cases {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    name: String,
    #[serde(default)]
    hears: Option<String>,
    #[serde(default)]
    limit: Option<usize>,
    steps: Vec<Vec<String>>,
    /// The workers of names at the end; null = the name is not served.
    #[serde(default)]
    names: BTreeMap<String, Option<String>>,
}

fn key(text: &str) -> ModelKey {
    let (model_name, tenant_id) = text.split_once('/').unwrap();
    ModelKey { model_name: model_name.to_owned(), tenant_id: tenant_id.to_owned() }
}

fn change(text: &str, ranks: &mut BTreeMap<u64, u32>) -> Change {
    let mut words = text.split(' ');
    let (kind, id) = (words.next().unwrap(), words.next().unwrap().parse().unwrap());
    let rest: Vec<&str> = words.collect();
    let said = |field: &str| {
        rest.iter().find_map(|word| word.strip_prefix(field).and_then(|w| w.strip_prefix('=')))
    };
    let number = |field: &str| said(field).map(|value| value.parse().unwrap());
    match kind {
        "joined" => {
            let count = number("ranks").unwrap_or(1) as u32;
            ranks.insert(id, count);
            let events = EventSpec::of_ranks(said("events"), said("replay"), count);
            let registrant = said("by").map(|by| by.parse().unwrap());
            Change::Joined { id, ranks: count, events, registrant }
        }
        "card" => {
            let mut card = Card::new(key(rest[0]));
            let name = |name: &str| match name.strip_prefix('+') {
                Some(adapter) => (adapter.to_owned(), Some(card.key.model_name.clone())),
                None => (name.to_owned(), None),
            };
            card.names = said("names").into_iter().flat_map(|n| n.split(',')).map(name).collect();
            card.block_size = number("block_size").map(|size| size as u32);
            card.report = Report { kv_total_blocks: number("blocks"), ..Report::default() };
            Change::Card { id, card }
        }
        "events" => {
            let place = Some(rest[0]).filter(|place| *place != "-");
            Change::Events { id, events: EventSpec::of_ranks(place, None, ranks[&id]) }
        }
        "health" => Change::Health { id, started_s: number("started").unwrap() as f64 },
        "state" => Change::State { id, state: WorkerState::from_name(rest[0]).unwrap() },
        "withdrawn" => Change::Withdrawn { id },
        "left" => Change::Left { id },
        other => panic!("no change: {other}"),
    }
}

fn words(effect: &Effect) -> String {
    let model = |key: &ModelKey| format!("{}/{}", key.model_name, key.tenant_id);
    match effect {
        Effect::Open(key) => format!("open {}", model(key)),
        Effect::Close(key) => format!("close {}", model(key)),
        Effect::BlockSize(key, size) => format!("block_size {} {size}", model(key)),
        Effect::Subscribe(one) => {
            let mut text = format!("subscribe {} {} {}", one.worker, model(&one.key), one.endpoint);
            text.extend(one.replay_endpoint.iter().map(|replay| format!(" {replay}")));
            text
        }
        Effect::Unsubscribe(key, id, None) => format!("unsubscribe {id} {}", model(key)),
        Effect::Unsubscribe(key, id, Some(rank)) => {
            format!("unsubscribe {} {}", Worker::new(*id, *rank), model(key))
        }
        Effect::SetWorkers(key, workers) => {
            let ranks: String = workers.iter().map(|worker| format!(" {worker}")).collect();
            format!("workers {}{ranks}", model(key))
        }
        Effect::SetDraining(key, ids) => {
            let ids: String = ids.iter().map(|id| format!(" {id}")).collect();
            format!("draining {}{ids}", model(key))
        }
        Effect::Report(key, worker, report) => {
            format!("report {worker} {} blocks={}", model(key), report.kv_total_blocks.unwrap())
        }
        Effect::Forget(key, id, ranks) => format!("forget {id} {} ranks={ranks}", model(key)),
    }
}

#[test]
fn fleets_come_out_as_written() {
    let text = std::fs::read_to_string("../../tests/vectors/fleet_cases.json").unwrap();
    let Cases { cases } = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 23);
    let mut steps = 0;
    for case in cases {
        let hearing = match case.hears.as_deref() {
            None => Hearing::Sockets,
            Some("broker") => Hearing::Broker,
            Some("nothing") => Hearing::Nothing,
            Some(other) => panic!("hears {other}"),
        };
        let mut roster = Roster::new(hearing, case.limit.unwrap_or(usize::MAX));
        let mut ranks = BTreeMap::new();
        for step in &case.steps {
            let (said, wanted) = step.split_first().unwrap();
            let found = match roster.apply(change(said, &mut ranks)) {
                Ok(effects) => effects.iter().map(words).collect(),
                Err(error) => {
                    let kind = format!("{error:?}");
                    let kind = kind.split('(').next().unwrap();
                    vec![format!("error {kind}: {error}")]
                }
            };
            assert_eq!(found, wanted, "{}: {said}", case.name);
            steps += 1;
        }
        for (name, wanted) in case.names {
            let found = roster.names().find(&name);
            let found =
                found.map(|(key, claim)| format!("{}/{} {claim:?}", key.model_name, key.tenant_id));
            assert_eq!(found, wanted, "{}: the name {name}", case.name);
        }
    }
    assert!(steps > 60, "{steps} steps");
}
