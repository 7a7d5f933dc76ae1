//! TLS on the ports of clients: certificate and key from PEM files, and the handshake.

use std::path::Path;

use credentials::{Reloaded, SettingFile, server_config};
use rustls::{ServerConfig, pki_types::UnixTime};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

/// First byte of a TLS connection: the type of a handshake record.
const HANDSHAKE: u8 = 22;
/// Protocols of ALPN.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Response to a client that does not speak TLS.
const PLAIN_HTTP: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 36\r\n\
    connection: close\r\n\r\nthis port speaks TLS; expected https";
/// Maximum number of bytes read from such a client. Without reading, the client would see a broken connection instead
/// of the response.
const PLAIN_BYTES_MAX: usize = 64 << 10;

/// Configuration of the handshake, replaced when the files change.
pub type Tls = Reloaded<ServerConfig>;

/// Reads certificate and key. The error names file and setting.
pub fn read_tls(cert: &Path, key: &Path) -> Result<Tls, String> {
    let files =
        vec![SettingFile::new("router.tls_cert", cert), SettingFile::new("router.tls_key", key)];
    Reloaded::read(files, |files, contents, _| {
        let (cert, key) = ((&files[0], &contents[0][..]), (&files[1], &contents[1][..]));
        server_config(cert, key, &PROTOCOLS, UnixTime::now())
    })
}

/// Performs the handshake with a client. Returns `None` if it fails. The caller bounds the time.
pub async fn handshake(tls: &Tls, mut stream: TcpStream) -> Option<TlsStream<TcpStream>> {
    let mut first = [0];
    if stream.peek(&mut first).await.ok()? == 0 {
        return None;
    }
    if first != [HANDSHAKE] {
        reject_plain(&mut stream).await;
        return None;
    }
    let accepted = TlsAcceptor::from(tls.current()).accept(stream).await;
    accepted.inspect_err(|error| tracing::debug!(%error, "TLS handshake failed")).ok()
}

async fn reject_plain(stream: &mut TcpStream) {
    let _ = stream.write_all(PLAIN_HTTP).await;
    let _ = stream.shutdown().await;
    let (mut buffer, mut bytes) = ([0; 4096], 0);
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        bytes += count;
        if bytes > PLAIN_BYTES_MAX {
            break;
        }
    }
}
