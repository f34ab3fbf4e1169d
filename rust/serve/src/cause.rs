//! Causes in `GET /ready` and `GET /health`: a stable code for programs, beside the text for people.

use std::fmt::Display;

use kvflash_core::catalog::{Code, Reason};
use kvflash_core::ids::Worker;
use parking_lot::RwLock;
use serde::Serialize;

use crate::remote::RemoteIndexer;
use crate::state_file::Registrations;
use crate::{Http, RoutingOptions};

/// Why a service takes no requests now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unready {
    /// It is about to stop.
    Stopping,
    /// It receives the index of a peer.
    Recovering,
    /// Not all workers that it waits for at the start have come: requests are refused.
    Starting,
    /// The same of an indexer, which answers meanwhile.
    WaitingForWorkers,
    /// No worker that decodes is healthy.
    NoDecodeWorker,
    /// All healthy workers that decode are draining.
    AllDraining,
    /// No worker that prefills is healthy, and requests need one.
    NoPrefillWorker,
    /// It has been at its limit of requests for a while.
    Full,
}

/// What a warning is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Topic {
    /// Discovery, DNS, or the connection to other replicas.
    Cluster,
    /// `--state-file`.
    StateFile,
    /// A policy outside the core, or one by a metric.
    Policy,
    /// A file of keys.
    Keys,
    /// A file of `--tls-*`.
    Tls,
    /// `--use-remote-indexer`.
    RemoteIndexer,
    /// A worker of discovery is not accepted.
    WorkerRefused,
    /// The last failure of a worker.
    WorkerError,
    /// A model has no worker that decodes.
    NoDecodeWorker,
    /// A model has no healthy worker that prefills, and its requests need one.
    NoPrefillWorker,
    /// No worker serves the model behind an alias.
    AliasNotServed,
    /// No worker serves the model that `--tokenizer` names.
    TokenizerNotUsed,
    /// No worker has told the block size of a model.
    BlockSizeUnknown,
    /// Prompts of some API forms get other tokens here than at the engines.
    TokensDiffer,
    /// Engines counted other numbers of prompt tokens.
    TokenCountsDiffer,
    /// A worker gets no token ids any more.
    TokenIdsRefused,
    /// A tokenizer has no chat template, or one that does not work.
    ChatTemplate,
    /// A tokenizer's ids differed when a prompt was encoded again.
    EncoderDiffers,
    /// A worker was given without `events=`.
    EventsNotGiven,
    /// A worker of the runtime announced no events.
    EventsNotAnnounced,
    /// A worker's events are at a broker that this process does not use.
    EventsNeedBroker,
    /// A worker took requests and published nothing.
    NothingPublished,
    /// An event socket reports an error.
    EventSocket,
    /// A reason of `reasons`, or of a listener's trust, by its own code.
    #[serde(untagged)]
    Reason(&'static str),
}

impl Topic {
    /// The next step of the reader.
    pub fn fix(self) -> &'static str {
        match self {
            Self::Cluster => {
                "start or correct what the message names, or open the way to it from the service's host"
            }
            Self::StateFile => "make the file writable, or correct what the message names",
            Self::Policy => "correct what the message names; the log has its errors",
            Self::Keys | Self::Tls => {
                "correct the file that the message names; the log says what is wrong"
            }
            Self::RemoteIndexer => {
                "run kvflash doctor on the indexer, too, and correct --use-remote-indexer"
            }
            Self::WorkerRefused => {
                "correct what the message names where the worker is announced; it is tried again by itself"
            }
            Self::WorkerError => {
                "correct what the message names; the worker is checked again by itself"
            }
            Self::NoDecodeWorker => "start a decode worker of that model, or one that does both",
            Self::NoPrefillWorker => {
                "start or repair a prefill worker, or set --enforce-disagg off"
            }
            Self::AliasNotServed => "start an engine of that model, or correct --model-alias",
            Self::TokenizerNotUsed => {
                "start an engine of that model, or correct its name in --tokenizer: the first that its engines list"
            }
            Self::BlockSizeUnknown => {
                "register workers with block_size, or set --router-block-size"
            }
            Self::TokensDiffer | Self::TokenCountsDiffer => {
                "set --tokenizer to the model's own folder, with the chat template that the engine uses"
            }
            Self::TokenIdsRefused => {
                "none is needed, as the engine tokenizes by itself; restart it to try ids again"
            }
            Self::ChatTemplate => {
                "set --tokenizer to the model's own folder, or add a chat_template.jinja that works"
            }
            Self::EncoderDiffers => "report it, with the model's name",
            Self::EventsNotGiven => "give the worker events=tcp://HOST:PORT",
            Self::EventsNotAnnounced => "enable KV events in that worker, or set --no-kv-events",
            Self::EventsNeedBroker => "start the frontend with --event-plane nats",
            Self::NothingPublished | Self::EventSocket => {
                "check that events= is the endpoint of the engine's --kv-events-config, and that events are enabled \
                 there"
            }
            Self::Reason(name) => Code::from_name(name).map_or("", |code| code.fix(true)),
        }
    }
}

impl From<Code> for Topic {
    fn from(code: Code) -> Self {
        Self::Reason(code.name())
    }
}

/// A warning of `GET /health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Warning {
    pub code: Topic,
    /// The worker, or its rank, if it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
    pub message: String,
    /// The next step.
    pub fix: &'static str,
}

impl Warning {
    pub fn new(code: Topic, message: impl Into<String>) -> Self {
        Self { code, worker: None, message: message.into(), fix: code.fix() }
    }

    /// Of a worker, or of a rank of it, which the message begins with.
    pub fn of(worker: impl Display, code: impl Into<Topic>, what: impl Display) -> Self {
        let (code, message) = (code.into(), format!("worker {worker}: {what}"));
        Self { code, worker: Some(worker.to_string()), message, fix: code.fix() }
    }

    /// Of a publisher, for a reason of its trust.
    pub fn of_trust(worker: Worker, reason: &Reason) -> Self {
        let warning = Self::of(worker, Topic::Reason(reason.code), &reason.message);
        Self { fix: reason.fix, ..warning }
    }

    /// Those that a frontend and a router have in common.
    pub fn common(
        outside: &RwLock<Vec<String>>,
        registrations: &Registrations,
        routing: &RoutingOptions,
        http: &Http,
        remote: Option<&RemoteIndexer>,
    ) -> Vec<Self> {
        let of = |code| move |message| Self::new(code, message);
        let outside = outside.read().clone().into_iter().map(of(Topic::Cluster));
        outside
            .chain(routing.policies.troubles().map(of(Topic::Policy)))
            .chain(Self::of_files(registrations, http))
            .chain(remote.and_then(RemoteIndexer::warning).map(of(Topic::RemoteIndexer)))
            .collect()
    }

    /// Of files that can't be written or were changed and can't be used, of every service.
    pub fn of_files(registrations: &Registrations, http: &Http) -> Vec<Self> {
        let of = |code| move |message| Self::new(code, message);
        let state = registrations.trouble().map(of(Topic::StateFile));
        let keys = http.lock().troubles().into_iter().map(of(Topic::Keys));
        let tls = http.tls_troubles().map(of(Topic::Tls));
        state.into_iter().chain(keys).chain(tls).collect()
    }

    /// The texts of `warnings`.
    pub fn texts(warnings: &[Self]) -> Vec<&str> {
        warnings.iter().map(|warning| &*warning.message).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_code_of_the_index_has_a_fix() {
        for code in Code::ALL {
            assert!(!Topic::from(code).fix().is_empty(), "{code}");
        }
    }

    #[test]
    fn codes_are_words() {
        let warning = Warning::of(3, Topic::EventsNotGiven, "given without events=");
        let wanted = json!({
            "code": "events_not_given",
            "worker": "3",
            "message": "worker 3: given without events=",
            "fix": "give the worker events=tcp://HOST:PORT",
        });
        assert_eq!(serde_json::to_value(warning).unwrap(), wanted);
        let of_index = Warning::new(Code::LostBatches.into(), "x");
        let fix = Code::LostBatches.fix(true);
        assert_eq!(json!(of_index), json!({ "code": "lost_batches", "message": "x", "fix": fix }));
        assert_eq!(json!(Unready::NoDecodeWorker), json!("no_decode_worker"));
    }
}
