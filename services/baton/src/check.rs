//! `baton check`: sends one request over HTTP and one over gRPC to a running cluster, and reads its
//! metrics.

mod prefill;

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use http::{HeaderValue, Uri};
use proto::v1::{
    GenerateOptions, GenerateRequest, generate_request::Prompt, generate_response::Event,
    inference_client::InferenceClient,
};
use tonic::{Request, transport::Endpoint};
use tower::Service;

use crate::{client_args::ClientArgs, connector::Connector, http_client::HttpClient, up::sample};

const CONNECT_MAX: Duration = Duration::from_secs(5);
const GRPC_WITHIN: Duration = Duration::from_secs(60);
const PROMPT: &str = "The capital of France is";

#[derive(Args)]
pub struct CheckArgs {
    /// URL of a router, without the `/v1` part.
    #[arg(default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Address of the same router's gRPC API. TLS is used with an https:// URL, or if the address
    /// starts with https://.
    #[arg(long, default_value = "127.0.0.1:8001")]
    grpc: String,
    /// Model for which a prefill node must prefill a prompt. May be repeated. Without the flag
    /// decode nodes may prefill all prompts.
    #[arg(long, value_name = "MODEL")]
    prefill: Vec<String>,
    #[command(flatten)]
    client: ClientArgs,
}

pub fn run(args: CheckArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(check(&args))
}

async fn check(args: &CheckArgs) -> Result<()> {
    let (url, grpc) = (args.url.trim_end_matches('/'), &args.grpc);
    let (connector, key) = (args.client.connector(CONNECT_MAX)?, args.client.authorization()?);
    let client = HttpClient::new(connector.clone()).with_key(key.clone());
    let stats =
        sample::run(&client, url).await.with_context(|| format!("{url}: no answer over HTTP"))?;
    let node = |role: &str| stats[format!("{role}_node")].as_str().map(str::to_owned);
    ensure!(node("decode").is_some(), "{url}: the answer names no decode node");
    ensure!(node("prefill") != node("decode"), "{url}: one node has both roles");
    for model in &args.prefill {
        prefill::run(&client, url, model).await?;
    }

    let grpc = &grpc_url(url, grpc);
    let tokens = tokio::time::timeout(GRPC_WITHIN, generate(grpc, connector, key))
        .await
        .map_err(|_| anyhow!("{grpc}: no answer over gRPC within {GRPC_WITHIN:?}"))?
        .with_context(|| format!("{grpc}: no answer over gRPC"))?;
    println!("gRPC: {tokens} tokens");

    let metrics = format!("{url}/metrics");
    let (status, body) = client.get(&metrics).await?;
    ensure!(status.is_success(), "{metrics}: {status}");
    let samples = String::from_utf8_lossy(&body).lines().filter(|l| !l.starts_with('#')).count();
    ensure!(samples > 0, "{metrics}: no metrics");
    println!("metrics: {samples} samples");
    Ok(())
}

/// Returns the URL of an address without scheme: with the scheme of the HTTP API.
fn grpc_url(http: &str, address: &str) -> String {
    match (address.contains("://"), http.split_once("://")) {
        (false, Some((scheme, _))) => format!("{scheme}://{address}"),
        _ => address.to_owned(),
    }
}

/// Returns the number of tokens that the cluster generates over gRPC.
async fn generate(url: &str, connector: Connector, key: Option<HeaderValue>) -> Result<u32> {
    let url: Uri = url.parse().context("invalid address; expected HOST:PORT")?;
    let authority = url.authority().context("invalid address; expected HOST:PORT")?;
    // The connector adds TLS; tonic accepts https URLs only with a connector of its own.
    let endpoint = Endpoint::from_shared(format!("http://{authority}"))?.origin(url.clone());
    let mut connector = connector.for_http2();
    let connect = tower::service_fn(move |_: Uri| connector.call(url.clone()));
    let mut client = InferenceClient::new(endpoint.connect_with_connector(connect).await?);
    let options =
        GenerateOptions { max_tokens: Some(8), temperature: Some(0.0), ..Default::default() };
    let mut request = Request::new(GenerateRequest {
        prompt: Some(Prompt::Text(PROMPT.into())),
        options: Some(options),
        ..Default::default()
    });
    if let Some(key) = key {
        request.metadata_mut().insert("authorization", key.to_str()?.parse()?);
    }
    let mut stream = client.generate(request).await?.into_inner();
    while let Some(message) = stream.message().await? {
        if let Some(Event::Finished(finished)) = message.event {
            return Ok(finished.completion_tokens);
        }
    }
    Err(anyhow!("the stream ended before the answer was complete"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_address_takes_the_scheme_of_the_http_url() {
        assert_eq!(grpc_url("https://a:1", "a:2"), "https://a:2");
        assert_eq!(grpc_url("http://a:1", "a:2"), "http://a:2");
        assert_eq!(grpc_url("https://a:1", "http://a:2"), "http://a:2");
    }
}
