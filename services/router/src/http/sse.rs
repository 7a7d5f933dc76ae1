//! Server-sent events: how they are written, and the comments that keep idle streams alive.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use futures_util::Stream;
use serde::Serialize;

use super::reply::Chunks;

/// Appends one event with this content.
pub fn event(content: &impl Serialize, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, content)
        .expect("a vector takes all bytes, and our own types have text keys only");
    out.extend_from_slice(b"\n\n");
}

/// Appends the mark of a complete stream.
pub fn done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

/// The stream's bytes, made when the connection asks for them. One that is silent for `keep_alive`
/// says that it lives.
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
