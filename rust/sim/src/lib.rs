//! Engines and routers in virtual time.
//!
//! [`Engine`](engine::Engine) is vLLM's scheduler over its block manager; [`play`](play::play) puts a fleet of them behind
//! kvflash's own index, selector, policies and fair queue, or behind other routers' rules, and plays a
//! [`Workload`](workload::Workload). Nothing sleeps, nothing is drawn but from seeds: the same inputs give the same
//! figures.

pub mod engine;
pub mod groups;
mod lru;
pub mod matrix;
pub mod outcome;
pub mod play;
pub mod pool;
pub mod report;
pub mod row;
pub mod rules;
pub mod timing;
pub mod traffic;
pub mod workload;
