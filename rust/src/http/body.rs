//! Request bodies: read within a limit, or read away.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};

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
pub(super) async fn read(body: &mut Body, limit: usize) -> Result<Bytes, Unreadable> {
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(Unreadable::TooLarge),
        Err(_) => Err(Unreadable::CutOff),
    }
}

/// Read on for a moment and keep nothing: many clients look for the answer only when they have sent
/// everything, and a kept connection stays in step.
pub(super) async fn discard(body: &mut Body) {
    let rest = async {
        let mut body = Limited::new(body, DISCARD_BYTES);
        while let Some(Ok(_)) = body.frame().await {}
    };
    // Whoever sends more, or takes longer, gets a closed connection.
    let _ = tokio::time::timeout(DISCARD_TIME, rest).await;
}
