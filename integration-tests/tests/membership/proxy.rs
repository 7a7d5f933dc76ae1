//! A TCP proxy whose connections a test can cut or delay.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::mpsc,
    task::{JoinHandle, JoinSet},
    time::{Instant, sleep_until},
};

/// Pieces in flight in each direction of a connection.
const PIECES_MAX: usize = 64;
const PIECE_BYTES_MAX: usize = 64 * 1024;

/// TCP relay to a port of 127.0.0.1, until the relay is cut.
pub(crate) struct Proxy {
    address: SocketAddr,
    to: u16,
    /// Delay of all data, in each direction.
    delay: Duration,
    connections: Arc<AtomicUsize>,
    task: Option<JoinHandle<()>>,
}

impl Proxy {
    pub(crate) async fn start(to: u16) -> io::Result<Self> {
        Self::start_at((Ipv4Addr::LOCALHOST, 0).into(), to, Duration::ZERO).await
    }

    /// Starts a proxy that listens on `address` and delays all data by `delay`, in each direction.
    pub(crate) async fn start_at(
        address: SocketAddr,
        to: u16,
        delay: Duration,
    ) -> io::Result<Self> {
        let mut proxy = Self { address, to, delay, connections: Arc::default(), task: None };
        proxy.mend().await?;
        Ok(proxy)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of connections that the proxy has accepted.
    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    /// Ends every connection and refuses new ones.
    pub(crate) async fn cut(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // The port is closed once the task has ended.
            let _ = task.await;
        }
    }

    pub(crate) async fn mend(&mut self) -> io::Result<()> {
        self.cut().await;
        let listener = TcpListener::bind(self.address).await?;
        self.address = listener.local_addr()?;
        let (to, delay, connections) = (self.to, self.delay, self.connections.clone());
        self.task = Some(tokio::spawn(pass_on(listener, to, delay, connections)));
        Ok(())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn pass_on(listener: TcpListener, to: u16, delay: Duration, accepted: Arc<AtomicUsize>) {
    // Dropping the set ends its tasks.
    let mut connections = JoinSet::new();
    while let Ok((ours, _)) = listener.accept().await {
        accepted.fetch_add(1, Ordering::Relaxed);
        connections.spawn(relay(ours, to, delay));
    }
}

async fn relay(ours: TcpStream, to: u16, delay: Duration) -> io::Result<()> {
    let theirs = TcpStream::connect((Ipv4Addr::LOCALHOST, to)).await?;
    for stream in [&ours, &theirs] {
        stream.set_nodelay(true)?;
    }
    let ((from_us, to_us), (from_them, to_them)) = (ours.into_split(), theirs.into_split());
    tokio::try_join!(copy(from_us, to_them, delay), copy(from_them, to_us, delay))?;
    Ok(())
}

/// Copies all bytes, each `delay` after its arrival.
async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: Duration) -> io::Result<()> {
    let (arrived, mut due) = mpsc::channel(PIECES_MAX);
    let read = async move {
        let mut buffer = vec![0; PIECE_BYTES_MAX];
        loop {
            let length = from.read(&mut buffer).await?;
            let piece = (Instant::now() + delay, buffer[..length].to_vec());
            if length == 0 || arrived.send(piece).await.is_err() {
                return io::Result::Ok(());
            }
        }
    };
    let write = async move {
        while let Some((at, piece)) = due.recv().await {
            sleep_until(at).await;
            to.write_all(&piece).await?;
        }
        to.shutdown().await
    };
    tokio::try_join!(read, write)?;
    Ok(())
}
