//! The lists of docs/metrics.md, which `make docs` writes from the table of metrics.

use std::{collections::BTreeMap, fmt::Write, fs, path::Path};

use telemetry::metrics::{MetricRow, node_rows, router_rows};

/// Returns the list of the metrics and of their aliases, by the names in the Prometheus text.
fn list(rows: &[MetricRow]) -> String {
    let mut lines = BTreeMap::new();
    for row in rows {
        let (name, kind) = (row.prometheus_name(), format!("{:?}", row.kind).to_lowercase());
        for alias in row.aliases() {
            lines.insert(alias.to_owned(), format!("{kind} |  | {} (alias of {name})", row.help));
        }
        let labels = row.labels.iter().map(|label| format!("`{}`", label.replace('.', "_")));
        let labels = labels.collect::<Vec<_>>().join(", ");
        lines.insert(name, format!("{kind} | {labels} | {}", row.help));
    }
    let mut list =
        "\n| metric | type | labels | what it is |\n| --- | --- | --- | --- |\n".to_owned();
    for (name, line) in lines {
        let _ = writeln!(list, "| `{name}` | {line} |");
    }
    list + "\n"
}

#[test]
fn metrics_page_lists_the_table_of_metrics() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
    for (service, rows) in [("router", router_rows()), ("node", node_rows())] {
        let (page, list) = (fs::read_to_string(&path).unwrap(), list(&rows));
        let begin = format!("<!-- metrics: {service} -->\n");
        let (before, rest) = page.split_once(&begin).unwrap();
        let (found, after) = rest.split_once("<!-- end -->").unwrap();
        if std::env::var_os("BATON_WRITE_DOCS").is_some() {
            fs::write(&path, format!("{before}{begin}{list}<!-- end -->{after}")).unwrap();
            continue;
        }
        let missing: Vec<_> = list.lines().filter(|line| !found.contains(line)).collect();
        assert!(found == list, "docs/metrics.md is out of date; run `make docs`\n{missing:#?}");
    }
}
