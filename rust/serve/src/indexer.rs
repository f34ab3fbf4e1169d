//! The standalone indexer's API.
//!
//! In a process of the caller's own, who brings the socket, the runtime and the engines' frames:
//!
//! ```no_run
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use kvflash_core::catalog::{Catalog, Command};
//! use kvflash_serve::indexer::{IndexerApp, IndexerOptions};
//! use kvflash_serve::{ServeLimits, Shutdown, serve};
//! # fn subscribe(_catalog: &Catalog, _publisher: u64, _endpoint: &str) {}
//! # fn close(_publisher: u64) {}
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let catalog = Arc::new(Catalog::default());
//! let shutdown = Shutdown::default();
//!
//! // Registrations become orders: open a socket, and hand what it brings to `Publisher::live`.
//! let (orders, stop) = (Arc::clone(&catalog), shutdown.clone());
//! std::thread::spawn(move || {
//!     while !stop.is_stopped() {
//!         match orders.commands.next(Duration::from_millis(100)) {
//!             Some(Command::Subscribe { publisher, endpoint, .. }) => {
//!                 subscribe(&orders, publisher, &endpoint);
//!             }
//!             Some(Command::Unsubscribe { publisher }) => close(publisher),
//!             // Without peers nothing is held, and nobody pauses.
//!             Some(Command::Resume { .. } | Command::Pause { .. }) | None => {}
//!         }
//!     }
//! });
//!
//! let app = IndexerApp::service(catalog, IndexerOptions::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8090").await?;
//! serve(listener, app, ServeLimits::default(), shutdown).await?;
//! # Ok(())
//! # }
//! ```

mod answer;
mod app;
mod dump;
pub(super) mod form;
mod metrics;
mod openapi;
mod overlap;
mod plain;
mod recover;
pub(super) mod request;
mod startup;

pub(super) use app::query_routes;
pub use app::{IndexerApp, IndexerOptions, IndexerService};
pub use overlap::query_tokens;
