//! Records appear, disappear and change while a watch follows them.

use anyhow::{Context, Result};
use etcd_client::PutOptions;
use integration_tests::etcd::Etcd;

use crate::{
    DEADLINE, PREFIX, TTL, at, entry, follow, joined, known, left, next, proxy::Proxy, register,
};

pub(crate) async fn nodes_join_and_leave_while_a_router_follows() -> Result<()> {
    let etcd = Etcd::start()?;
    let one = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &one).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;

    let (membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(
        known(&membership),
        std::slice::from_ref(&one.address),
        "the membership knows the node when it has started"
    );
    assert_eq!(next(&mut watch).await?, joined(&one));
    let two = entry("decode-2", 2);
    let second = register(at(&etcd.url()), &two).await?;
    assert_eq!(next(&mut watch).await?, joined(&two));

    registration.leave(DEADLINE).await;
    assert_eq!(next(&mut watch).await?, left(&one));
    // The second node dies: its lease ends, and etcd deletes the record.
    drop(second);
    assert_eq!(next(&mut watch).await?, left(&two));
    membership.shutdown(DEADLINE).await?;
    assert_eq!(watch.next().await, None);
    Ok(())
}

pub(crate) async fn etcd_record_exists_as_long_as_its_node() -> Result<()> {
    let etcd = Etcd::start()?;
    let registration = register(at(&etcd.url()), &entry("decode-1", 1)).await?;
    // On a shared machine a renewal may come too late, but not every time.
    for tries in 1.. {
        let first = etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
        tokio::time::sleep(TTL * 3).await;
        let last = etcd.leases(PREFIX).await?;
        if last == first {
            break;
        }
        assert!(tries < 5, "the same lease is not renewed: {first:?} and {last:?}");
    }
    registration.leave(DEADLINE).await;
    assert_eq!(etcd.leases(PREFIX).await?, []);
    Ok(())
}

pub(crate) async fn registering_again_after_a_lost_lease_keeps_the_epoch() -> Result<()> {
    let etcd = Etcd::start()?;
    let node = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &node).await?;
    let first = etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    let (_membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));

    etcd.client().await?.lease_revoke(first[0].1).await?;
    assert_eq!(next(&mut watch).await?, left(&node));
    assert_eq!(next(&mut watch).await?, joined(&node));
    let again = etcd.leases(PREFIX).await?;
    assert_eq!(again[0].0, first[0].0, "the key names node and epoch");
    assert!(again[0].0.ends_with(&node.epoch.to_string()), "{}", again[0].0);
    assert_ne!(again[0].1, first[0].1, "under a new lease");
    registration.leave(DEADLINE).await;
    Ok(())
}

pub(crate) async fn a_deleted_record_is_written_again_under_its_lease() -> Result<()> {
    let etcd = Etcd::start()?;
    let node = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &node).await?;
    let first = etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    etcd.client().await?.delete(first[0].0.as_str(), None).await?;
    // A router that starts now finds no node, until the node writes its record again.
    let (membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    assert_eq!(etcd.leases(PREFIX).await?, first, "the same key under the same lease");
    registration.leave(DEADLINE).await;
    assert_eq!(next(&mut watch).await?, left(&node));
    membership.shutdown(DEADLINE).await?;
    Ok(())
}

pub(crate) async fn new_process_at_a_known_address_is_a_new_node() -> Result<()> {
    let etcd = Etcd::start()?;
    let old = entry("decode-1", 1);
    let new = entry("decode-1", 1);
    // The old process has just died: its record still exists.
    drop_registered(&etcd, &old).await?;
    let (_membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(next(&mut watch).await?, joined(&old));
    let registration = register(at(&etcd.url()), &new).await?;
    assert_eq!([next(&mut watch).await?, next(&mut watch).await?], [left(&old), joined(&new)]);
    // The end of the old lease changes nothing: the next change is that the new node leaves.
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    registration.leave(DEADLINE).await;
    assert_eq!(next(&mut watch).await?, left(&new));
    Ok(())
}

async fn drop_registered(etcd: &Etcd, node: &membership::etcd::NodeEntry) -> Result<()> {
    let registration = register(at(&etcd.url()), node).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    drop(registration);
    Ok(())
}

pub(crate) async fn invalid_records_in_etcd_are_ignored() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut client = etcd.client().await?;
    let key = |name: &str| format!("{PREFIX}/nodes/{name}/{}", "7".repeat(32));
    client.put(key("a"), "not JSON", None).await?;
    client.put(key("b"), r#"{"version":9}"#, None).await?;
    client.put(format!("{PREFIX}/nodes/short"), vec![0xff; 100], None).await?;
    // Together these records exceed the size of one response.
    for name in ["c", "d", "e", "f"] {
        client.put(key(name), vec![b'x'; 1_400_000], None).await?;
    }
    let (membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(known(&membership), []);
    // Write invalid records while the watch is open, then register a node.
    client.put(key("g"), vec![b'x'; 1_400_000], None).await?;
    client.put(key("h"), "[]", None).await?;
    let node = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &node).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    // When another client overwrites a node's record, the router loses the node until the node
    // restores the record.
    let key = etcd.wait_leases(&format!("{PREFIX}/nodes/decode-1"), |keys| keys.len() == 1).await?;
    let options = PutOptions::new().with_lease(key[0].1);
    client.put(key[0].0.as_str(), "spoilt", Some(options)).await?;
    assert_eq!(next(&mut watch).await?, left(&node));
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;
    Ok(())
}

pub(crate) async fn more_records_than_fit_on_a_page_are_all_read() -> Result<()> {
    let etcd = Etcd::start()?;
    let mut client = etcd.client().await?;
    let epoch = "7".repeat(32);
    for index in 1..=600 {
        let value = format!(
            r#"{{"version":1,"node_id":"n-{index}","epoch":"{epoch}","role":"prefill","grpc":"http://h:{index}"}}"#
        );
        client.put(format!("{PREFIX}/nodes/n-{index}/{epoch}"), value, None).await?;
    }
    let (membership, _watch) = follow(at(&etcd.url())).await?;
    assert_eq!(known(&membership).len(), 600);
    Ok(())
}

pub(crate) async fn changes_during_a_lost_connection_are_seen_even_after_a_compaction() -> Result<()>
{
    let etcd = Etcd::start()?;
    let mut proxy = Proxy::start(etcd.port()).await?;
    let (one, two, three) = (entry("n-1", 1), entry("n-2", 2), entry("n-3", 3));
    let first = register(at(&etcd.url()), &one).await?;
    let second = register(at(&etcd.url()), &two).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 2).await?;
    let (membership, mut watch) = follow(at(&proxy.url())).await?;
    assert_eq!([next(&mut watch).await?, next(&mut watch).await?], [joined(&one), joined(&two)]);

    proxy.cut().await;
    first.leave(DEADLINE).await;
    let third = register(at(&etcd.url()), &three).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 2 && keys[1].0.contains("n-3")).await?;
    // The compaction removes every revision from which the watch could resume.
    let mut client = etcd.client().await?;
    let revision = client.put("/elsewhere", "x", None).await?;
    let revision = revision.header().context("an answer has a header")?.revision();
    client.compact(revision, None).await?;
    assert_eq!(known(&membership), [one.address.clone(), two.address.clone()]);

    proxy.mend().await?;
    assert_eq!([next(&mut watch).await?, next(&mut watch).await?], [left(&one), joined(&three)]);
    for registration in [second, third] {
        registration.leave(DEADLINE).await;
    }
    Ok(())
}

pub(crate) async fn etcd_that_starts_last_is_found_by_router_and_nodes() -> Result<()> {
    let mut etcd = Etcd::start()?;
    etcd.kill();
    let node = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &node).await?;
    let (membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(known(&membership), []);
    etcd.restart()?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;
    assert_eq!(next(&mut watch).await?, left(&node));
    Ok(())
}

pub(crate) async fn a_frozen_etcd_ends_leases_and_nodes_register_again() -> Result<()> {
    let etcd = Etcd::start()?;
    let node = entry("decode-1", 1);
    let registration = register(at(&etcd.url()), &node).await?;
    let first = etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    let (membership, mut watch) = follow(at(&etcd.url())).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    etcd.stop_signal();
    tokio::time::sleep(TTL * 3).await;
    assert_eq!(
        known(&membership),
        std::slice::from_ref(&node.address),
        "the router keeps its members meanwhile"
    );
    etcd.continue_signal();
    let again = etcd.wait_leases(PREFIX, |keys| keys.len() == 1 && keys[0].1 != first[0].1).await?;
    assert_eq!(again[0].0, first[0].0, "the same node and epoch");
    registration.leave(DEADLINE).await;
    loop {
        if next(&mut watch).await? == left(&node) && known(&membership).is_empty() {
            return Ok(());
        }
    }
}
