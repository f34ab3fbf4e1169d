//! Request bodies: read within a limit, or read away.

use std::time::Duration;

use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;

use super::Reject;

/// A refused body is read away up to this size and time before its connection is closed.
const DISCARD_BYTES: usize = 64 * 1024 * 1024;
const DISCARD_TIME: Duration = Duration::from_millis(500);

/// Why a body could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// More bytes came than the limit.
    TooLarge,
    /// It ended before its declared length.
    CutOff,
}

/// The whole body, at most `limit` bytes; one that came in one piece is not copied.
pub(super) async fn read<B>(body: &mut B, limit: usize) -> Result<Bytes, Unreadable>
where
    B: Body<Data = Bytes> + Unpin,
{
    let (mut first, mut joined) = (Bytes::new(), BytesMut::new());
    while !body.is_end_stream() {
        let Some(frame) = body.frame().await else { break };
        let Ok(data) = frame.map_err(|_| Unreadable::CutOff)?.into_data() else { continue };
        if data.len() > limit - first.len().max(joined.len()) {
            return Err(Unreadable::TooLarge);
        }
        if first.is_empty() {
            first = data;
            continue;
        }
        if joined.is_empty() {
            joined.extend_from_slice(&first);
        }
        joined.extend_from_slice(&data);
    }
    Ok(if joined.is_empty() { first } else { joined.freeze() })
}

/// A body of more bytes than the limit.
pub(super) fn too_large(limit: usize) -> Reject {
    let what = format!("the body is larger than the limit of {limit} bytes (--max-body-bytes)");
    Reject::new(StatusCode::PAYLOAD_TOO_LARGE, what)
}

/// The whole body, within a limit of bytes and of time.
///
/// # Errors
/// 413, 400 for one that is cut off, 408.
pub(super) async fn whole<B>(mut body: B, limit: usize, timeout: Duration) -> Result<Bytes, Reject>
where
    B: Body<Data = Bytes> + Unpin,
{
    match tokio::time::timeout(timeout, read(&mut body, limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(Unreadable::TooLarge)) => {
            discard(&mut body).await;
            Err(too_large(limit))
        }
        Ok(Err(Unreadable::CutOff)) => {
            Err(Reject::bad_request("the body ended before its declared length"))
        }
        Err(_) => {
            let seconds = timeout.as_secs_f64();
            let what = format!("the body did not arrive within {seconds} s (--body-timeout)");
            Err(Reject::new(StatusCode::REQUEST_TIMEOUT, what))
        }
    }
}

/// Read on for a moment and keep nothing: many clients look for the answer only when they have sent
/// everything, and a kept connection stays in step.
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
    // Whoever sends more, or takes longer, gets a closed connection.
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}
