//! Replays: batches requested by clients, sent a part at a time.
//!
//! A request is `[client, "", start]` with the first number as 8 bytes, big endian. It is answered by
//! `[client, "", topic, number, payload]` for each batch, then by a number of eight `0xff` bytes.

use std::sync::Arc;
use std::vec::IntoIter;

use crate::ring::{Batch, Ring};

/// The number that ends a replay.
pub const END_OF_REPLAY: [u8; 8] = [0xff; 8];
/// Batches sent per replay before others get their turn.
pub const REPLAY_BURST_BATCHES: usize = 256;
/// Maximum concurrent replays; further requests are dropped, and their clients ask again.
const REPLAYS_MAX: usize = 64;

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Its replay has started; an earlier one of the same client is cancelled.
    Started,
    /// Too many replays are in progress.
    Refused,
    /// The frames are not a request.
    Malformed,
}

/// A reply to a client, after its identity and an empty frame: number and payload.
#[derive(Debug, Clone)]
pub struct Reply {
    /// The client's identity.
    pub client: Arc<[u8]>,
    /// The batch's number, or [`END_OF_REPLAY`].
    pub number: [u8; 8],
    /// The batch; `None` at the end.
    pub payload: Option<Arc<Vec<u8>>>,
}

impl Reply {
    /// The frames of the message.
    pub fn frames<'a>(&'a self, topic: &'a [u8]) -> [&'a [u8]; 5] {
        let payload = self.payload.as_ref().map_or(&[][..], |payload| payload);
        [&self.client, b"", topic, &self.number, payload]
    }
}

/// Replays in progress.
#[derive(Debug, Default)]
pub struct Replays(Vec<Replay>);

/// The rest of one client's replay.
#[derive(Debug)]
struct Replay {
    client: Arc<[u8]>,
    batches: IntoIter<Batch>,
}

impl Replays {
    /// Parses a request's frames, and starts its replay.
    pub fn accept(&mut self, frames: &[Vec<u8>], ring: &Ring) -> Request {
        let [client, empty, start] = frames else { return Request::Malformed };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else { return Request::Malformed };
        if !empty.is_empty() {
            return Request::Malformed;
        }
        self.0.retain(|replay| *replay.client != **client);
        if self.0.len() >= REPLAYS_MAX {
            return Request::Refused;
        }
        // A copy: batches published meanwhile reach the client live.
        let batches = ring.since(u64::from_be_bytes(start)).into_iter();
        self.0.push(Replay { client: client[..].into(), batches });
        Request::Started
    }

    /// The next part of each replay; finished replays are removed.
    pub fn next_part(&mut self) -> Vec<Reply> {
        let mut replies = Vec::new();
        self.0.retain_mut(|replay| {
            let client = &replay.client;
            for _ in 0..REPLAY_BURST_BATCHES {
                let Some((sequence, payload)) = replay.batches.next() else {
                    let (client, number) = (Arc::clone(client), END_OF_REPLAY);
                    replies.push(Reply { client, number, payload: None });
                    return false;
                };
                let (client, number) = (Arc::clone(client), sequence.to_be_bytes());
                replies.push(Reply { client, number, payload: Some(payload) });
            }
            true
        });
        replies
    }

    /// Whether no replay is in progress.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(client: &[u8], start: u64) -> Vec<Vec<u8>> {
        vec![client.to_vec(), Vec::new(), start.to_be_bytes().to_vec()]
    }

    fn ring(batches: usize) -> Ring {
        let mut ring = Ring::new(batches, 1 << 20);
        for n in 0..batches {
            ring.push(vec![n as u8]);
        }
        ring
    }

    /// The numbers that each client is sent in one turn.
    fn turn(replays: &mut Replays) -> Vec<(Vec<u8>, [u8; 8])> {
        let replies = replays.next_part();
        let read = |reply: &Reply| {
            let [client, empty, topic, number, _payload] = reply.frames(b"topic");
            assert!(empty.is_empty() && topic == b"topic");
            (client.to_vec(), number.try_into().expect("8 bytes"))
        };
        replies.iter().map(read).collect()
    }

    #[test]
    fn replays_take_turns_and_end_with_a_mark() {
        let (mut replays, ring) = (Replays::default(), ring(REPLAY_BURST_BATCHES + 2));
        assert_eq!(replays.accept(&request(b"a", 0), &ring), Request::Started);
        assert_eq!(
            replays.accept(&request(b"b", REPLAY_BURST_BATCHES as u64), &ring),
            Request::Started
        );
        let first = turn(&mut replays);
        assert_eq!(first.len(), REPLAY_BURST_BATCHES + 3, "a's first part, then all of b's");
        assert_eq!(first.last(), Some(&(b"b".to_vec(), END_OF_REPLAY)));
        let second = turn(&mut replays);
        let numbers: Vec<_> = second.iter().map(|(_, number)| *number).collect();
        assert_eq!(numbers, [256_u64.to_be_bytes(), 257_u64.to_be_bytes(), END_OF_REPLAY]);
        assert!(replays.is_empty());
    }

    #[test]
    fn a_client_has_one_replay_and_all_have_a_limit() {
        let (mut replays, ring) = (Replays::default(), ring(4));
        assert_eq!(replays.accept(&request(b"a", 0), &ring), Request::Started);
        assert_eq!(replays.accept(&request(b"a", 3), &ring), Request::Started);
        assert_eq!(turn(&mut replays).len(), 2, "one batch and the end");
        for client in 0..REPLAYS_MAX as u8 {
            assert_eq!(replays.accept(&request(&[client], 0), &ring), Request::Started);
        }
        assert_eq!(replays.accept(&request(b"one more", 0), &ring), Request::Refused);
        assert_eq!(replays.accept(&request(&[7], 0), &ring), Request::Started, "it has one");
    }

    #[test]
    fn what_is_no_request_starts_nothing() {
        let (mut replays, ring) = (Replays::default(), ring(4));
        for frames in [
            vec![],
            vec![b"a".to_vec(), Vec::new()],
            vec![b"a".to_vec(), b"x".to_vec(), 0_u64.to_be_bytes().to_vec()],
            vec![b"a".to_vec(), Vec::new(), b"short".to_vec()],
        ] {
            assert_eq!(replays.accept(&frames, &ring), Request::Malformed);
        }
        assert!(replays.is_empty());
    }
}
