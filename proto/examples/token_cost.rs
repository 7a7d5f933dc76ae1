//! Cost of the token of one call to a node, at the caller and at the node: `cargo run --release -p
//! proto --example token_cost`.

use std::time::{Instant, SystemTime};

use proto::{
    auth::{CallSigner, CallVerifier, ClusterSecret, TOKEN_KEY},
    ids::Epoch,
};
use tonic::{GrpcMethod, Request, service::Interceptor};

const ROUNDS: usize = 5;
const CALLS: usize = 100_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let secret = ClusterSecret::new("of one benchmark run")?;
    let mut signer = CallSigner::new(&secret)?.to(Epoch(7));
    let verifier = CallVerifier::new(&secret, Epoch(7));
    println!("ns a call: adding a token, checking a token");
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let mut calls = Vec::with_capacity(CALLS);
        for _ in 0..CALLS {
            let mut request = Request::new(());
            request.extensions_mut().insert(GrpcMethod::new("baton.v1.Node", "Decode"));
            calls.push(signer.call(request)?);
        }
        let added = start.elapsed().as_nanos() / CALLS as u128;
        let start = Instant::now();
        for call in &calls {
            let token = call.metadata().get_bin(TOKEN_KEY).ok_or("no token")?.to_bytes()?;
            verifier.verify(SystemTime::now(), "/baton.v1.Node/Decode", Some(&token))?;
        }
        println!("{added:6} {:6}", start.elapsed().as_nanos() / CALLS as u128);
    }
    Ok(())
}
