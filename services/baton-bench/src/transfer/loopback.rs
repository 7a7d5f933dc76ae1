//! Plain copies through loopback TCP connections: what `tcp` could reach without hashes and device
//! copies.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Instant,
};

use anyhow::{Context as _, Result};

/// Bytes per connection.
const BYTES: usize = 2 << 30;
/// Bytes of one call, as `tcp` writes and reads them.
const CALL_BYTES: usize = 256 << 10;
/// Memory that one end reads or writes in turn, larger than its share of a CPU cache.
const BUFFER_BYTES: usize = 12 << 20;

/// Returns the GB/s of `connections` connections together, each with one thread at either end.
pub(super) fn rate(connections: u32) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut ends = Vec::new();
    for _ in 0..connections {
        let sender = TcpStream::connect(listener.local_addr()?)?;
        ends.push((sender, listener.accept()?.0));
    }
    let begin = Instant::now();
    let moved: std::io::Result<()> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (mut sender, mut receiver) in ends {
            threads.push(scope.spawn(move || in_turn(|piece| sender.write(piece))));
            threads.push(scope.spawn(move || in_turn(|piece| receiver.read(piece))));
        }
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    });
    moved.context("cannot measure loopback TCP")?;
    Ok(f64::from(connections) * BYTES as f64 / 1e9 / begin.elapsed().as_secs_f64())
}

/// Calls `step` with one piece of the buffer after the other until [`BYTES`] are moved.
fn in_turn(mut step: impl FnMut(&mut [u8]) -> std::io::Result<usize>) -> std::io::Result<()> {
    let mut buffer = vec![1; BUFFER_BYTES];
    let (mut rest, mut at) = (BYTES, 0);
    while rest > 0 {
        let end = (at + CALL_BYTES).min(BUFFER_BYTES).min(at + rest);
        let count = step(&mut buffer[at..end])?;
        if count == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        (rest, at) = (rest - count, (at + count) % BUFFER_BYTES);
    }
    Ok(())
}
