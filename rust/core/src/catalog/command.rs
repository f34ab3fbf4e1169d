//! The catalog's orders to the transport: open this socket, close that one.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::registration::PublisherId;

/// An order to the transport.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Subscribe to a publisher's socket and pass its frames to the catalog.
    Subscribe {
        /// The publisher of the frames.
        publisher: PublisherId,
        /// Address of the engine's PUB socket.
        endpoint: String,
        /// Address of the engine's replay socket, if it has one.
        replay_endpoint: Option<String>,
        /// Connect, but read nothing before [`Command::Resume`]: frames wait in the socket.
        is_held: bool,
    },
    /// Resume reading the publisher's socket.
    Resume(PublisherId),
    /// Stop reading it; frames wait in the socket, and those that do not fit become a gap.
    Pause(PublisherId),
    /// Close its sockets; its frames in transit are ignored.
    Unsubscribe(PublisherId),
}

/// Orders in the sequence in which they were given. Registrations bound its length: each adds at
/// most two orders, and each unregistration another, and the catalog limits both; pauses are only
/// for tests.
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

    /// Closes the queue: current and later waits return no order.
    pub fn close(&self) {
        self.orders.lock().is_closed = true;
        self.arrived.notify_all();
    }

    /// Waits for the next order, at most for `timeout` if given; `None` once the queue is closed.
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
