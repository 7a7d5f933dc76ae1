//! Calls to etcd, each with its deadline.
//!
//! After a failure the connection is dropped and made anew: that heals what the client library does
//! not (a stream that ended, a dead connection behind a living one, a token that expired).

use std::{error::Error as _, sync::Arc, time::Duration};

use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error, GetOptions, Identity,
    PutOptions, SortOrder, SortTarget, TlsOptions, Txn, TxnOp, WatchOptions, WatchStream,
};

use super::{
    entry,
    follower::{RECORDS_MAX, Record},
    registrant::LeaseId,
    settings::{EtcdError, EtcdSettings},
};

const CONNECT_MAX: Duration = Duration::from_secs(2);
/// Records in one response. A record has at most 1.5 MiB (etcd's bound) and ours some hundred bytes;
/// answers that grow too large are asked for again in smaller pages.
const PAGE_RECORDS: usize = 256;
/// The client library answers so when it was the lease that etcd did not know.
const LEASE_GONE: &str = "lease not found";
/// The TLS library begins so when it does not believe a server's certificate.
const UNTRUSTED: &str = "invalid peer certificate";

/// Why a call did not succeed.
#[derive(Debug)]
pub(super) enum CallError {
    /// etcd knows us and will not serve us, or the settings make no sense: asking again is in vain.
    Refused(String),
    Unusable(String),
    /// Whoever answers there shows a certificate that our authority did not sign for it.
    Untrusted(String),
    /// The lease is unknown there.
    LeaseGone,
    /// Anything else, above all that nobody answers.
    Away(String),
}

impl CallError {
    pub fn reason(&self) -> &str {
        match self {
            Self::Refused(reason)
            | Self::Unusable(reason)
            | Self::Untrusted(reason)
            | Self::Away(reason) => reason,
            Self::LeaseGone => LEASE_GONE,
        }
    }

    /// For a process that is only starting: what its operator must put right is an error, an etcd
    /// that may come back is none.
    pub fn refuse_start(&self, settings: &EtcdSettings) -> Result<(), EtcdError> {
        let endpoints = settings.endpoints();
        match self {
            Self::Refused(reason) => {
                let user = match &settings.user {
                    Some((name, _)) => format!("user {name:?}"),
                    None => "a client without a name".to_owned(),
                };
                Err(EtcdError::Refused { endpoints, user, reason: reason.clone() })
            }
            Self::Unusable(reason) => {
                Err(EtcdError::Unusable { endpoints, reason: reason.clone() })
            }
            Self::Untrusted(reason) => {
                Err(EtcdError::Untrusted { endpoints, reason: reason.clone() })
            }
            Self::LeaseGone | Self::Away(_) => Ok(()),
        }
    }
}

impl From<Error> for CallError {
    fn from(error: Error) -> Self {
        use tonic::Code::{
            FailedPrecondition, InvalidArgument, NotFound, PermissionDenied, Unauthenticated,
        };
        match &error {
            Error::GRpcStatus(status) => match status.code() {
                // What we ask is well-formed, so it is us that etcd means.
                Unauthenticated | PermissionDenied | InvalidArgument | FailedPrecondition => {
                    Self::Refused(status.message().to_owned())
                }
                NotFound if status.message().contains(LEASE_GONE) => Self::LeaseGone,
                _ => match with_causes(status) {
                    reason if reason.contains(UNTRUSTED) => Self::Untrusted(reason),
                    reason => Self::Away(reason),
                },
            },
            Error::LeaseKeepAliveError(reason) if reason.contains(LEASE_GONE) => Self::LeaseGone,
            Error::InvalidUri(_) | Error::InvalidArgs(_) => Self::Unusable(error.to_string()),
            // Comes from the options alone; the network answers with a status.
            Error::TransportError(error) => {
                let cause = error.source().map(ToString::to_string);
                Self::Unusable(cause.unwrap_or_else(|| error.to_string()))
            }
            _ => Self::Away(error.to_string()),
        }
    }
}

/// A status says little of why a connection failed; its causes do.
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

/// A connection to etcd, made when it is needed.
pub(super) struct Session {
    settings: Arc<EtcdSettings>,
    client: Option<Client>,
}

/// A watch that is open, and what it needs to live.
pub(super) struct OpenWatch {
    pub stream: WatchStream,
    _client: Client,
}

impl Session {
    pub fn new(settings: Arc<EtcdSettings>) -> Self {
        Self { settings, client: None }
    }

    /// Whether we are known there and may read.
    pub async fn check(&mut self, within: Duration) -> Result<(), CallError> {
        let keys = entry::keys(&self.settings.prefix);
        let options = GetOptions::new().with_prefix().with_count_only();
        let call = async |client: &mut Client| {
            client.get(keys, Some(options)).await?;
            Ok(())
        };
        self.call(within, call).await
    }

    /// Takes a lease and writes the record under it; the lease and its time.
    pub async fn write(
        &mut self,
        key: String,
        value: String,
        within: Duration,
    ) -> Result<(LeaseId, Duration), CallError> {
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

    /// Renews the lease, and writes the record again under it where somebody deleted or changed the
    /// record. Returns whether the record was written.
    ///
    /// Opens a stream for each renewal: a stream that was open for longer may have died unnoticed.
    pub async fn renew(
        &mut self,
        lease: LeaseId,
        key: String,
        value: String,
        within: Duration,
    ) -> Result<bool, CallError> {
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

    /// Ends the lease and all that stands under it.
    pub async fn revoke(&mut self, lease: LeaseId, within: Duration) -> Result<(), CallError> {
        let call = async |client: &mut Client| {
            client.lease_revoke(lease.0).await?;
            Ok(())
        };
        match self.call(within, call).await {
            Err(CallError::LeaseGone) => Ok(()),
            other => other,
        }
    }

    /// All records of nodes at one revision, and a watch from the next one on.
    pub async fn read(mut self, within: Duration) -> Result<(Vec<Record>, OpenWatch), CallError> {
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
    ) -> Result<T, CallError> {
        // Taken, so that neither a failure nor a caller who gives up leaves a broken one behind.
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
            .map_err(|_| CallError::Away(format!("no answer within {within:?}")))??;
        self.client = Some(client);
        Ok(answer)
    }
}

async fn connect(settings: &EtcdSettings) -> Result<Client, Error> {
    // A member that lost the others would answer from the past, or not at all.
    let mut options =
        ConnectOptions::new().with_connect_timeout(CONNECT_MAX).with_require_leader(true);
    if let Some((name, password)) = &settings.user {
        options = options.with_user(name, password.reveal());
    }
    if let Some(tls) = &settings.tls {
        let mut trusted = TlsOptions::new().ca_certificate(Certificate::from_pem(&tls.ca));
        if let Some((cert, key)) = &tls.identity {
            trusted = trusted.identity(Identity::from_pem(cert, key));
        }
        options = options.with_tls(trusted);
    }
    Client::connect(&settings.endpoints, Some(options)).await
}

/// Page by page, all at the revision of the first.
async fn read_all(client: &mut Client, keys: &str) -> Result<(Vec<Record>, i64), Error> {
    let end = after_prefix(keys);
    let (mut from, mut revision) = (keys.as_bytes().to_vec(), 0);
    let mut page_records = PAGE_RECORDS;
    let mut records: Vec<Record> = Vec::new();
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
        }
        records.extend(page.kvs().iter().map(|kv| Record {
            key: kv.key().to_vec(),
            value: kv.value().to_vec(),
            modified: kv.mod_revision(),
        }));
        match records.last() {
            // One more than is believed, so that its being too many shows.
            Some(last) if page.more() && records.len() <= RECORDS_MAX => {
                from = [last.key.as_slice(), &[0]].concat();
            }
            _ => return Ok((records, revision)),
        }
    }
}

/// The first key that does not begin with `prefix`, which ends with a slash.
fn after_prefix(prefix: &str) -> Vec<u8> {
    let mut end = prefix.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}
