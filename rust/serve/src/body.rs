//! Request bodies: read within limits of bytes, time and memory, or discarded.

mod rest;

use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;
use kvflash_core::error::Error;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

pub(crate) use self::rest::{Forwarded, Rest};
use super::Reject;
use super::metrics::{CauseLabel, add};

/// Limits up to which a refused body is read and discarded before its connection is closed.
const DISCARD_BYTES: usize = 64 * 1024 * 1024;
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// Bodies up to this size are not counted, because connections are limited and each has one body.
const SMALL_BYTES: usize = 16 * 1024;
/// Size limit of bodies that change settings or workers.
const CONTROL_BYTES: usize = 64 * 1024;

/// Bodies from this size on are read in turn, while the bodies being read have at most this many
/// bytes in total; the others wait at their clients. A body in its turn must arrive at this rate,
/// in bytes per second.
const LARGE_BYTES: usize = 1024 * 1024;
const LARGE_AT_ONCE: usize = 64 * 1024 * 1024;
const LARGE_RATE: f64 = 512.0 * 1_024.0;
/// While other bodies also have a turn, a body pauses after this many bytes, so that small requests
/// get through, on the machine's other processors as well.
const PACE_BYTES: usize = 1024 * 1024;
const PACE_REST: Duration = Duration::from_millis(8);

/// After this time a body must have arrived at this average rate, in bytes per second.
const SLOW_START: Duration = Duration::from_secs(5);
const MIN_RATE: f64 = 8_192.0;

/// Default limit for all bodies together: this share of the memory, and at least the minimum.
const MEMORY_SHARE: u64 = 4;
const MIN_BUFFERED: u64 = 256 * 1024 * 1024;

/// Reads bodies within the limits of a service.
#[derive(Debug, Clone)]
pub(crate) struct Intake {
    max_bytes: usize,
    /// The flag that sets the limit.
    flag: &'static str,
    timeout: Duration,
    max_buffered: usize,
    /// Whether a body that is declared too large is refused without reading it.
    refuses_unread: bool,
    /// Bytes of bodies that are being received, wait or are answered.
    buffered: Gauge,
    refused: Family<CauseLabel, Counter>,
    /// Bytes of the counted bodies.
    large: Arc<AtomicU64>,
    /// KiB of large bodies that may be read at once.
    turns: Arc<Semaphore>,
}

/// A body that was read, or its beginning.
#[derive(Debug)]
pub(crate) struct Received {
    pub bytes: Bytes,
    /// The turn of a large body; keep it until the request is known to proceed.
    pub turn: Option<OwnedSemaphorePermit>,
    /// What was not read yet, if `bytes` are only the beginning.
    pub rest: Option<Arc<Rest>>,
    pub counted: Counted,
}

/// The count of a body's bytes, which lasts until the last holder of the body is done; empty for a
/// small one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counted(Option<Arc<Count>>);

impl Counted {
    /// The body rewritten as `bytes`, which is counted as the one received.
    pub fn hold(&self, bytes: Bytes) -> Bytes {
        match &self.0 {
            None => bytes,
            Some(count) => Bytes::from_owner(Held { bytes, _count: Arc::clone(count) }),
        }
    }
}

/// Why a body could not be read.
enum Unreadable {
    TooLarge,
    /// It ended before its declared length.
    CutOff,
    /// It did not arrive within its time.
    Late,
    /// It arrived below the minimum rate.
    Slow,
    /// All bodies together have too many bytes.
    Full,
    /// Other large bodies were read all the time.
    NoTurn,
}

/// Bytes that count until their last reader is done.
struct Held {
    bytes: Bytes,
    _count: Arc<Count>,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A number of counted bytes.
#[derive(Debug)]
struct Count {
    buffered: Gauge,
    bytes: usize,
}

impl Count {
    /// Raises the count to `bytes`.
    ///
    /// # Errors
    /// The total would exceed `limit`.
    fn raise(&mut self, bytes: usize, limit: usize) -> Result<(), Unreadable> {
        let more = bytes.saturating_sub(self.bytes) as i64;
        let before = self.buffered.inc_by(more);
        self.bytes = bytes;
        if before + more > limit as i64 { Err(Unreadable::Full) } else { Ok(()) }
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.buffered.dec_by(self.bytes as i64);
    }
}

impl Intake {
    /// For bodies of up to `max_bytes`; `max_buffered` limits all together, 0 means a share of the
    /// memory.
    pub fn new(
        max_bytes: usize,
        timeout: Duration,
        max_buffered: usize,
        large: &Arc<AtomicU64>,
        registry: &mut Registry,
    ) -> Self {
        let max_buffered = match max_buffered {
            0 => usize::try_from((memory() / MEMORY_SHARE).max(MIN_BUFFERED)).unwrap_or(usize::MAX),
            given => given,
        };
        let help = "Memory of request bodies above 16 KiB, from their receipt to the end of the answer; limited by \
                    --max-buffered-bytes";
        let buffered = add(registry, "buffered_bodies_bytes", help, Gauge::default());
        let help = "Request bodies refused before they were read completely, by cause";
        let refused = add(registry, "bodies_refused", help, Family::default());
        let large = Arc::clone(large);
        let turns = Arc::new(Semaphore::new(LARGE_AT_ONCE / 1_024));
        Self {
            max_bytes,
            flag: "--max-body-bytes",
            timeout,
            max_buffered,
            refuses_unread: false,
            buffered,
            refused,
            large,
            turns,
        }
    }

    /// The same, but bodies declared too large are refused unread, and not discarded.
    pub fn refusing_unread(self) -> Self {
        Self { refuses_unread: true, ..self }
    }

    /// The same for bodies of up to `max_bytes`, which `flag` sets; the total limit is shared.
    pub fn up_to(self, max_bytes: usize, flag: &'static str) -> Self {
        Self { max_bytes, flag, ..self }
    }

    /// Reads the whole body.
    ///
    /// # Errors
    /// 413, 400 for a truncated one, 408 for a late or slow one, 429 while bodies occupy all the
    /// memory that they may.
    pub async fn whole(&self, body: impl Body<Data = Bytes> + Unpin) -> Result<Received, Reject> {
        self.within(self.max_bytes, body, |_| false).await.map(|(received, _)| received)
    }

    /// Reads the whole body, or of a large one only the beginning, if that `is_enough` to forward
    /// the rest as it comes.
    ///
    /// # Errors
    /// As [`whole`](Self::whole).
    pub async fn beginning(
        &self,
        body: axum::body::Body,
        is_enough: impl Fn(&[u8]) -> bool,
    ) -> Result<Received, Reject> {
        let fits = body.size_hint().lower() <= self.max_bytes as u64;
        let is_enough = |bytes: &[u8]| fits && is_enough(bytes);
        let (mut received, body) = self.within(self.max_bytes, body, is_enough).await?;
        if let Some(body) = body {
            let left = self.max_bytes - received.bytes.len();
            received.rest = Some(Rest::new(body, self.clone(), left));
        }
        Ok(received)
    }

    /// Reads the whole body of a request that changes a setting or a worker: at most 64 KiB.
    ///
    /// # Errors
    /// As [`whole`](Self::whole).
    pub async fn control(&self, body: impl Body<Data = Bytes> + Unpin) -> Result<Bytes, Reject> {
        let limit = CONTROL_BYTES.min(self.max_bytes);
        Ok(self.within(limit, body, |_| false).await?.0.bytes)
    }

    /// Reads a body of up to `limit` bytes; returns it as well if it goes on after what was read.
    async fn within<B: Body<Data = Bytes> + Unpin>(
        &self,
        limit: usize,
        mut body: B,
        is_enough: impl Fn(&[u8]) -> bool,
    ) -> Result<(Received, Option<B>), Reject> {
        if self.refuses_unread && body.size_hint().lower() > limit as u64 {
            return Err(self.refuse(&Unreadable::TooLarge, limit));
        }
        match self.read(&mut body, limit, is_enough).await {
            Ok((received, is_whole)) => Ok((received, Some(body).filter(|_| !is_whole))),
            Err(why) => {
                if matches!(why, Unreadable::TooLarge | Unreadable::Full | Unreadable::NoTurn) {
                    discard(&mut body).await;
                }
                Err(self.refuse(&why, limit))
            }
        }
    }

    /// Returns what was read, and whether it is all. A body in a single piece is not copied.
    async fn read(
        &self,
        body: &mut (impl Body<Data = Bytes> + Unpin),
        limit: usize,
        is_enough: impl Fn(&[u8]) -> bool,
    ) -> Result<(Received, bool), Unreadable> {
        let mut began = Instant::now();
        let declared = body.size_hint().exact().map_or(limit, |bytes| bytes as usize);
        let (mut turn, mut before_turn, mut rate) = (None::<OwnedSemaphorePermit>, 0, MIN_RATE);
        let mut rested_at = 0;
        let mut count = Count { buffered: self.buffered.clone(), bytes: 0 };
        let (mut first, mut joined, mut received) = (Bytes::new(), BytesMut::new(), 0);
        let mut is_whole = true;
        while !body.is_end_stream() {
            if received >= LARGE_BYTES && turn.is_none() {
                let beginning = if joined.is_empty() { &first[..] } else { &joined[..] };
                if is_enough(beginning) {
                    is_whole = false;
                    break;
                }
                let kib = (declared.min(LARGE_AT_ONCE) / 1_024).max(1) as u32;
                let its_turn = Arc::clone(&self.turns).acquire_many_owned(kib);
                let its_turn = tokio::time::timeout(self.timeout, its_turn).await;
                turn = its_turn.map_err(|_| Unreadable::NoTurn)?.ok();
                // Its time begins when it is read.
                (began, before_turn, rate) = (Instant::now(), received, LARGE_RATE);
            }
            let (time, why) = self.time_for(received - before_turn, rate);
            let frame = timeout_at(began + time, body.frame()).await.map_err(|_| why)?;
            let Some(frame) = frame else { break };
            let Ok(data) = frame.map_err(|_| Unreadable::CutOff)?.into_data() else { continue };
            received += data.len();
            if received > limit {
                self.large.fetch_add(received as u64, Ordering::Relaxed);
                return Err(Unreadable::TooLarge);
            }
            if let Some(turn) = &turn
                && received - rested_at > PACE_BYTES
                && self.turns.available_permits() + turn.num_permits() < LARGE_AT_ONCE / 1_024
            {
                rested_at = received;
                tokio::time::sleep(PACE_REST).await;
            }
            if received > SMALL_BYTES {
                count.raise(received, self.max_buffered)?;
            }
            if first.is_empty() {
                first = data;
                continue;
            }
            if joined.is_empty() {
                joined.extend_from_slice(&first);
            }
            if turn.is_some() && joined.capacity() < declared {
                // Once, instead of a copy at each doubling.
                joined.reserve(declared - joined.len());
            }
            joined.extend_from_slice(&data);
        }
        let bytes = if joined.is_empty() { first } else { joined.freeze() };
        self.large.fetch_add(count.bytes as u64, Ordering::Relaxed);
        let counted = Counted((count.bytes > 0).then(|| Arc::new(count)));
        let bytes = counted.hold(bytes);
        Ok((Received { bytes, turn, rest: None, counted }, is_whole))
    }

    /// How long the next bytes may take from the start on, after `bytes` at this minimum `rate`; and
    /// the reason if they take longer.
    fn time_for(&self, bytes: usize, rate: f64) -> (Duration, Unreadable) {
        let slow = SLOW_START + Duration::from_secs_f64(bytes as f64 / rate);
        if self.timeout <= slow {
            (self.timeout, Unreadable::Late)
        } else {
            (slow, Unreadable::Slow)
        }
    }

    fn refuse(&self, why: &Unreadable, limit: usize) -> Reject {
        let (cause, reject) = match why {
            Unreadable::TooLarge => {
                let what = if limit == self.max_bytes {
                    format!("the body is larger than the limit of {limit} bytes ({})", self.flag)
                } else {
                    format!("the body is larger than {limit} bytes, the limit of this path")
                };
                ("too_large", Reject::new(StatusCode::PAYLOAD_TOO_LARGE, what))
            }
            Unreadable::CutOff => (
                "cut_off",
                Reject::bad_request(
                    "the body broke off: it ended before its declared length, or its chunks are invalid",
                ),
            ),
            Unreadable::Late => {
                let seconds = self.timeout.as_secs_f64();
                let what = format!("the body did not arrive within {seconds} s (--body-timeout)");
                ("late", Reject::new(StatusCode::REQUEST_TIMEOUT, what))
            }
            Unreadable::Slow => {
                let what = format!(
                    "the body arrived too slowly: after {} s it must arrive at {MIN_RATE} bytes per second, and \
                     from 1 MiB on at {LARGE_RATE}",
                    SLOW_START.as_secs()
                );
                ("slow", Reject::new(StatusCode::REQUEST_TIMEOUT, what))
            }
            Unreadable::Full => {
                let limit = self.max_buffered;
                let what = format!(
                    "request bodies take up {limit} bytes of memory, the limit (--max-buffered-bytes); try again"
                );
                ("memory", Error::Overloaded(what).into())
            }
            Unreadable::NoTurn => {
                let seconds = self.timeout.as_secs_f64();
                let what = format!(
                    "the body waited {seconds} s (--body-timeout) for other large bodies, of which at most {} MiB \
                     are read at once; try again",
                    LARGE_AT_ONCE >> 20
                );
                ("memory", Error::Overloaded(what).into())
            }
        };
        self.refused.get_or_create(&CauseLabel { cause }).inc();
        reject
    }
}

/// Refuses a compressed body.
///
/// # Errors
/// 415, naming the encoding.
pub(super) fn check_encoding(headers: &HeaderMap) -> Result<(), Reject> {
    let encoding =
        headers.get(header::CONTENT_ENCODING).map_or(&b"identity"[..], HeaderValue::as_bytes);
    if encoding.eq_ignore_ascii_case(b"identity") {
        return Ok(());
    }
    let what = format!(
        "content-encoding {:?} is not supported: send the body without compression",
        String::from_utf8_lossy(encoding)
    );
    Err(Reject::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, what))
}

/// Reads on briefly and discards the data: many clients read the response only after they have sent
/// everything, and a persistent connection stays in sync.
pub(super) async fn discard(body: &mut (impl Body<Data = Bytes> + Unpin)) {
    let rest = async {
        let mut left = DISCARD_BYTES;
        while let Some(Ok(frame)) = body.frame().await {
            let data = frame.data_ref().map_or(0, Bytes::len);
            match left.checked_sub(data) {
                Some(rest) => left = rest,
                None => break,
            }
        }
    };
    // A client that sends more, or takes longer, gets a closed connection.
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}

/// Memory of this process in bytes: its control group's limit, else the machine's; 0 if unknown.
fn memory() -> u64 {
    let read = |path| fs::read_to_string(path).ok();
    let number = |text: String| text.trim().parse::<u64>().ok();
    let group = read("/sys/fs/cgroup/memory.max").and_then(number);
    let old = || read("/sys/fs/cgroup/memory/memory.limit_in_bytes").and_then(number);
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    });
    let machine = machine.map_or(0, |kib| kib * 1_024);
    // Version 1 expresses "no limit" by a number above any machine's memory.
    group
        .or_else(old)
        .map_or(machine, |group| if machine == 0 { group } else { group.min(machine) })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;

    use futures_util::stream;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_gets_no_turn_is_told_so() {
        let (large, timeout) = (Arc::default(), Duration::from_secs(60));
        let intake = Intake::new(2 * LARGE_BYTES, timeout, 0, &large, &mut Registry::default());
        let _others = intake.turns.acquire_many((LARGE_AT_ONCE / 1_024) as u32).await.unwrap();
        let pieces = [Bytes::from(vec![0; LARGE_BYTES]), Bytes::from_static(b"more")];
        let body = axum::body::Body::from_stream(stream::iter(pieces.map(Ok::<_, io::Error>)));
        let reject = intake.whole(body).await.unwrap_err();
        let message = &reject.message;
        assert!(message.contains("the body waited 60 s (--body-timeout)"), "{message}");
        assert_eq!((reject.status.as_u16(), reject.retry_after_s), (429, Some(1)));
    }
}
