//! Calls to etcd, each with a deadline.
//!
//! A failed call drops the connection. A new connection repairs states that the client library does
//! not repair: an ended stream, a dead connection, an expired token.

use std::{error::Error as _, sync::Arc, time::Duration};

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, Identity,
    PutOptions, SortOrder, SortTarget, TlsOptions, Txn, TxnOp, WatchOptions, WatchStream,
};

use super::{
    entry,
    follower::{EtcdRecord, RECORDS_MAX, Records},
    registrant::LeaseId,
    settings::{EtcdError, EtcdSettings},
};

/// Time-out of a connection attempt. Short, because a connection that began before kube-proxy knew
/// the Service never succeeds.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Number of records per page. Records of nodes have a few hundred bytes, others at most 1.5 MiB
/// (etcd's limit); a response beyond the size limit is requested again with smaller pages.
const PAGE_RECORDS: usize = 256;
/// Error text of the client library for an unknown lease.
const LEASE_NOT_FOUND: &str = "lease not found";
/// Start of the TLS library's error for an untrusted certificate.
const UNTRUSTED: &str = "invalid peer certificate";

/// Reason why a call failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum EtcdCallError {
    /// etcd rejected the user; a retry cannot succeed.
    #[error("{0}")]
    Refused(String),
    /// The settings are invalid; a retry cannot succeed.
    #[error("{0}")]
    Unusable(String),
    /// The server's certificate is not signed by a CA in `cluster.etcd_ca` for this host.
    #[error("{0}")]
    Untrusted(String),
    #[error("{LEASE_NOT_FOUND}")]
    LeaseExpired,
    /// Any other failure, such as no answer.
    #[error("{0}")]
    Unreachable(String),
}

impl EtcdCallError {
    /// Returns the error for a starting process: only failures that the operator must fix, no
    /// outage.
    pub(super) fn refuse_start(&self, settings: &EtcdSettings) -> Result<(), EtcdError> {
        let (endpoints, reason) = (settings.endpoints(), self.to_string());
        Err(match self {
            Self::Refused(_) => {
                let user = match &settings.user {
                    Some((name, _)) => format!("user {name:?}"),
                    None => "a client without a user name".to_owned(),
                };
                EtcdError::Refused { endpoints, user, reason }
            }
            Self::Unusable(_) => EtcdError::Unusable { endpoints, reason },
            Self::Untrusted(_) => EtcdError::Untrusted { endpoints, reason },
            Self::LeaseExpired | Self::Unreachable(_) => return Ok(()),
        })
    }
}

impl From<Error> for EtcdCallError {
    fn from(error: Error) -> Self {
        use tonic::Code::{
            FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unauthenticated,
        };
        match &error {
            Error::GRpcStatus(status) => match status.code() {
                // The requests are well-formed, so the error concerns the credentials.
                Unauthenticated | PermissionDenied | InvalidArgument | FailedPrecondition => {
                    Self::Refused(status.message().to_owned())
                }
                NotFound if status.message().contains(LEASE_NOT_FOUND) => Self::LeaseExpired,
                _ => match with_causes(status) {
                    reason if reason.contains(UNTRUSTED) => Self::Untrusted(reason),
                    reason => Self::Unreachable(reason),
                },
            },
            Error::LeaseKeepAliveError(reason) if reason.contains(LEASE_NOT_FOUND) => {
                Self::LeaseExpired
            }
            Error::InvalidUri(_) | Error::InvalidArgs(_) => Self::Unusable(error.to_string()),
            // Only invalid options yield this error; network failures yield a status.
            Error::TransportError(error) => {
                let cause = error.source().map(ToString::to_string);
                Self::Unusable(cause.unwrap_or_else(|| error.to_string()))
            }
            _ => Self::Unreachable(error.to_string()),
        }
    }
}

/// Joins a status with its causes: the status alone does not tell why a connection failed.
fn with_causes(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = status.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// A connection to etcd that is opened on demand.
pub(super) struct EtcdSession {
    settings: Arc<EtcdSettings>,
    client: Option<Client>,
}

/// An open watch with its connection.
pub(super) struct OpenWatch {
    pub stream: WatchStream,
    _client: Client,
}

impl EtcdSession {
    pub(super) fn new(settings: Arc<EtcdSettings>) -> Self {
        Self { settings, client: None }
    }

    /// Checks the credentials and the read permission.
    pub(super) async fn check(&mut self, within: Duration) -> Result<(), EtcdCallError> {
        let keys = entry::keys(&self.settings.prefix);
        let options = GetOptions::new().with_prefix().with_count_only();
        let call = async |client: &mut Client| {
            client.get(keys, Some(options)).await?;
            Ok(())
        };
        self.call(within, call).await
    }

    /// Creates a lease and writes the record under it. Returns the lease and its time.
    pub(super) async fn write(
        &mut self,
        key: String,
        value: String,
        within: Duration,
    ) -> Result<(LeaseId, Duration), EtcdCallError> {
        // etcd counts whole seconds.
        let seconds = self.settings.ttl.as_secs_f64().ceil() as i64;
        let call = async |client: &mut Client| {
            let lease = client.lease_grant(seconds, None).await?;
            let options = PutOptions::new().with_lease(lease.id());
            client.put(key, value, Some(options)).await?;
            let ttl = Duration::from_secs(lease.ttl().try_into().unwrap_or(0));
            Ok((LeaseId(lease.id()), ttl))
        };
        self.call(within, call).await
    }

    /// Renews the lease, and writes the record again if it was deleted or changed. Returns whether
    /// the record was written.
    ///
    /// Opens a new stream for each renewal, because an old stream may have died silently.
    pub(super) async fn renew(
        &mut self,
        lease: LeaseId,
        key: String,
        value: String,
        within: Duration,
    ) -> Result<bool, EtcdCallError> {
        let call = async |client: &mut Client| {
            client.lease_keep_alive(lease.0).await?;
            let is_there = [
                Compare::value(key.as_str(), CompareOp::Equal, value.as_str()),
                Compare::lease(key.as_str(), CompareOp::Equal, lease.0),
            ];
            let write = TxnOp::put(key, value, Some(PutOptions::new().with_lease(lease.0)));
            let checked = client.txn(Txn::new().when(is_there).or_else([write])).await?;
            Ok(!checked.succeeded())
        };
        self.call(within, call).await
    }

    /// Revokes the lease, which deletes the record.
    pub(super) async fn revoke(
        &mut self,
        lease: LeaseId,
        within: Duration,
    ) -> Result<(), EtcdCallError> {
        let call = async |client: &mut Client| {
            client.lease_revoke(lease.0).await?;
            Ok(())
        };
        match self.call(within, call).await {
            Err(EtcdCallError::LeaseExpired) => Ok(()),
            other => other,
        }
    }

    /// Reads the records at one revision and opens a watch from the next revision on.
    pub(super) async fn read(
        mut self,
        within: Duration,
    ) -> Result<(Records, OpenWatch), EtcdCallError> {
        let keys = entry::keys(&self.settings.prefix);
        let call = async |client: &mut Client| {
            let (records, revision) = read_all(client, &keys).await?;
            let options = WatchOptions::new()
                .with_prefix()
                .with_start_revision(revision + 1)
                .with_progress_notify()
                .with_fragment();
            Ok((records, client.watch(keys.as_str(), Some(options)).await?))
        };
        let (records, stream) = self.call(within, call).await?;
        let client = self.client.expect("a call that succeeded leaves its connection");
        Ok((records, OpenWatch { stream, _client: client }))
    }

    async fn call<T>(
        &mut self,
        within: Duration,
        call: impl AsyncFnOnce(&mut Client) -> Result<T, Error>,
    ) -> Result<T, EtcdCallError> {
        // Take the connection, so that a failed or dropped call does not leave a broken one.
        let connected = self.client.take();
        let settings = &self.settings;
        let whole = async {
            let mut client = match connected {
                Some(client) => client,
                None => connect(settings).await?,
            };
            let answer = call(&mut client).await?;
            Ok::<_, Error>((client, answer))
        };
        let (client, answer) = tokio::time::timeout(within, whole)
            .await
            .map_err(|_| EtcdCallError::Unreachable(format!("no answer within {within:?}")))??;
        self.client = Some(client);
        Ok(answer)
    }
}

async fn connect(settings: &EtcdSettings) -> Result<Client, Error> {
    // Without a quorum an etcd member returns stale data or no answer.
    let mut options =
        ConnectOptions::new().with_connect_timeout(CONNECT_MAX).with_require_leader(true);
    if let Some((name, password)) = &settings.user {
        options = options.with_user(name, password.reveal());
    }
    if let Some(tls) = settings.tls().await {
        let mut trusted = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca));
        if let Some((cert, key)) = &tls.identity {
            trusted = trusted.identity(Identity::from_pem(cert, key));
        }
        options = options.with_tls(trusted);
    }
    Client::connect(&settings.endpoints, Some(options)).await
}

/// Reads page by page, all pages at the revision of the first, until the excess over
/// [`RECORDS_MAX`] is certain.
async fn read_all(client: &mut Client, keys: &str) -> Result<(Records, i64), Error> {
    let end = after_prefix(keys);
    let (mut from, mut revision, mut found) = (keys.as_bytes().to_vec(), 0, 0);
    let mut page_records = PAGE_RECORDS;
    let mut records: Vec<EtcdRecord> = Vec::new();
    loop {
        let options = GetOptions::new()
            .with_range(end.clone())
            .with_revision(revision)
            .with_sort(SortTarget::Key, SortOrder::Ascend)
            .with_limit(page_records as i64);
        let page = match client.get(from.clone(), Some(options)).await {
            Err(Error::GRpcStatus(status))
                if status.code() == tonic::Code::OutOfRange && page_records > 1 =>
            {
                page_records /= 16;
                continue;
            }
            page => page?,
        };
        if revision == 0 {
            revision = page.header().map_or(0, |header| header.revision());
            found = usize::try_from(page.count()).unwrap_or(0);
        }
        records.extend(page.kvs().iter().map(|kv| EtcdRecord {
            key: kv.key().to_vec(),
            value: kv.value().to_vec(),
            modified: kv.mod_revision(),
        }));
        match records.last() {
            // Read one record beyond the limit to detect an excess.
            Some(last) if page.more() && records.len() <= RECORDS_MAX => {
                from = [last.key.as_slice(), &[0]].concat();
            }
            _ => return Ok((Records { records, found }, revision)),
        }
    }
}

/// Returns the first key after all keys with `prefix`, which ends with a slash.
fn after_prefix(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}
