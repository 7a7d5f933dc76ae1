//! `baton check`: sends one request over HTTP and one over gRPC to a running cluster, and reads its metrics.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use clap::Args;
use http::HeaderValue;
use proto::v1::{
    GenerateOptions, GenerateRequest, generate_request::Prompt, generate_response::Event,
    inference_client::InferenceClient,
};

use tonic::Request;

use crate::{http_client::HttpClient, keys::ApiKeyArgs, up::sample};

const GRPC_WITHIN: Duration = Duration::from_secs(60);
const PROMPT: &str = "The capital of France is";

#[derive(Args)]
pub struct CheckArgs {
    /// URL of a router, without the `/v1` part.
    #[arg(default_value = "http://127.0.0.1:8000")]
    url: String,
    /// Address of the same router's gRPC API.
    #[arg(long, default_value = "127.0.0.1:8001")]
    grpc: String,
    #[command(flatten)]
    key: ApiKeyArgs,
}

pub fn run(args: CheckArgs) -> Result<()> {
    let key = args.key.authorization()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(check(args.url.trim_end_matches('/'), &args.grpc, key))
}

async fn check(url: &str, grpc: &str, key: Option<HeaderValue>) -> Result<()> {
    let stats = sample::run(url, key.clone())
        .await
        .with_context(|| format!("{url}: no answer over HTTP"))?;
    let node = |role: &str| stats[format!("{role}_node")].as_str().map(str::to_owned);
    ensure!(node("decode").is_some(), "{url}: the answer names no decode node");
    ensure!(node("prefill") != node("decode"), "{url}: one node has both roles");

    let tokens = tokio::time::timeout(GRPC_WITHIN, generate(grpc, key.clone()))
        .await
        .map_err(|_| anyhow!("{grpc}: no answer over gRPC within {GRPC_WITHIN:?}"))?
        .with_context(|| format!("{grpc}: no answer over gRPC"))?;
    println!("gRPC: {tokens} tokens");

    let metrics = format!("{url}/metrics");
    let (status, body) =
        HttpClient::new(Duration::from_secs(5)).with_key(key).get(&metrics).await?;
    ensure!(status.is_success(), "{metrics}: {status}");
    let samples = String::from_utf8_lossy(&body).lines().filter(|l| !l.starts_with('#')).count();
    ensure!(samples > 0, "{metrics}: no metrics");
    println!("metrics: {samples} samples");
    Ok(())
}

/// Returns the number of tokens that the cluster generates over gRPC.
async fn generate(address: &str, key: Option<HeaderValue>) -> Result<u32> {
    let mut client = InferenceClient::connect(format!("http://{address}")).await?;
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
