//! What the catalog asks of the transport door: open this socket, close that one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::registration::PublisherId;

/// An order to the transport door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Subscribe to a publisher's socket and hand its frames to the catalog.
    Subscribe {
        /// Which publisher the frames belong to.
        publisher: PublisherId,
        /// Address of the engine's PUB socket.
        endpoint: String,
        /// Address of the engine's replay socket, where it has one.
        replay_endpoint: Option<String>,
        /// Connect, but read nothing before [`Command::Resume`]: frames wait in the socket.
        is_held: bool,
    },
    /// Read on.
    Resume {
        /// Which publisher.
        publisher: PublisherId,
    },
    /// Stop reading; frames wait in the socket, and what does not fit there is a gap later.
    Pause {
        /// Which publisher.
        publisher: PublisherId,
    },
    /// Close the publisher's sockets; frames of it that are still on the way are ignored.
    Unsubscribe {
        /// Which publisher.
        publisher: PublisherId,
    },
}

/// Orders in the sequence in which they were given. Its length is bounded by registrations:
/// every registration adds two orders at most and every unregistration another, and the catalog limits
/// both; pauses are for tests only.
#[derive(Debug, Default)]
pub struct CommandQueue {
    orders: Mutex<VecDeque<Command>>,
    arrived: Condvar,
}

impl CommandQueue {
    pub(super) fn push(&self, command: Command) {
        self.orders.lock().push_back(command);
        self.arrived.notify_one();
    }

    /// Wait at most `timeout` for the next order.
    pub fn next(&self, timeout: Duration) -> Option<Command> {
        let deadline = Instant::now() + timeout;
        let mut orders = self.orders.lock();
        while orders.is_empty() {
            if self.arrived.wait_until(&mut orders, deadline).timed_out() {
                break;
            }
        }
        orders.pop_front()
    }
}
