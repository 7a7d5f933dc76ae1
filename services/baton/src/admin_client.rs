//! The client of a router's admin API (`router.admin`).

use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use serde_json::Value;

use crate::{
    client_args::ClientArgs,
    http_client::{HttpClient, error_message, json_answer},
};

const CONNECT_MAX: Duration = Duration::from_secs(2);

#[derive(Args)]
pub struct AdminArgs {
    /// Address of the router's admin API (`router.admin`).
    #[arg(long, default_value = "http://127.0.0.1:8002", value_name = "URL")]
    admin: String,
    #[command(flatten)]
    client: ClientArgs,
}

impl AdminArgs {
    /// Returns the client. `within`: deadline of each request.
    pub(crate) fn client(&self, within: Duration) -> Result<AdminClient> {
        let address = self.admin.trim_end_matches('/').to_owned();
        Ok(AdminClient { address, http: self.client.client(CONNECT_MAX)?.within(within) })
    }
}

pub(crate) struct AdminClient {
    /// URL without a slash at the end.
    address: String,
    http: HttpClient,
}

impl AdminClient {
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Returns the JSON of a successful answer.
    pub(crate) async fn call(&self, method: &str, path: &str) -> Result<Value> {
        let (url, body) = self.body(method, path).await?;
        json_answer(&url, &body)
    }

    /// Returns URL and body of a successful answer.
    pub(crate) async fn body(&self, method: &str, path: &str) -> Result<(String, Bytes)> {
        let url = format!("{}{path}", self.address);
        let (status, body) = self.http.request(method, &url).await.with_context(|| {
            format!(
                "cannot reach the router's admin API at {}; expected the address of router.admin",
                self.address
            )
        })?;
        if !status.is_success() {
            bail!("{status}: {}", error_message(&body));
        }
        Ok((url, body))
    }
}
