//! Tests that docs/configuration.md lists every setting, that the services report the metrics of
//! docs/metrics.md, and that docs/api.md names every field of the requests of OpenAI's and
//! Anthropic's clients. `make docs` writes the first two lists.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use config::Section;
use integration_tests::{
    client::Client,
    cluster::{Cluster, ClusterSpec},
    command::output,
};
use serde_json::json;

fn page(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name)
}

/// Compares the list after the comment `begin`, up to `<!-- end -->`, with the `wanted` list. If
/// BATON_WRITE_DOCS is set, writes the `wanted` list instead.
fn check_list(path: &Path, begin: &str, wanted: &str) -> Result<()> {
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    let begin = format!("<!-- {begin} -->\n");
    let (before, rest) = text.split_once(&begin).with_context(|| format!("no {begin}"))?;
    let (found, after) = rest.split_once("<!-- end -->").context("no <!-- end -->")?;
    if std::env::var_os("BATON_WRITE_DOCS").is_some() {
        fs::write(path, format!("{before}{begin}{wanted}<!-- end -->{after}"))?;
        return Ok(());
    }
    let odd = found.lines().find(|line| !wanted.contains(line));
    let missing = wanted.lines().find(|line| !found.contains(line));
    ensure!(
        found == wanted,
        "{} is out of date; run `make docs`\n\
         unexpected: {odd:?}\nmissing: {missing:?}",
        path.display()
    );
    Ok(())
}

fn settings(sections: &[Section]) -> String {
    let mut list = String::new();
    for section in sections {
        let _ = write!(list, "\n`[{}]`: {}\n\n", section.name(), section.about());
        list.push_str("| key | default | allowed | meaning |\n| --- | --- | --- | --- |\n");
        for setting in section.settings() {
            let cell = |text: &str| text.replace('|', "\\|");
            let _ = writeln!(
                list,
                "| `{}` | {} | {} | {} *{}* |",
                setting.name,
                cell(&setting.default),
                cell(&setting.allowed),
                cell(&setting.summary()),
                cell(setting.why),
            );
        }
    }
    list.push('\n');
    list
}

/// Returns type and help of each metric family in Prometheus text, by name.
fn families(text: &str) -> BTreeMap<String, (String, String)> {
    let mut families: BTreeMap<String, (String, String)> = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.splitn(4, ' ');
        let (Some("#"), Some(what), Some(name), Some(rest)) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            continue;
        };
        let family = families.entry(name.to_owned()).or_default();
        match what {
            "HELP" => family.1 = rest.to_owned(),
            _ => family.0 = rest.to_owned(),
        }
    }
    families
}

/// Returns the series of all counters in Prometheus text, without the values.
fn counters(text: &str) -> BTreeSet<&str> {
    let families = families(text);
    let series = text.lines().filter_map(|line| Some(line.rsplit_once(' ')?.0));
    let is_counter = |series: &&str| {
        let name = series.split('{').next().unwrap_or_default();
        families.get(name).is_some_and(|(kind, _)| kind == "counter")
    };
    series.filter(is_counter).collect()
}

/// Checks that a service reports the metrics of the list after the comment `begin`, with their
/// types, labels and help, and no other metrics.
fn check_reported(begin: &str, text: &str) -> Result<()> {
    let page = fs::read_to_string(page("metrics.md"))?;
    let (_, list) = page.split_once(&format!("<!-- {begin} -->\n")).context("no list")?;
    let (list, _) = list.split_once("<!-- end -->").context("no end")?;
    let rows = list.lines().filter_map(|line| {
        let [name, kind, labels, help] =
            line.strip_prefix("| `")?.strip_suffix(" |")?.splitn(4, " | ").collect::<Vec<_>>()[..]
        else {
            return None;
        };
        Some((name.strip_suffix('`')?, (kind, labels, help)))
    });
    let rows: BTreeMap<&str, (&str, &str, &str)> = rows.collect();
    ensure!(rows.len() > 20, "{rows:?}");
    let families = families(text);
    for (name, (kind, help)) in &families {
        let (listed_kind, _, listed_help) = rows
            .get(name.as_str())
            .with_context(|| format!("{name} is not in the table of metrics"))?;
        ensure!(kind == listed_kind && help == listed_help, "{name}: {kind}, {help}");
    }
    for (series, labels) in text.lines().filter_map(|line| line.split_once('{')) {
        let suffixes = ["_bucket", "_sum", "_count"];
        let family = suffixes.iter().find_map(|suffix| rows.get(series.strip_suffix(suffix)?));
        let (_, listed, _) = family.or(rows.get(series)).with_context(|| series.to_owned())?;
        // An alias has the labels of its metric, with other names.
        for label in labels.split(',').filter_map(|label| Some(label.split_once("=\"")?.0)) {
            let is_listed =
                listed.is_empty() || label == "le" || listed.contains(&format!("`{label}`"));
            ensure!(
                is_listed,
                "{series} has the label {label}, which is not in the table of metrics"
            );
        }
    }
    let elsewhere = [
        // Only routers with etcd or DNS.
        "baton_membership_connected",
        // After a weight update.
        "baton_weights_pause_seconds",
        "baton_weights_update_duration_seconds",
    ];
    let reported = |name: &str| families.contains_key(name) || elsewhere.contains(&name);
    let missing: Vec<_> = rows.keys().filter(|name| !reported(name)).collect();
    ensure!(missing.is_empty(), "{missing:?} have no value yet");
    Ok(())
}

#[test]
fn configuration_page_lists_every_setting() -> Result<()> {
    let page = page("configuration.md");
    let router = [Section::Model, Section::Router, Section::Cluster, Section::Telemetry];
    check_list(&page, "settings: model router cluster telemetry", &settings(&router))?;
    let node = [Section::Node, Section::Transfer, Section::Tier, Section::Weights];
    check_list(&page, "settings: node transfer tier weights", &settings(&node))
}

#[tokio::test(flavor = "multi_thread")]
async fn services_report_the_metrics_of_the_table() -> Result<()> {
    // Prometheus text shows a metric only after its first value. So some requests wait for a node,
    // later requests have a predicted time to first token, and others use speculative decoding or a
    // grammar.
    let spec = ClusterSpec::smollm2()
        .set("BATON_NODE_SLOTS", 1)
        .set("BATON_NODE_WAITING_MAX", 0)
        .set("BATON_NODE_SPECULATE", "ngram");
    let tier = tempfile::tempdir()?;
    let spec = spec
        .set_decode("BATON_TIER_DISK_PATH", tier.path().join("kv").display())
        .set_decode("BATON_TIER_DISK_SIZE", "16MiB");
    // SHA-256 of "key".
    let hash = "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683";
    let keys = tempfile::NamedTempFile::new()?;
    fs::write(keys.path(), format!("[[key]]\nname = \"key\"\nsha256 = \"{hash}\"\n"))?;
    let authorization = [("authorization", "Bearer key")];
    let spec = spec.set("BATON_ROUTER_KEYS", keys.path().display());
    let cluster = Cluster::start(spec).await?;
    let client = Client::new(cluster.http());
    let text = async |url: String| -> Result<String> {
        Ok(String::from_utf8(Client::new(url).get("/metrics").await?.body.to_vec())?)
    };
    let scrape = async || -> Result<[String; 2]> {
        let mut node = String::new();
        for service in cluster.prefill.iter().chain(&cluster.decode) {
            node.push_str(&text(format!("http://{}", service.ready.metrics)).await?);
        }
        Ok([text(format!("http://{}", cluster.router.ready.metrics)).await?, node])
    };
    let fresh = scrape().await?;
    let answers = (0..6).map(|index| {
        // The prompt has several blocks, so that its KV is transferred.
        let prompt = format!("{index} {}", "one two three four five six seven ".repeat(12));
        let body =
            json!({"prompt": prompt, "max_tokens": 24, "ignore_eos": true, "temperature": 0});
        let client = client.clone();
        async move {
            client.post_bytes("/v1/completions", body.to_string().into(), &authorization).await
        }
    });
    for answer in futures_util::future::try_join_all(answers).await? {
        ensure!(answer.status == 200, "{}: {}", answer.status, answer.json());
    }
    let constrained = json!({"prompt": "Yes or no?", "max_tokens": 4, "regex": "yes|no"});
    let constrained = constrained.to_string().into();
    let answer = client.post_bytes("/v1/completions", constrained, &authorization).await?;
    ensure!(answer.status == 200, "{}: {}", answer.status, answer.json());
    let used = scrape().await?;
    for (fresh, used) in fresh.iter().zip(&used) {
        let began: Vec<_> = counters(used).difference(&counters(fresh)).copied().collect();
        ensure!(began.is_empty(), "these series do not exist as 0 from the start: {began:?}");
    }
    let [router, node] = &used;
    check_reported("metrics: router", router)?;
    check_reported("metrics: node", node)?;
    cluster.stop()
}

#[test]
fn api_page_names_every_field_of_the_specifications() -> Result<()> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/api_fields.py");
    let run = output(Command::new("python3").arg(script).arg(page("api.md")))?;
    ensure!(
        run.status.success(),
        "{}(`make test` installs the clients; alone: PYTHONPATH=target/site-packages)",
        String::from_utf8_lossy(&run.stderr)
    );
    Ok(())
}
