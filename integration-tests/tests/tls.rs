//! TLS: clients of the router, and the services among themselves.

use std::{
    collections::BTreeMap,
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    process::Command,
};

use anyhow::{Context, Result};
use integration_tests::{
    client::{Client, greedy_body},
    cluster::{Cluster, ClusterSpec, SECRET, Service, bin_dir, smollm2},
    command,
    golden::run_named,
    up::Up,
};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};
use tempfile::TempDir;

/// A CA, and a folder with its certificate and the certificates that the CA signs.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new() -> Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("ca.crt"), issuer.pem())?;
        Ok(Self { issuer, folder })
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string()
    }

    /// Writes `NAME.crt` and `NAME.key` for a certificate with this DNS name.
    fn sign(&self, file: &str, change: impl FnOnce(&mut CertificateParams)) -> Result<()> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(["localhost".to_owned(), "baton".to_owned()])?;
        change(&mut params);
        let cert = params.signed_by(&key, &self.issuer)?;
        fs::write(self.path(&format!("{file}.crt")), cert.pem())?;
        let path = self.path(&format!("{file}.key"));
        fs::write(&path, key.serialize_pem())?;
        // Services warn of a key that every user can read.
        Ok(fs::set_permissions(path, Permissions::from_mode(0o600))?)
    }

    /// Returns the settings of a service with this certificate.
    fn of_cluster(&self, file: &str) -> [(&'static str, String); 3] {
        [
            ("BATON_CLUSTER_TLS_CERT", self.path(&format!("{file}.crt"))),
            ("BATON_CLUSTER_TLS_KEY", self.path(&format!("{file}.key"))),
            ("BATON_CLUSTER_TLS_CA", self.path("ca.crt")),
        ]
    }
}

/// Runs `baton`. Returns whether it succeeded, and its output.
fn baton(args: &[&str]) -> Result<(bool, String)> {
    let output = command::output(Command::new(bin_dir().join("baton")).args(args))?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8_lossy(&said).into_owned()))
}

#[test]
fn up_check_and_bench_serve_speak_tls() -> Result<()> {
    let authority = Authority::new()?;
    authority.sign("tls", |_| {})?;
    authority.sign("other", |_| {})?;
    let model = smollm2().display().to_string();
    let args = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--model", &model, "--sample"];
    let mut settings = BTreeMap::from(authority.of_cluster("tls").map(|(k, v)| (k.to_owned(), v)));
    settings.insert("BATON_ROUTER_TLS_CERT".into(), authority.path("tls.crt"));
    settings.insert("BATON_ROUTER_TLS_KEY".into(), authority.path("tls.key"));
    let mut up = Up::start(&args, &settings)?;
    let ready = up.lines.wait_for("baton: ready")?;
    up.lines.wait_for("baton: serving")?;
    let port_after = |name: &str| {
        let word = ready.split_whitespace().skip_while(|word| *word != name).nth(1)?;
        word.trim_end_matches("/v1").rsplit(':').next()
    };
    let http = port_after("API").context("no URL")?;
    let grpc = format!("localhost:{}", port_after("gRPC").context("no gRPC address")?);
    let (named, ip) = (format!("https://localhost:{http}"), format!("https://127.0.0.1:{http}"));
    let (ca, cert) = (authority.path("ca.crt"), authority.path("tls.crt"));
    let check =
        |url: &str, trust: &[&str]| baton(&[&["check", url, "--grpc", &grpc], trust].concat());
    for (url, trust) in [(&named, ["--ca", &ca]), (&ip, ["--server-cert", &cert])] {
        let (is_ok, said) = check(url, &trust)?;
        assert!(is_ok && said.contains("gRPC: 8 tokens"), "{said}");
    }
    let serve = ["bench", "serve", "--url", &named, "--ca", &ca];
    let load = ["--requests", "2", "--warmup", "0", "--input-tokens", "4", "--output-tokens", "2"];
    let (is_ok, said) = baton(&[&serve[..], &load].concat())?;
    assert!(is_ok, "{said}");

    let (other, key) = (authority.path("other.crt"), authority.path("tls.key"));
    for (url, trust, reason) in [
        (&named, vec![], "UnknownIssuer; expected a certificate of a trusted CA"),
        (&ip, vec!["--ca", &ca], "certificate not valid for name \"127.0.0.1\""),
        (&named, vec!["--server-cert", &other], "ApplicationVerificationFailure"),
        (&named, vec!["--ca", &key], "invalid --ca "),
        (&format!("http://localhost:{http}"), vec![], "this port speaks TLS; expected https"),
    ] {
        let (is_ok, said) = check(url, &trust)?;
        let last = said.lines().last().unwrap_or_default();
        assert!(!is_ok && last.contains(reason), "{url} {trust:?}: {said:?} lacks {reason:?}");
    }
    Ok(())
}

#[tokio::test]
async fn only_services_with_a_certificate_of_the_cluster_talk_to_each_other() -> Result<()> {
    let (ours, theirs) = (Authority::new()?, Authority::new()?);
    for (authority, file) in [(&ours, "node"), (&theirs, "node")] {
        authority.sign(file, |_| {})?;
    }
    let mut spec = ClusterSpec::smollm2();
    for (key, value) in ours.of_cluster("node") {
        spec = spec.set(key, value);
    }
    let (cluster, client) = Cluster::start_with_client(spec).await?;
    let complete = async |client: &Client, prefill_node: &str| -> Result<()> {
        let run = run_named("code");
        let answer = client.complete(&greedy_body(&run.prompt_ids, run.output_ids.len())).await?;
        assert_eq!(answer.token_ids, run.output_ids);
        assert_eq!(answer.prefill_node, prefill_node);
        Ok(())
    };
    complete(&client, &cluster.prefill[0].name).await?;

    // A renewed certificate is read without a restart, and an invalid one is named and not used.
    ours.sign("node", |_| {})?;
    for service in [&cluster.router, &cluster.prefill[0], &cluster.decode[0]] {
        service.wait_logged(&["reloaded files", "cluster.tls_cert"]).await?;
    }
    fs::write(ours.path("node.crt"), "x")?;
    cluster.decode[0]
        .wait_logged(&["invalid cluster.tls_cert", "no certificate", "stays in use"])
        .await?;
    complete(&client, &cluster.prefill[0].name).await?;
    ours.sign("node", |_| {})?;

    // Services that are no members reach nobody.
    let folder = tempfile::tempdir()?;
    let model = smollm2().display().to_string();
    let start = |name: &str, program: &str, settings: &[(&str, String)]| {
        let common = [
            ("BATON_MODEL_PATH", model.clone()),
            ("BATON_MODEL_DTYPE", "f32".into()),
            ("BATON_CLUSTER_SECRET", SECRET.into()),
            ("BATON_NODE_GRPC", "127.0.0.1:0".into()),
            ("BATON_NODE_KV_MEMORY", "64MiB".into()),
            ("BATON_ROUTER_HTTP", "127.0.0.1:0".into()),
            ("BATON_ROUTER_GRPC", "127.0.0.1:0".into()),
            ("BATON_ROUTER_ADMIN", "127.0.0.1:0".into()),
        ];
        let all = common.iter().chain(settings);
        let all = all.map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        Service::start(folder.path(), name, program, &all)
    };
    let plain = start("plain", "baton-prefill-node", &[])?;
    let stranger = start("stranger", "baton-prefill-node", &theirs.of_cluster("node"))?;
    let listed = [
        ("BATON_CLUSTER_PREFILL", format!("{},{}", plain.ready.grpc, stranger.ready.grpc)),
        ("BATON_CLUSTER_DECODE", cluster.decode[0].ready.grpc.clone()),
    ];
    let member =
        start("member", "baton-router", &[&ours.of_cluster("node")[..], &listed].concat())?;
    member.wait_logged(&[&plain.ready.grpc, "expected cluster.tls_cert on the node too"]).await?;
    member
        .wait_logged(&[&stranger.ready.grpc, "invalid peer certificate", "equal cluster.tls_ca"])
        .await?;
    let decode = &cluster.decode[0].ready.grpc;
    member.wait_logged(&[decode, "to=\"up\""]).await?;
    let client = Client::new(format!("http://{}", member.ready.http));
    complete(&client, "").await?;
    let outsider = start("outsider", "baton-router", &listed)?;
    // Its log has no reason of TLS: the node answers in HTTP/2.
    outsider.wait_logged(&[decode, "to=\"down\""]).await?;
    let foreign =
        start("foreign", "baton-router", &[&theirs.of_cluster("node")[..], &listed].concat())?;
    foreign.wait_logged(&[decode, "invalid peer certificate"]).await?;
    cluster.stop()
}

#[test]
fn invalid_certificate_of_the_cluster_is_reported_with_file_and_setting() -> Result<()> {
    let authority = Authority::new()?;
    authority.sign("node", |_| {})?;
    authority.sign("expired", |it| it.not_after = date_time_ymd(2025, 6, 10))?;
    authority.sign("unnamed", |it| it.subject_alt_names.truncate(1))?;
    fs::copy(authority.path("node.crt"), authority.path("mixed.crt"))?;
    fs::copy(authority.path("expired.key"), authority.path("mixed.key"))?;
    let model = smollm2().display().to_string();
    for (file, reason) in [
        ("missing", "cannot read cluster.tls_cert"),
        ("expired", "the certificate expired"),
        ("unnamed", "the certificate lacks the name \"baton\" of cluster.tls_name"),
        ("mixed", "the key belongs to another certificate"),
    ] {
        for program in ["baton-router", "baton-decode-node"] {
            let mut service = Command::new(bin_dir().join(program));
            service
                .env("BATON_MODEL_PATH", &model)
                .env("BATON_CLUSTER_SECRET", SECRET)
                .env("BATON_ROUTER_HTTP", "127.0.0.1:0")
                .env("BATON_NODE_GRPC", "127.0.0.1:0")
                .env("BATON_TELEMETRY_LOG_FORMAT", "pretty")
                .envs(authority.of_cluster(file));
            let output = command::output(&mut service)?;
            let said = [output.stdout, output.stderr].concat();
            let said = String::from_utf8_lossy(&said);
            assert!(!output.status.success(), "{program}: {said}");
            let path = if file == "mixed" { "mixed.key" } else { &format!("{file}.crt") };
            for words in [reason, &authority.path(path)] {
                assert!(said.contains(words), "{program}: {said:?} lacks {words:?}");
            }
            assert_eq!(said.trim().lines().count(), 1, "{program}: {said}");
        }
    }
    Ok(())
}
