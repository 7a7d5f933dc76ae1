//! Writes server-sent events and the comments that keep idle streams alive.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use futures_util::Stream;
use serde::Serialize;

use super::reply::Chunks;

/// Appends an event with this content.
pub fn event(content: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, content)
        .expect("writing to a vector succeeds, and these types have string keys");
    out.extend_from_slice(b"\n\n");
}

/// Appends `[DONE]`, the end of a complete stream.
pub fn done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// Returns the stream's bytes on demand. Sends a comment after `keep_alive` without an event.
pub fn stream(
    chunks: Chunks,
    keep_alive: Duration,
) -> impl Stream<Item = Result<Bytes, Infallible>> + Send {
    futures_util::stream::unfold(chunks, move |mut chunks| async move {
        let bytes = match tokio::time::timeout(keep_alive, chunks.next()).await {
            Ok(next) => next?,
            Err(_) => Bytes::from_static(b": keep-alive\n\n"),
        };
        Some((Ok(bytes), chunks))
    })
}
