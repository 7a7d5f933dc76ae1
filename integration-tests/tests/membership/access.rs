//! Access to etcd: users and passwords, TLS and client certificates.

use std::{collections::BTreeMap, path::Path};

use anyhow::{Context, Result};
use cluster::etcd::EtcdSettings;
use etcd_client::{Permission, PermissionType};
use integration_tests::{
    cluster::{SECRET, Service, smollm2},
    etcd::{Etcd, EtcdTls},
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::{DEADLINE, PREFIX, at, entry, follow, joined, next, register, settings};

/// An etcd that knows two users: `baton`, who may read and write below the prefix, and `reader`.
async fn with_users(tls: Option<EtcdTls>) -> Result<Etcd> {
    let etcd = Etcd::start_with(tls)?;
    let mut client = etcd.client().await?;
    client.user_add("root", "root-password", None).await?;
    client.user_grant_role("root", "root").await?;
    for (user, kind) in [("baton", PermissionType::Readwrite), ("reader", PermissionType::Read)] {
        client.role_add(user).await?;
        let permission = Permission::new(kind, format!("{PREFIX}/")).with_prefix();
        client.role_grant_permission(user, permission).await?;
        client.user_add(user, "pass", None).await?;
        client.user_grant_role(user, user).await?;
    }
    client.auth_enable().await?;
    Ok(etcd)
}

fn user<'a>(url: &'a str, name: &'a str, password: &'a str) -> [(&'a str, &'a str); 3] {
    [("cluster.etcd", url), ("cluster.etcd_user", name), ("cluster.etcd_password", password)]
}

pub async fn a_user_with_its_password_registers_and_follows() -> Result<()> {
    let etcd = with_users(None).await?;
    let url = etcd.url();
    let node = entry("decode-1", 1);
    let registration = register(settings(&user(&url, "baton", "pass"))?, &node).await?;
    let (_membership, mut watch) = follow(settings(&user(&url, "reader", "pass"))?).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;
    Ok(())
}

pub async fn a_wrong_password_or_none_is_refused_in_one_line() -> Result<()> {
    let etcd = with_users(None).await?;
    let url = etcd.url();
    for (settings, named) in [
        (settings(&user(&url, "baton", "wrong-password"))?, "user \"baton\""),
        (settings(&user(&url, "nobody", "wrong-password"))?, "user \"nobody\""),
        (at(&url), "a client without a user name"),
    ] {
        let follower = follow(settings.clone()).await.map(drop).expect_err("it is let in");
        let node = register(settings, &entry("n", 1)).await.map(drop).expect_err("it is let in");
        for line in [follower.to_string(), node.to_string()] {
            assert!(line.contains(named) && line.contains(&url), "{line}");
            assert!(line.contains("cluster.etcd_password"), "{line}");
            assert!(!line.contains("wrong-password") && !line.contains('\n'), "{line}");
        }
    }
    Ok(())
}

pub async fn services_with_a_wrong_password_end_before_they_load_a_model() -> Result<()> {
    let etcd = with_users(None).await?;
    refused_at_start(&etcd, &[], &["refuses user \"baton\""])
}

/// Router and node end with one line that has all `words`, and load nothing before.
fn refused_at_start(etcd: &Etcd, settings: &[(&str, &Path)], words: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut all: BTreeMap<String, String> = [
        ("BATON_MODEL_PATH", smollm2().display().to_string()),
        ("BATON_TRANSFER_SECRET", SECRET.to_owned()),
        ("BATON_CLUSTER_ETCD", etcd.url()),
        ("BATON_CLUSTER_ETCD_PREFIX", PREFIX.to_owned()),
        ("BATON_CLUSTER_ETCD_USER", "baton".to_owned()),
        ("BATON_CLUSTER_ETCD_PASSWORD", "wrong-password".to_owned()),
        ("BATON_NODE_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_HTTP", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_GRPC", "127.0.0.1:0".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    all.extend(settings.iter().map(|(name, it)| ((*name).to_owned(), it.display().to_string())));
    for program in ["baton-decode-node", "baton-router"] {
        let started = Service::start(folder.path(), program, program, &all);
        let said = started.err().context("it is let in")?.to_string();
        assert!(said.contains("exit status: 1"), "{said}");
        let is_it = |line: &&str| words.iter().all(|word| line.contains(word));
        assert_eq!(said.lines().filter(is_it).count(), 1, "{said}");
        assert!(!said.contains("opened the model") && !said.contains("wrong-password"), "{said}");
    }
    Ok(())
}

/// An authority, and a certificate of its for this machine, which serves and asks.
fn certificates(folder: &Path, name: &str) -> Result<EtcdTls> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let params = CertificateParams::new(vec!["127.0.0.1".to_owned(), "localhost".to_owned()])?;
    let certificate = params.signed_by(&key, &authority)?;
    let write = |what: &str, text: String| -> Result<_> {
        let path = folder.join(format!("{name}-{what}.pem"));
        std::fs::write(&path, text)?;
        Ok(path)
    };
    Ok(EtcdTls {
        ca: write("ca", authority.pem())?,
        cert: write("cert", certificate.pem())?,
        key: write("key", key.serialize_pem())?,
        asks_clients: true,
    })
}

/// Follower and node are told in one line which setting is wrong.
async fn check_untrusted(settings: EtcdSettings, url: &str) {
    let follower = follow(settings.clone()).await.map(drop).expect_err("it is believed");
    let node = register(settings, &entry("n", 1)).await.map(drop).expect_err("it is believed");
    for line in [follower.to_string(), node.to_string()] {
        for word in [url, "is not trusted", "certificate", "check cluster.etcd_ca"] {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
        assert!(!line.contains('\n') && !line.contains("pass-over-tls"), "{line}");
    }
}

pub async fn an_authority_alone_is_enough_where_etcd_asks_for_no_certificate() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ours = EtcdTls { asks_clients: false, ..certificates(folder.path(), "ours")? };
    let foreign = certificates(folder.path(), "foreign")?;
    let etcd = Etcd::start_with(Some(ours.clone()))?;
    let url = etcd.url();
    assert!(url.starts_with("https://"), "{url}");
    let with = |ca: &Path| {
        settings(&[("cluster.etcd", &url), ("cluster.etcd_ca", &ca.display().to_string())])
    };
    let node = entry("decode-1", 1);
    let registration = register(with(&ours.ca)?, &node).await?;
    let (_membership, mut watch) = follow(with(&ours.ca)?).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;

    // The server's certificate is looked at.
    check_untrusted(with(&foreign.ca)?, &url).await;
    let untrusted = ["is not trusted", url.as_str(), "check cluster.etcd_ca"];
    refused_at_start(&etcd, &[("BATON_CLUSTER_ETCD_CA", &foreign.ca)], &untrusted)?;
    // And without an authority there is nothing to look at it with.
    let error = settings(&[("cluster.etcd", &url)]).err().expect("it is believed").to_string();
    assert!(error.contains("cluster.etcd_ca"), "{error}");
    Ok(())
}

pub async fn users_and_passwords_count_over_tls_too() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ours = EtcdTls { asks_clients: false, ..certificates(folder.path(), "ours")? };
    let foreign = certificates(folder.path(), "foreign")?;
    let etcd = with_users(Some(ours.clone())).await?;
    let url = etcd.url();
    let with = |ca: &Path, name: &str, password: &str| {
        let ca = ca.display().to_string();
        settings(&[&user(&url, name, password)[..], &[("cluster.etcd_ca", &ca)]].concat())
    };
    let node = entry("decode-1", 1);
    let registration = register(with(&ours.ca, "baton", "pass")?, &node).await?;
    let (_membership, mut watch) = follow(with(&ours.ca, "reader", "pass")?).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;

    let wrong = with(&ours.ca, "baton", "pass-over-tls")?;
    let said = follow(wrong).await.map(drop).expect_err("it is let in").to_string();
    assert!(said.contains("refuses user \"baton\"") && said.contains(&url), "{said}");
    let ca = [("BATON_CLUSTER_ETCD_CA", ours.ca.as_path())];
    refused_at_start(&etcd, &ca, &["refuses user \"baton\"", &url])?;
    // Nobody else is told a password.
    check_untrusted(with(&foreign.ca, "baton", "pass-over-tls")?, &url).await;
    Ok(())
}

pub async fn tls_lets_in_whom_both_sides_trust_and_nobody_else() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let [ours, foreign] = ["ours", "foreign"].map(|name| certificates(folder.path(), name));
    let (ours, foreign) = (ours?, foreign?);
    let etcd = Etcd::start_with(Some(ours.clone()))?;
    let url = etcd.url();
    let with = |ca: &Path, pair: Option<&EtcdTls>| {
        let mut all = vec![("cluster.etcd", url.clone())];
        all.push(("cluster.etcd_ca", ca.display().to_string()));
        if let Some(pair) = pair {
            all.push(("cluster.etcd_cert", pair.cert.display().to_string()));
            all.push(("cluster.etcd_key", pair.key.display().to_string()));
        }
        let all: Vec<(&str, &str)> = all.iter().map(|(key, it)| (*key, it.as_str())).collect();
        settings(&all)
    };
    let node = entry("decode-1", 1);
    let registration = register(with(&ours.ca, Some(&ours))?, &node).await?;
    let (_membership, mut watch) = follow(with(&ours.ca, Some(&ours))?).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));

    // Another authority is the operator's mistake, or somebody else answers there.
    check_untrusted(with(&foreign.ca, Some(&ours))?, &url).await;
    // No certificate, a stranger's certificate: nobody is told of the node.
    for settings in [with(&ours.ca, None)?, with(&ours.ca, Some(&foreign))?] {
        let (membership, _watch) = follow(settings).await?;
        assert_eq!(membership.last_known(), []);
    }
    registration.leave(DEADLINE).await;

    // A file that is no certificate is found at once, with the key that names it.
    let broken = folder.path().join("broken.pem");
    std::fs::write(&broken, "hello")?;
    let error = with(&broken, None).err().expect("it is read").to_string();
    assert!(error.contains("cluster.etcd_ca") && error.contains("broken.pem"), "{error}");
    Ok(())
}
