//! Access to etcd: users and passwords, TLS and client certificates.

use std::{collections::BTreeMap, net::TcpListener, path::Path};

use anyhow::{Context, Result};
use etcd_client::{Permission, PermissionType};
use integration_tests::{
    cluster::{SECRET, Service, smollm2},
    etcd::{Etcd, EtcdTls},
};
use membership::etcd::EtcdSettings;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use crate::{DEADLINE, PREFIX, at, entry, follow, joined, known, next, register, settings};

/// Starts an etcd with two users: `baton` may read and write below the prefix, `reader` may only
/// read.
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

pub(crate) async fn user_with_its_password_can_register_and_watch() -> Result<()> {
    let etcd = with_users(None).await?;
    let url = etcd.url();
    let node = entry("decode-1", 1);
    let registration = register(settings(&user(&url, "baton", "pass"))?, &node).await?;
    let (_membership, mut watch) = follow(settings(&user(&url, "reader", "pass"))?).await?;
    assert_eq!(next(&mut watch).await?, joined(&node));
    registration.leave(DEADLINE).await;
    Ok(())
}

pub(crate) async fn missing_or_wrong_password_is_rejected_in_one_line() -> Result<()> {
    let etcd = with_users(None).await?;
    let url = etcd.url();
    for (settings, named) in [
        (settings(&user(&url, "baton", "wrong-password"))?, "user \"baton\""),
        (settings(&user(&url, "nobody", "wrong-password"))?, "user \"nobody\""),
        (at(&url), "a client without a user name"),
    ] {
        let follower =
            follow(settings.clone()).await.map(drop).expect_err("etcd accepted the client");
        let node = register(settings, &entry("n", 1))
            .await
            .map(drop)
            .expect_err("etcd accepted the client");
        for line in [follower.to_string(), node.to_string()] {
            assert!(line.contains(named) && line.contains(&url), "{line}");
            assert!(line.contains("cluster.etcd_password"), "{line}");
            assert!(!line.contains("wrong-password") && !line.contains('\n'), "{line}");
        }
    }
    Ok(())
}

pub(crate) async fn services_with_a_wrong_password_exit_at_start() -> Result<()> {
    let etcd = with_users(None).await?;
    refused_at_start(&etcd, &[], &["refuses user \"baton\""])
}

/// Returns the settings of a service with this etcd, as environment variables.
fn variables(etcd: String) -> BTreeMap<String, String> {
    [
        ("BATON_MODEL_PATH", smollm2().display().to_string()),
        ("BATON_CLUSTER_SECRET", SECRET.to_owned()),
        ("BATON_CLUSTER_ETCD", etcd),
        ("BATON_CLUSTER_ETCD_PREFIX", PREFIX.to_owned()),
        ("BATON_CLUSTER_ETCD_USER", "baton".to_owned()),
        ("BATON_CLUSTER_ETCD_PASSWORD", "wrong-password".to_owned()),
        ("BATON_NODE_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_HTTP", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_GRPC", "127.0.0.1:0".to_owned()),
        ("BATON_ROUTER_ADMIN", "127.0.0.1:0".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}

pub(crate) async fn node_opens_its_model_before_a_silent_etcd_times_out() -> Result<()> {
    let silent = TcpListener::bind("127.0.0.1:0")?;
    let folder = tempfile::tempdir()?;
    let settings = variables(format!("http://{}", silent.local_addr()?));
    let mut node = Service::start(folder.path(), "node", "baton-decode-node", &settings)?;
    node.terminate_signal();
    assert_eq!(node.wait_end(DEADLINE)?, Some(0));
    let log = node.log();
    let at = |words: &str| log.find(words).with_context(|| format!("no {words:?} in {log}"));
    assert!(at("opened the model")? < at("etcd is unreachable")?, "{log}");
    Ok(())
}

/// Checks that router and node exit at start, with one log line that contains all `words`.
fn refused_at_start(etcd: &Etcd, settings: &[(&str, &Path)], words: &[&str]) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let mut all = variables(etcd.url());
    all.extend(settings.iter().map(|(name, it)| ((*name).to_owned(), it.display().to_string())));
    for program in ["baton-decode-node", "baton-router"] {
        let started = Service::start(folder.path(), program, program, &all);
        let said = started.err().context("the service started")?.to_string();
        assert!(said.contains("exit status: 1"), "{said}");
        let has_all = |line: &&str| words.iter().all(|word| line.contains(word));
        assert_eq!(said.lines().filter(has_all).count(), 1, "{said}");
        assert!(!said.contains("wrong-password"), "{said}");
    }
    Ok(())
}

/// Creates a CA, and a certificate signed by it for this machine. Etcd and its clients both use the
/// certificate.
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
        requires_client_cert: true,
    })
}

/// Checks that follower and node get a one-line error that names the wrong setting.
async fn check_untrusted(settings: EtcdSettings, url: &str) {
    let follower =
        follow(settings.clone()).await.map(drop).expect_err("the client trusts the server");
    let node = register(settings, &entry("n", 1))
        .await
        .map(drop)
        .expect_err("the client trusts the server");
    for line in [follower.to_string(), node.to_string()] {
        for word in [url, "is not trusted", "certificate", "check cluster.etcd_ca"] {
            assert!(line.contains(word), "{line:?} lacks {word:?}");
        }
        assert!(!line.contains('\n') && !line.contains("pass-over-tls"), "{line}");
    }
}

pub(crate) async fn ca_suffices_if_etcd_requires_no_client_certificate() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ours = EtcdTls { requires_client_cert: false, ..certificates(folder.path(), "ours")? };
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

    // A client with another CA rejects the server's certificate.
    check_untrusted(with(&foreign.ca)?, &url).await;
    let untrusted = ["is not trusted", url.as_str(), "check cluster.etcd_ca"];
    refused_at_start(&etcd, &[("BATON_CLUSTER_ETCD_CA", &foreign.ca)], &untrusted)?;
    // A client without a CA is rejected.
    let error =
        settings(&[("cluster.etcd", &url)]).err().expect("the settings are accepted").to_string();
    assert!(error.contains("cluster.etcd_ca"), "{error}");
    Ok(())
}

pub(crate) async fn passwords_are_checked_over_tls() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ours = EtcdTls { requires_client_cert: false, ..certificates(folder.path(), "ours")? };
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
    let said = follow(wrong).await.map(drop).expect_err("etcd accepted the client").to_string();
    assert!(said.contains("refuses user \"baton\"") && said.contains(&url), "{said}");
    let ca = [("BATON_CLUSTER_ETCD_CA", ours.ca.as_path())];
    refused_at_start(&etcd, &ca, &["refuses user \"baton\"", &url])?;
    // The client sends no password to a server with an untrusted certificate.
    check_untrusted(with(&foreign.ca, "baton", "pass-over-tls")?, &url).await;
    Ok(())
}

pub(crate) async fn mutual_tls_requires_that_both_sides_trust_each_other() -> Result<()> {
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

    // A client with another CA rejects the server's certificate.
    check_untrusted(with(&foreign.ca, Some(&ours))?, &url).await;
    // A client without a certificate, or with one of another CA, sees no node.
    for settings in [with(&ours.ca, None)?, with(&ours.ca, Some(&foreign))?] {
        let (membership, _watch) = follow(settings).await?;
        assert_eq!(known(&membership), []);
    }
    registration.leave(DEADLINE).await;

    // An invalid certificate file is rejected, and the error names the setting.
    let broken = folder.path().join("broken.pem");
    std::fs::write(&broken, "hello")?;
    let error = with(&broken, None).err().expect("the file is accepted").to_string();
    assert!(error.contains("cluster.etcd_ca") && error.contains("broken.pem"), "{error}");
    Ok(())
}

pub(crate) async fn replaced_certificates_are_used_by_the_next_connection() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let ours = certificates(folder.path(), "ours")?;
    let mut etcd = Etcd::start_with(Some(ours.clone()))?;
    let [ca, cert, key] = [&ours.ca, &ours.cert, &ours.key].map(|it| it.display().to_string());
    let settings = settings(&[
        ("cluster.etcd", &etcd.url()),
        ("cluster.etcd_ca", &ca),
        ("cluster.etcd_cert", &cert),
        ("cluster.etcd_key", &key),
    ])?;
    let first = entry("decode-1", 1);
    let registration = register(settings.clone(), &first).await?;
    let (_membership, mut watch) = follow(settings.clone()).await?;
    assert_eq!(next(&mut watch).await?, joined(&first));

    // The same paths get another CA with a new pair, and etcd knows only this CA.
    certificates(folder.path(), "ours")?;
    etcd.restart()?;
    // The node writes its record again, and the follower sees another node join: both have a new
    // connection.
    let found = etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    etcd.client().await?.delete(found[0].0.as_str(), None).await?;
    etcd.wait_leases(PREFIX, |keys| keys.len() == 1).await?;
    let second = entry("decode-2", 2);
    let another = register(settings, &second).await?;
    while next(&mut watch).await? != joined(&second) {}
    another.leave(DEADLINE).await;
    registration.leave(DEADLINE).await;
    Ok(())
}
