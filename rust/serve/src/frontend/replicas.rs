//! What replicas of a frontend tell each other, and what is told of it.

use std::sync::Arc;

use kvflash_core::select::{Outbox, Selector};

use super::app::FrontendApp;

impl FrontendApp {
    /// Where bookings of all models are told.
    pub fn outbox(&self) -> Arc<Outbox> {
        Arc::clone(&self.app.fleet.outbox)
    }

    /// Call with one model's selector after the other until the answer is true; whether it was.
    pub fn any_selector(&self, call: &mut dyn FnMut(&Selector) -> bool) -> bool {
        self.app.fleet.pools().iter().any(|pool| call(&pool.selector))
    }

    /// What `/metrics` tells besides its own: lines of the text format.
    pub fn set_more_metrics(&self, text: String) {
        *self.app.more_metrics.write() = text;
    }
}
