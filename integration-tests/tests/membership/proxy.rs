//! A TCP proxy whose connections a test can cut.

use std::io;

use tokio::{
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};

/// TCP relay to a port of this machine, until the relay is cut.
pub struct Proxy {
    port: u16,
    to: u16,
    task: Option<JoinHandle<()>>,
}

impl Proxy {
    pub async fn start(to: u16) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let port = listener.local_addr()?.port();
        Ok(Self { port, to, task: Some(tokio::spawn(pass_on(listener, to))) })
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Ends every connection and refuses new ones.
    pub async fn cut(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
            // The port is closed once the task has ended.
            let _ = task.await;
        }
    }

    pub async fn mend(&mut self) -> io::Result<()> {
        self.cut().await;
        let listener = TcpListener::bind(("127.0.0.1", self.port)).await?;
        self.task = Some(tokio::spawn(pass_on(listener, self.to)));
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

async fn pass_on(listener: TcpListener, to: u16) {
    // Dropping the set ends its tasks.
    let mut connections = JoinSet::new();
    while let Ok((mut ours, _)) = listener.accept().await {
        connections.spawn(async move {
            if let Ok(mut theirs) = TcpStream::connect(("127.0.0.1", to)).await {
                let _ = tokio::io::copy_bidirectional(&mut ours, &mut theirs).await;
            }
        });
    }
}
