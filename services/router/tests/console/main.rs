//! The console in a real browser, over a real router with scripted nodes.

mod browser;
#[path = "../common/mod.rs"]
mod common;

use std::fs;

use browser::Page;
use common::{Cluster, long_prompt, node::MODEL, settings};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

const ANSWER: &str = " one two three";
/// Maximum size of the page in bytes, without the answers of the API.
const PAGE_BYTES_MAX: f64 = 300e3;

/// Starts a cluster that has served one request with a transfer, and opens its console.
async fn served_cluster() -> (Page, Cluster) {
    let page = Page::open();
    let cluster = Cluster::start(1, 1, ANSWER).await;
    let body = json!({"prompt": long_prompt(), "max_tokens": 20});
    let label = [("x-request-id", "<b>first</b>")];
    assert_eq!(cluster.client.post_with("/v1/completions", &label, &body).await.status, 200);
    (page, cluster)
}

fn url(cluster: &Cluster) -> String {
    format!("http://{}/", cluster.router.admin)
}

async fn console_shows_nodes_and_links_and_explains_a_request() {
    let (mut page, cluster) = served_cluster().await;
    page.go_to(&url(&cluster));
    page.wait("document.querySelectorAll('#request-rows tr').length === 1");
    let text = |page: &mut Page, id: &str| {
        let text = page.value(&format!("document.getElementById('{id}').innerText"));
        text.as_str().expect("an element has a text").to_owned()
    };
    let nodes = text(&mut page, "node-rows");
    assert!(nodes.contains("prefill-0") && nodes.contains("decode-0"), "{nodes}");
    let links = text(&mut page, "link-rows");
    assert!(links.contains("prefill-0") && links.contains("in use"), "{links}");
    // A client chooses the label: it must reach the page as text.
    assert_eq!(
        page.value("document.querySelector('#request-rows button').textContent"),
        "<b>first</b>"
    );
    page.value("document.querySelector('#request-rows button').click()");
    page.wait("!document.getElementById('explained').hidden");
    let stages = text(&mut page, "stage-rows");
    let places = ["read\t", "\ntransfer\tprefill-0 to decode-0", "\ndecode\tdecode-0"]
        .map(|words| stages.find(words));
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{stages}");
    let widths =
        "[...document.querySelectorAll('.bar')].map((bar) => bar.getBoundingClientRect().width)";
    let widths = page.value(widths);
    let widths: Vec<f64> =
        widths.as_array().unwrap().iter().map(|width| width.as_f64().unwrap()).collect();
    assert!(widths.iter().sum::<f64>() > 100.0, "{widths:?}");
    assert_eq!(page.value("document.activeElement.id"), "explained-title");

    let first_paint =
        page.value("performance.getEntriesByName('first-contentful-paint')[0].startTime");
    let size = page.value(
        "performance.getEntries().filter((it) => !it.name.includes('/v1/')) \
         .reduce((sum, it) => sum + (it.transferSize ?? 0), 0)",
    );
    println!("console: first paint after {first_paint} ms, {size} bytes");
    assert!((1.0..PAGE_BYTES_MAX).contains(&size.as_f64().unwrap()), "{size}");
    let own = url(&cluster);
    let foreign: Vec<&str> =
        page.requested_urls().into_iter().filter(|it| !it.starts_with(&own)).collect();
    assert!(foreign.is_empty() && page.requested_urls().len() >= 6, "{foreign:?}");
    assert!(page.errors().is_empty(), "{:?}", page.errors());
}

async fn keyboard_drains_and_undrains_a_node() {
    let (mut page, cluster) = served_cluster().await;
    page.go_to(&url(&cluster));
    let button = "document.querySelector('#node-rows tr td:last-child button')";
    page.wait(&format!("{button}?.textContent === 'Drain'"));
    page.value(&format!("{button}.focus()"));
    page.press("Enter");
    page.wait("document.getElementById('confirm').open");
    // The first button cancels, so that a second Enter by accident changes nothing.
    page.press("Enter");
    page.wait("!document.getElementById('confirm').open");
    cluster.wait_nodes(1, 1).await;
    page.press("Enter");
    page.wait("document.getElementById('confirm').open");
    page.press("Tab");
    page.press("Enter");
    page.wait(&format!("{button}.textContent === 'Undrain'"));
    cluster.wait_nodes(0, 1).await;
    let drain = "document.querySelector('#node-rows tr').cells[3].textContent";
    page.wait(&format!("{drain} === 'drained'"));
    assert_eq!(
        page.value("document.getElementById('state').textContent").as_str().map(str::is_empty),
        Some(false)
    );
    // Updates of the table keep the focus.
    assert_eq!(page.value(&format!("document.activeElement === {button}")), true);
    page.press("Enter");
    page.press("Tab");
    page.press("Enter");
    page.wait(&format!("{button}.textContent === 'Drain' && {drain} === '–'"));
    cluster.wait_nodes(1, 1).await;
    // The close event of a cancelled dialog arrives when the next dialog is open already.
    let cancel = "document.getElementById('confirm-no')";
    page.value(&format!("{button}.click(); {cancel}.click(); {button}.click()"));
    page.value("document.getElementById('confirm-yes').click()");
    page.wait(&format!("{button}.textContent === 'Undrain'"));
    assert!(page.errors().is_empty(), "{:?}", page.errors());
}

async fn console_keeps_the_key_of_an_operator_in_memory_only() {
    let mut page = Page::open();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("admin.toml");
    let hash = digest(&SHA256, b"key-ops");
    let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    fs::write(&path, format!("[[key]]\nname = \"ops\"\nsha256 = \"{hash}\"\n")).unwrap();
    let mut settings = settings();
    settings.router.admin_keys = Some(path);
    let cluster = Cluster::start_with(settings, 1, 1, ANSWER).await;
    page.go_to(&url(&cluster));
    page.wait("document.getElementById('key-form')?.hidden === false");
    assert_eq!(page.value("document.activeElement.id"), "key");
    let state = "document.getElementById('state').textContent";
    for (key, shown) in [("x", "does not know this key"), ("key-ops", "Read at")] {
        for letter in key.chars() {
            page.press(&letter.to_string());
        }
        page.press("Enter");
        page.wait(&format!("{state}.includes('{shown}')"));
    }
    page.wait("document.querySelectorAll('#node-rows tr').length === 2");
    let kept = "[localStorage.length, sessionStorage.length, document.cookie, location.href]";
    assert_eq!(page.value(kept), json!([0, 0, "", url(&cluster)]));
    page.call("Page.reload", json!({}));
    page.wait("document.getElementById('key-form')?.hidden === false");
    assert_eq!(page.value("document.querySelectorAll('#node-rows tr').length"), 0);
}

async fn texts_have_contrast_and_controls_have_names_in_both_colour_schemes() {
    let (mut page, cluster) = served_cluster().await;
    for scheme in ["light", "dark"] {
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        page.call("Emulation.setEmulatedMedia", features);
        page.go_to(&url(&cluster));
        page.wait("document.querySelectorAll('#request-rows tr').length === 1");
        page.value("document.querySelector('#request-rows button').click()");
        page.wait("!document.getElementById('explained').hidden");
        let report = page.value(include_str!("contrast.js"));
        assert_eq!(report["found"], json!([]), "{scheme}");
        assert!(report["checked"].as_u64() > Some(60), "{scheme}: {report}");
    }
    let levels = page.value(
        "[...document.querySelectorAll('h1, h2, h3, h4')].map((it) => Number(it.tagName[1]))",
    );
    let levels: Vec<u64> = levels.as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    assert!(levels[0] == 1 && levels.windows(2).all(|it| it[1] <= it[0] + 1), "{levels:?}");
    let models = page.value("document.getElementById('pause-model').value");
    assert_eq!(models, MODEL);
}

fn main() -> std::process::ExitCode {
    test_harness::main(
        &[],
        test_harness::multi_thread_tests![
            console_shows_nodes_and_links_and_explains_a_request,
            keyboard_drains_and_undrains_a_node,
            console_keeps_the_key_of_an_operator_in_memory_only,
            texts_have_contrast_and_controls_have_names_in_both_colour_schemes,
        ],
    )
}
