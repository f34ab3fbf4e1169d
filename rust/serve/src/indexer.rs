//! The standalone indexer's API.
//!
//! For use in your own process, which provides the socket, the runtime and the engines' frames:
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use kvflash_core::catalog::{Catalog, Command};
//! use kvflash_serve::indexer::{IndexerApp, IndexerOptions};
//! use kvflash_serve::{Http, ServeLimits, Shutdown, serve};
//! # fn subscribe(_catalog: &Catalog, _publisher: u64, _endpoint: &str) {}
//! # fn close(_publisher: u64) {}
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let catalog = Arc::new(Catalog::default());
//! let shutdown = Shutdown::default();
//!
//! // Registrations become orders: open a socket, and pass its messages to `Publisher::live`.
//! let orders = Arc::clone(&catalog);
//! std::thread::spawn(move || {
//!     // Ends with `orders.commands.close()`.
//!     while let Some(order) = orders.commands.next(None) {
//!         match order {
//!             Command::Subscribe { publisher, endpoint, .. } => {
//!                 subscribe(&orders, publisher, &endpoint);
//!             }
//!             Command::Unsubscribe(publisher) => close(publisher),
//!             // Without peers nothing is held or paused.
//!             Command::Resume(_) | Command::Pause(_) => {}
//!         }
//!     }
//! });
//!
//! let app = IndexerApp::new(Arc::clone(&catalog), IndexerOptions::default(), &Http::default())?;
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:8090").await?;
//! serve(listener, app, ServeLimits::default(), shutdown).await?;
//! catalog.commands.close();
//! # Ok(())
//! # }
//! ```

mod answer;
mod app;
mod dump;
mod fault;
pub(super) mod form;
mod mask;
mod metrics;
mod overlap;
mod plain;
mod recover;
pub(super) mod request;
mod startup;

pub use super::settings::IndexerOptions;
pub use app::IndexerApp;
pub(super) use app::query_routes;
pub(super) use mask::HashMask;
pub use overlap::query_tokens;
