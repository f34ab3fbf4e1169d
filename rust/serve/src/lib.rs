//! HTTP services: the indexer's API, the OpenAI-compatible frontend, the standalone router. This
//! crate uses tokio.

mod aside;
mod body;
mod busy;
mod cause;
mod compute;
mod connection;
mod fleet;
mod found_workers;
pub mod frontend;
mod gateway;
mod http;
pub mod indexer;
mod lock;
mod metrics;
mod openapi;
mod outbound;
mod outside;
mod page;
mod prompt_keys;
mod queue;
mod reject;
mod remote;
mod reread;
pub mod router;
mod routing;
mod secret_file;
mod serve;
mod settings;
mod spelling;
mod state_file;
mod tenant;
mod tls;
mod via;
mod worker_allow;
mod worker_state;

pub use found_workers::FoundWorkers;
pub use http::Http;
pub use lock::{Caller, Face, Key, Lock, Pass, Role, check_key, check_keys};
pub use reject::Reject;
pub use remote::RemoteIndexerOptions;
pub use routing::RoutingOptions;
pub use serve::{App, Peer, ServeLimits, Shutdown, serve};
pub use settings::{
    FairnessSettings, FrontendSettings, HttpSettings, RouterSettings, TlsSettings,
    tables as settings_tables,
};
pub use tls::Tls;
