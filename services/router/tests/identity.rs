//! Nodes must know the cluster secret before they get a prompt.

mod common;

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use common::{Cluster, SECRET, client::eventually, completion_of, node::MODEL, settings};
use serde_json::json;

fn begin(prefill: usize, decode: usize) -> (Vec<common::node::ScriptedNode>, Cluster) {
    let (spare, nodes) = Cluster::nodes(prefill, decode, " one two three");
    let model = router::ModelSource { name: MODEL.to_owned(), text: common::model_text() };
    (spare, Cluster::begin(settings(), vec![model], vec![], nodes))
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_another_secret_gets_no_prompt() {
    let (_, cluster) = begin(0, 2);
    let impostor = &cluster.decode[0];
    impostor.know("the secret of another cluster");
    // The router may have observed it before.
    impostor.report_with_a_gap(Default::default());
    eventually("the impostor is excluded", async || {
        cluster.client.get("/health").await.json()["decode_nodes"] == 1 && impostor.observed() > 1
    })
    .await;
    let calls = impostor.calls().len();
    for _ in 0..20 {
        let body = completion_of(&json!(MODEL), json!({}));
        assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    }
    assert_eq!((impostor.calls().len(), cluster.decode[1].calls().len()), (calls, 20));
    impostor.know(SECRET);
    cluster.wait_nodes(0, 2).await;
}

/// Relays the first connection to a node, and each later one to another address.
fn relay(first: SocketAddr, later: SocketAddr) -> (SocketAddr, Arc<Mutex<Vec<TcpStream>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let streams = Arc::<Mutex<Vec<TcpStream>>>::default();
    let kept = streams.clone();
    // Ends with the test process.
    std::thread::spawn(move || {
        for (index, client) in listener.incoming().enumerate() {
            let target = if index == 0 { first } else { later };
            let (client, server) = (client.unwrap(), TcpStream::connect(target).unwrap());
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
            }
            kept.lock().unwrap().extend([client, server]);
        }
    });
    (address, streams)
}

#[tokio::test(flavor = "multi_thread")]
async fn process_that_takes_over_an_address_gets_no_prompt() {
    let (_, nodes) = Cluster::nodes(0, 2, " one two three");
    nodes[1].know("the secret of another cluster");
    let (address, streams) = relay(nodes[0].address, nodes[1].address);
    let members =
        membership::Membership::listed([] as [&str; 0], [format!("http://{address}")]).unwrap();
    let model = router::ModelSource { name: MODEL.to_owned(), text: common::model_text() };
    let cluster = Cluster::begin_with(settings(), vec![model], members, vec![], nodes);
    cluster.wait_nodes(0, 1).await;
    let body = completion_of(&json!(MODEL), json!({}));
    assert_eq!(cluster.client.post("/v1/completions", &body).await.status, 200);
    for stream in streams.lock().unwrap().drain(..) {
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
    // Requests that arrive before and after the router has noticed the loss.
    let client = cluster.client.clone();
    let requests = tokio::spawn(async move {
        for _ in 0..5 {
            client.post("/v1/completions", &body).await;
        }
    });
    eventually("the other process is observed", async || cluster.decode[1].observed() > 0).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    requests.abort();
    assert_eq!((cluster.decode[0].calls().len(), cluster.decode[1].calls().len()), (1, 0));
}
