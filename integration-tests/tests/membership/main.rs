//! Membership on a real etcd: records and watches by themselves, who is let in, and whole clusters.

mod access;
mod clusters;
mod lost_device;
mod proxy;
mod records;

use std::time::Duration;

use anyhow::{Context, Result};
use cluster::{
    Epoch, MemberChange, MemberWatch, Membership, NodeAddress, NodeId, Role,
    etcd::{EtcdError, EtcdMembership, EtcdSettings, NodeEntry, Registrar, Registration},
};
use config::{Config, LoadInput};

const DEADLINE: Duration = Duration::from_secs(60);
const PREFIX: &str = "/baton/test";
/// The shortest that etcd grants.
const TTL: Duration = Duration::from_secs(2);

/// As a service reads them, with the keys of the configuration.
fn settings(settings: &[(&str, &str)]) -> Result<EtcdSettings> {
    let mut flags: std::collections::BTreeMap<String, String> = [
        ("cluster.etcd_prefix", PREFIX.to_owned()),
        ("cluster.etcd_ttl", format!("{}s", TTL.as_secs())),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into();
    flags.extend(settings.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
    let config = Config::load(LoadInput { flags, ..LoadInput::default() })?;
    EtcdSettings::read(&config.cluster)?.context("cluster.etcd is not set")
}

fn at(url: &str) -> EtcdSettings {
    settings(&[("cluster.etcd", url)]).expect("a URL is all that is needed")
}

fn entry(name: &str, port: u16) -> NodeEntry {
    NodeEntry {
        node_id: NodeId::parse(name).expect("test names are valid"),
        epoch: Epoch::mint().expect("the system has randomness"),
        address: NodeAddress { role: Role::Decode, grpc: format!("http://127.0.0.1:{port}") },
    }
}

async fn register(settings: EtcdSettings, entry: &NodeEntry) -> Result<Registration, EtcdError> {
    Ok(Registrar::connect(settings).await?.register(entry.clone()))
}

/// A membership and its watch.
async fn follow(settings: EtcdSettings) -> Result<(Box<dyn Membership>, MemberWatch), EtcdError> {
    let membership = EtcdMembership::start(settings).await?;
    let watch = membership.watch();
    Ok((Box::new(membership), watch))
}

async fn next(watch: &mut MemberWatch) -> Result<MemberChange> {
    let change = tokio::time::timeout(DEADLINE, watch.next()).await;
    change.context("no change within the deadline")?.context("the watch ended")
}

fn joined(entry: &NodeEntry) -> MemberChange {
    MemberChange::Joined(entry.address.clone())
}

fn left(entry: &NodeEntry) -> MemberChange {
    MemberChange::Left(entry.address.clone())
}
