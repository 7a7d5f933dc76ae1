//! Certificate and key of the ports of clients, from PEM files.

use std::path::Path;

use credentials::{Reloaded, SettingFile, server_config};
use rustls::{ServerConfig, pki_types::UnixTime};

/// Protocols of ALPN.
const PROTOCOLS: [&[u8]; 2] = [b"h2", b"http/1.1"];
/// Response to a client that does not speak TLS.
pub(super) const PLAIN_HTTP: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 36\r\n\
    connection: close\r\n\r\nthis port speaks TLS; expected https";

/// Configuration of the handshake, replaced when the files change.
pub(crate) type Tls = Reloaded<ServerConfig>;

/// Reads certificate and key. The error names file and setting.
pub(crate) fn read_tls(cert: &Path, key: &Path) -> Result<Tls, String> {
    let files =
        vec![SettingFile::new("router.tls_cert", cert), SettingFile::new("router.tls_key", key)];
    Reloaded::read(files, |files, contents, _| {
        let (cert, key) = ((&files[0], &contents[0][..]), (&files[1], &contents[1][..]));
        server_config(cert, key, &PROTOCOLS, UnixTime::now())
    })
}
