//! Eight engines and a frontend in virtual time: the product's own selector, policies, fair queue and
//! index, before engines that follow the mocker's scheduler and timing.

pub mod cache;
pub mod engine;
pub mod outcome;
pub mod play;
pub mod row;
pub mod timing;
pub mod workload;
