//! The port on which KV arrives, as strangers find it and as one does who knows the cluster's secret.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use integration_tests::cluster::{SECRET, Service};
use kv_transfer::{
    ClusterSecret,
    api::{Epoch, Identity, TransferId},
    control::{Body, ControlMessage, Hello, Keys, Signer, Source, identity_from_wire},
};
use proto::v1::{
    NodeRecord, ObserveRequest, node_client::NodeClient, observe_event::Event as Observed,
};

/// Far beyond what any step here needs.
const PATIENCE: Duration = Duration::from_secs(20);
const GREETING_BYTES: usize = 40;
const TAG_BYTES: usize = 32;
/// What a receiver reads past at most where nobody waits for a frame.
const FRAME_BYTES: u64 = 200 << 20;

/// A node whose data port is attacked.
pub struct Target {
    pub name: String,
    process: u32,
    data: String,
    notice: String,
    epoch: Epoch,
    identity: Identity,
}

impl Target {
    /// Asks the node who it is, as a router does.
    pub async fn of(service: &Service) -> Result<Self> {
        let mut client = NodeClient::connect(format!("http://{}", service.ready.grpc)).await?;
        let mut events = client.observe(ObserveRequest {}).await?.into_inner();
        let first = events.message().await?.context("the node says nothing")?;
        let Some(Observed::Snapshot(snapshot)) = first.event else {
            anyhow::bail!("no snapshot comes first: {first:?}");
        };
        let NodeRecord { epoch, identity, notice_endpoint, .. } =
            snapshot.record.context("no record")?;
        Ok(Self {
            name: service.name.clone(),
            process: service.id(),
            data: service.ready.data.trim_start_matches("tcp://").to_owned(),
            notice: notice_endpoint,
            epoch: Epoch::from_bytes(&epoch).context("an epoch has 16 bytes")?,
            identity: identity_from_wire(identity.context("no identity")?)?,
        })
    }

    /// Memory that the process has in use.
    pub fn resident_bytes(&self) -> Result<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        Ok(kib.context("no VmRSS")?.trim().parse::<u64>()? << 10)
    }

    /// One connection of somebody who does not know the secret. Those that are given back stay open
    /// and say nothing more.
    pub fn throw_garbage(&self, round: u64) -> io::Result<TcpStream> {
        let mut stream = TcpStream::connect(&self.data)?;
        stream.set_write_timeout(Some(Duration::from_millis(200)))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut greeting = [0; GREETING_BYTES];
        match round % 5 {
            0 => stream.write_all(&noise(round, 1 + (round * 7919 % 100_000) as usize))?,
            // Half of what a sender says of itself.
            1 => {
                stream.read_exact(&mut greeting)?;
                stream.write_all(&noise(round, 48))?;
            }
            2 => {}
            // All of it, with a tag that is none, and a frame of 2^62 bytes behind it.
            3 => {
                stream.read_exact(&mut greeting)?;
                stream.write_all(&noise(round, 96))?;
                stream.write_all(&header(1 << 62))?;
                stream.write_all(&noise(round, 1 << 20))?;
            }
            // A frame without any greeting.
            _ => {
                stream.write_all(&header(u64::MAX))?;
                stream.write_all(&noise(round, 1 << 20))?;
            }
        }
        Ok(stream)
    }

    /// Whether somebody who proves nothing is hung up on.
    pub fn turns_away(&self) -> Result<()> {
        let mut stream = TcpStream::connect(&self.data)?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.read_exact(&mut [0; GREETING_BYTES])?;
        stream.write_all(&noise(1, 96))?;
        ensure!(is_closed(&mut stream), "{} lets a stranger in", self.name);
        Ok(())
    }

    /// A process that knows the secret, is let in, and then announces more than there is. `look` is
    /// called while the bytes flow.
    pub fn betray(&self, mut look: impl FnMut() -> Result<()>) -> Result<()> {
        let keys = Keys::derive(&ClusterSecret::new(SECRET)?);
        let me = Epoch(u128::from(self.process) << 64 | 1);
        let _greeting = self.greet(&keys, me)?;
        let mut stream = self.enter(&keys, me)?;
        // A frame that nobody waits for is read past, and the next one finds its place.
        let piece = noise(1, 1 << 20);
        for _ in 0..2 {
            stream.write_all(&header(FRAME_BYTES))?;
            for _ in 0..FRAME_BYTES / piece.len() as u64 {
                stream.write_all(&piece)?;
                look()?;
            }
        }
        // One without an end is not.
        stream.write_all(&header(u64::MAX))?;
        ensure!(is_closed(&mut stream), "{} waits for {} bytes", self.name, u64::MAX);
        Ok(())
    }

    /// Makes `me` known as a peer, as a HELLO does.
    fn greet(&self, keys: &Keys, me: Epoch) -> Result<(zmq::Context, zmq::Socket)> {
        let context = zmq::Context::new();
        let dealer = context.socket(zmq::DEALER)?;
        dealer.set_linger(0)?;
        dealer.set_plain_username(Some("baton"))?;
        dealer.set_plain_password(Some(&keys.zap_password(self.epoch)))?;
        dealer.connect(&self.notice)?;
        let hello = ControlMessage::untraced(Body::Hello(Hello {
            identity: self.identity.clone(),
            // Nobody listens on the discard port.
            control_endpoint: "tcp://127.0.0.1:9".to_owned(),
            data_endpoint: "tcp://127.0.0.1:9".to_owned(),
            transports: vec!["tcp".to_owned()],
            integrity: vec!["xxh3+digest1".to_owned()],
            session: 1,
            in_advance: false,
        }));
        let source = Source { node_id: "traitor".to_owned(), epoch: me };
        let signed = Signer::new(keys.clone(), source).sign(self.epoch, &hello)?;
        dealer.send_multipart([&signed.frame, &signed.tag], 0)?;
        Ok((context, dealer))
    }

    /// Connects as `me`, again until the HELLO has been heard.
    fn enter(&self, keys: &Keys, me: Epoch) -> Result<TcpStream> {
        let start = Instant::now();
        loop {
            let mut stream = TcpStream::connect(&self.data)?;
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            let mut greeting = [0; GREETING_BYTES];
            stream.read_exact(&mut greeting)?;
            let (nonce, from, to) = (noise(9, 32), me.to_bytes(), self.epoch.to_bytes());
            let tag = keys.tag_data(&[b"s", &greeting[8..], &nonce, &from, &to]);
            stream.write_all(&[&nonce[..], &from, &to, &tag].concat())?;
            stream.read_exact(&mut [0; TAG_BYTES])?;
            // Whoever has no pair is turned away now; the others hear nothing more.
            stream.set_read_timeout(Some(Duration::from_millis(50)))?;
            match stream.read(&mut [0; 1]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    stream.set_read_timeout(Some(PATIENCE))?;
                    return Ok(stream);
                }
                _ => ensure!(start.elapsed() < PATIENCE, "{} lets nobody in", self.name),
            }
        }
    }
}

/// The header of a frame for a transfer that nobody knows, with this many bytes behind it.
fn header(payload_bytes: u64) -> Vec<u8> {
    let mut bytes = b"BKV1".to_vec();
    bytes.extend_from_slice(&7u32.to_le_bytes());
    bytes.extend_from_slice(&TransferId(1).to_bytes());
    bytes.extend_from_slice(&payload_bytes.to_le_bytes());
    bytes.extend_from_slice(&xxhash_rust::xxh3::xxh3_64(&bytes).to_le_bytes());
    bytes
}

fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect()
}

fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
    }
}
