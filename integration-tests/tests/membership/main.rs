//! Membership on a real etcd: records and watches, access control, and whole clusters.

mod access;
mod clusters;
mod lost_device;
mod proxy;
mod records;

use std::time::Duration;

use anyhow::{Context, Result};
use cluster::{Epoch, MemberChange, NodeAddress, NodeId, Role};
use config::{Config, LoadInput};
use futures_util::FutureExt;
use membership::{
    MemberWatch, Membership,
    etcd::{EtcdError, EtcdSettings, NodeEntry, Registrar, Registration},
};

const DEADLINE: Duration = Duration::from_secs(60);
const PREFIX: &str = "/baton/test";
/// The shortest lease that etcd grants.
const TTL: Duration = Duration::from_secs(2);

/// Returns the etcd settings as a service reads them from its configuration.
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

/// Follows the nodes in etcd. Returns the membership and its watch.
async fn follow(settings: EtcdSettings) -> Result<(Membership, MemberWatch), EtcdError> {
    let membership = Membership::registered(settings).await?;
    let watch = membership.watch();
    Ok((membership, watch))
}

/// Returns the members that the membership knows now.
fn known(membership: &Membership) -> Vec<NodeAddress> {
    let mut watch = membership.watch();
    let joined = std::iter::from_fn(|| watch.next().now_or_never().flatten());
    let address = |change| match change {
        MemberChange::Joined(address) => address,
        MemberChange::Left(address) => panic!("{address} left before it joined"),
    };
    joined.map(address).collect()
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

fn main() -> std::process::ExitCode {
    let mut tests = test_harness::async_tests![
        access::user_with_its_password_can_register_and_watch,
        access::missing_or_wrong_password_is_rejected_in_one_line,
        access::services_with_a_wrong_password_exit_at_start,
        access::node_opens_its_model_before_a_silent_etcd_times_out,
        access::ca_suffices_if_etcd_requires_no_client_certificate,
        access::passwords_are_checked_over_tls,
        access::mutual_tls_requires_that_both_sides_trust_each_other,
        access::replaced_certificates_are_used_by_the_next_connection,
        lost_device::lost_device_fails_each_request_once_removes_the_record_and_exits,
        records::nodes_join_and_leave_while_a_router_follows,
        records::etcd_record_exists_as_long_as_its_node,
        records::registering_again_after_a_lost_lease_keeps_the_epoch,
        records::a_deleted_record_is_written_again_under_its_lease,
        records::new_process_at_a_known_address_is_a_new_node,
        records::invalid_records_in_etcd_are_ignored,
        records::more_records_than_fit_on_a_page_are_all_read,
        records::changes_during_a_lost_connection_are_seen_even_after_a_compaction,
        records::etcd_that_starts_last_is_found_by_router_and_nodes,
        records::a_frozen_etcd_ends_leases_and_nodes_register_again,
    ];
    tests.extend(test_harness::multi_thread_tests![
        clusters::nodes_join_and_leave_a_serving_cluster_and_nothing_is_restarted,
        clusters::nodes_of_both_roles_join_and_leave_under_load_and_no_token_is_lost,
        clusters::a_node_restarted_at_its_address_serves_under_a_new_record,
        clusters::serving_continues_while_etcd_is_down_for_20_seconds,
        clusters::serving_continues_while_etcd_is_frozen_for_20_seconds,
        clusters::delayed_links_between_router_nodes_and_etcd_change_no_answer,
        clusters::up_with_etcd_answers_and_leaves_nothing_behind,
    ]);
    tests.extend(test_harness::tests![clusters::static_list_beside_etcd_is_rejected_in_one_line,]);
    test_harness::main(&[(lost_device::NODE_HELPER, lost_device::run_node)], tests)
}
