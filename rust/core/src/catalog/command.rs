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
    orders: Mutex<Orders>,
    arrived: Condvar,
}

#[derive(Debug, Default)]
struct Orders {
    waiting: VecDeque<Command>,
    is_closed: bool,
}

impl CommandQueue {
    pub(super) fn push(&self, command: Command) {
        self.orders.lock().waiting.push_back(command);
        self.arrived.notify_one();
    }

    /// Nobody obeys any more: whoever waits for an order gets none, now and later.
    pub fn close(&self) {
        self.orders.lock().is_closed = true;
        self.arrived.notify_all();
    }

    /// Wait for the next order, at most `timeout` where there is one; none once the queue is closed.
    pub fn next(&self, timeout: Option<Duration>) -> Option<Command> {
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut orders = self.orders.lock();
        while orders.waiting.is_empty() && !orders.is_closed {
            match deadline {
                None => self.arrived.wait(&mut orders),
                Some(deadline) => {
                    if self.arrived.wait_until(&mut orders, deadline).timed_out() {
                        break;
                    }
                }
            }
        }
        if orders.is_closed { None } else { orders.waiting.pop_front() }
    }
}
