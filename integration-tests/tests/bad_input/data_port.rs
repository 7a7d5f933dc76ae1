//! Attacks on the port that receives KV: by clients without the cluster secret, and by one that
//! knows the secret.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{SECRET, Service, node_client};
use kv_transfer::{
    ClusterSecret,
    api::{Epoch, Identity, Peer, TransferId},
    control::{Body, ControlMessage, Hello, Keys, Sealer, identity_from_wire},
};
use proto::v1::{NodeRecord, ObserveRequest, observe_event::Event as Observed};
use test_harness::noise;

/// Time-out of every step.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Nonce, both epochs, group and tag.
const HELLO_BYTES: usize = 104;
const CHALLENGE_BYTES: usize = 40;
const TAG_BYTES: usize = 32;
/// Largest frame without a matching transfer that a receiver skips.
const FRAME_BYTES: u64 = 200 << 20;

/// A node whose data port is attacked.
pub(crate) struct Target {
    pub name: String,
    process: u32,
    data: String,
    control: String,
    epoch: Epoch,
    identity: Identity,
}

impl Target {
    /// Reads the node's record, as a router does.
    pub(crate) async fn of(service: &Service) -> Result<Self> {
        let mut client = node_client(&service.ready.grpc, None)?;
        let mut events = client.observe(ObserveRequest {}).await?.into_inner();
        let first = events.message().await?.context("the stream has no first event")?;
        let Some(Observed::Snapshot(snapshot)) = first.event else {
            anyhow::bail!("the first event is not a snapshot: {first:?}");
        };
        let NodeRecord { epoch, identity, control_endpoint, .. } =
            snapshot.record.context("no record")?;
        Ok(Self {
            name: service.name.clone(),
            process: service.id(),
            data: service.ready.data.trim_start_matches("tcp://").to_owned(),
            control: control_endpoint,
            epoch: Epoch::from_bytes(&epoch).context("an epoch has 16 bytes")?,
            identity: identity_from_wire(identity.context("no identity")?)?,
        })
    }

    /// Returns the resident memory of the process.
    pub(crate) fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kib.context("no VmRSS")?.trim().parse::<u64>()? << 10)
    }

    /// Sends garbage on one connection without knowledge of the secret. A returned connection is
    /// open and silent.
    pub(crate) fn throw_garbage(&self, round: u64) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.data)?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let mut challenge = [0; CHALLENGE_BYTES];
        match round % 5 {
            0 => stream.write_all(&noise(round, 1 + (round * 7919 % 100_000) as usize))?,
            // Half of a sender's handshake.
            1 => {
                stream.read_exact(&mut challenge)?;
                stream.write_all(&noise(round, 48))?;
            }
            2 => {}
            // A complete handshake with an invalid tag, and then a frame of 2^62 bytes.
            3 => {
                stream.read_exact(&mut challenge)?;
                stream.write_all(&noise(round, HELLO_BYTES))?;
                stream.write_all(&header(1 << 62))?;
                stream.write_all(&noise(round, 1 << 20))?;
            }
            // A frame without a handshake.
            _ => {
                stream.write_all(&header(u64::MAX))?;
                stream.write_all(&noise(round, 1 << 20))?;
            }
        }
        Ok(stream)
    }

    /// Asserts that the node closes a connection without authentication.
    pub(crate) fn assert_rejects_unauthenticated(&self) -> Result<()> {
        let mut stream = TcpStream::connect(&self.data)?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.read_exact(&mut [0; CHALLENGE_BYTES])?;
        stream.write_all(&noise(1, HELLO_BYTES))?;
        ensure!(is_closed(&mut stream), "{} accepts an unauthenticated connection", self.name);
        Ok(())
    }

    /// Connects with the secret, then announces more bytes than it sends. Calls `look` while the
    /// bytes are in flight.
    pub(crate) fn attack_authenticated(&self, mut look: impl FnMut() -> Result<()>) -> Result<()> {
        let keys = Keys::derive(&ClusterSecret::new(SECRET)?);
        let me = Epoch(u128::from(self.process) << 64 | 1);
        let _peer = self.send_hello(&keys, me)?;
        let mut stream = self.enter(&keys, me)?;
        // A receiver skips a frame without a matching transfer, and reads the next one.
        let piece = noise(1, 1 << 20);
        for _ in 0..2 {
            stream.write_all(&header(FRAME_BYTES))?;
            for _ in 0..FRAME_BYTES / piece.len() as u64 {
                stream.write_all(&piece)?;
                look()?;
            }
        }
        // The receiver rejects a frame of unlimited length.
        stream.write_all(&header(u64::MAX))?;
        ensure!(is_closed(&mut stream), "{} waits for {} bytes", self.name, u64::MAX);
        Ok(())
    }

    /// Registers `me` as a peer with a HELLO.
    fn send_hello(&self, keys: &Keys, me: Epoch) -> Result<(zmq::Context, zmq::Socket)> {
        let source = Peer { node_id: "traitor".to_owned(), epoch: me };
        let sealer = Sealer::new(keys.clone(), source);
        let credential = sealer.credential(self.epoch);
        let context = zmq::Context::new();
        let dealer = context.socket(zmq::DEALER)?;
        dealer.set_linger(0)?;
        dealer.set_plain_username(Some(&credential.user))?;
        dealer.set_plain_password(Some(&credential.password))?;
        dealer.connect(&self.control)?;
        let hello = ControlMessage::untraced(Body::Hello(Hello {
            identity: self.identity.clone(),
            // No process listens on the discard port.
            control_endpoint: "tcp://127.0.0.1:9".to_owned(),
            data_endpoint: "tcp://127.0.0.1:9".to_owned(),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3+digest1".to_owned()],
            session: 1,
            in_advance: false,
        }));
        let sealed = sealer.seal(self.epoch, &hello)?;
        dealer.send_multipart(sealed.frames(), 0)?;
        Ok((context, dealer))
    }

    /// Connects as `me`. Repeats until the node has processed the HELLO.
    fn enter(&self, keys: &Keys, me: Epoch) -> Result<TcpStream> {
        let start = Instant::now();
        loop {
            let mut stream = TcpStream::connect(&self.data)?;
            stream.set_read_timeout(Some(TIMEOUT))?;
            stream.set_write_timeout(Some(TIMEOUT))?;
            let mut challenge = [0; CHALLENGE_BYTES];
            stream.read_exact(&mut challenge)?;
            let (nonce, from, to) = (noise(9, 32), me.to_bytes(), self.epoch.to_bytes());
            let group = 1u64.to_be_bytes();
            let tag = keys.tag_data(&[b"s", &challenge[8..], &nonce, &from, &to, &group]);
            stream.write_all(&[&nonce[..], &from, &to, &group, &tag].concat())?;
            stream.read_exact(&mut [0; TAG_BYTES])?;
            // The node closes the connection of an unknown peer; to a known one it sends nothing
            // more.
            stream.set_read_timeout(Some(Duration::from_millis(50)))?;
            match stream.read(&mut [0; 1]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.set_read_timeout(Some(TIMEOUT))?;
                    return Ok(stream);
                }
                _ => ensure!(
                    start.elapsed() < TIMEOUT,
                    "{} accepts no authenticated connection",
                    self.name
                ),
            }
        }
    }
}

/// Returns the header of a frame for an unknown transfer with this many payload bytes.
fn header(payload_bytes: u64) -> Vec<u8> {
    let mut bytes = b"BKV1".to_vec();
    bytes.extend_from_slice(&7u32.to_le_bytes());
    bytes.extend_from_slice(&TransferId(1).to_bytes());
    bytes.extend_from_slice(&payload_bytes.to_le_bytes());
    bytes.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
    bytes
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}
