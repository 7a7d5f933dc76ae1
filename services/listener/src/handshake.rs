//! The TLS handshake of a connection.

use std::{sync::Arc, time::Duration};

use rustls::ServerConfig;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::either::Either;

/// Time-out of a handshake, and of the answer to a client that does not speak TLS.
pub const HANDSHAKE_MAX: Duration = Duration::from_secs(5);
/// First byte of a TLS connection: the type of a handshake record.
const HANDSHAKE_RECORD: u8 = 22;
/// Maximum number of bytes read from a client that does not speak TLS. Without reading, the client
/// would see a broken connection instead of the answer.
const PLAIN_BYTES_MAX: usize = 64 << 10;

/// A client's connection without TLS, or with TLS after the handshake.
pub type ClientStream = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Performs the handshake, and returns `None` if it fails or takes longer than `handshake_max`. A
/// client that does not speak TLS gets `to_plain`.
pub async fn handshake(
    config: Arc<ServerConfig>,
    mut stream: TcpStream,
    handshake_max: Duration,
    to_plain: &[u8],
) -> Option<ClientStream> {
    let accept = async {
        let mut first = [0];
        if stream.peek(&mut first).await.ok()? == 0 {
            return None;
        }
        if first != [HANDSHAKE_RECORD] {
            reject_plain(&mut stream, to_plain).await;
            return None;
        }
        let accepted = TlsAcceptor::from(config).accept(stream).await;
        accepted.inspect_err(|error| tracing::debug!(%error, "TLS handshake failed")).ok()
    };
    let accepted = timeout(handshake_max, accept).await.ok().flatten()?;
    Some(Either::Right(Box::new(accepted)))
}

async fn reject_plain(stream: &mut TcpStream, answer: &[u8]) {
    tracing::debug!("a client does not speak TLS");
    let _ = stream.write_all(answer).await;
    let _ = stream.shutdown().await;
    let (mut buffer, mut bytes) = ([0; 4096], 0);
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        bytes += count;
        if bytes > PLAIN_BYTES_MAX {
            break;
        }
    }
}
