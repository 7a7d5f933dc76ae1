//! `baton top`: shows nodes, links, requests and weight updates of a router in the terminal. The
//! data are the JSON answers of `router.admin` that its console reads.

mod screen;
mod view;

use std::{
    io::{IsTerminal, stdout},
    time::{Duration, Instant},
};

use anyhow::Result;
use clap::Args;

use self::{
    screen::{Input, Screen},
    view::{Answers, View, fit, sections},
};
use crate::admin_client::{AdminArgs, AdminClient};

/// Deadline of each request.
const READ_WITHIN: Duration = Duration::from_secs(5);
/// Number of requests in an answer, the same as in the console.
const REQUESTS_MAX: usize = 50;

#[derive(Args)]
pub struct TopArgs {
    /// Seconds between two reads.
    #[arg(long, default_value_t = 2, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    interval: u32,
    /// Print one table and exit, as without a terminal.
    #[arg(long, conflicts_with = "interval")]
    once: bool,
    #[command(flatten)]
    admin: AdminArgs,
}

pub fn run(args: TopArgs) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        let client = args.admin.client(READ_WITHIN)?;
        if args.once || !stdout().is_terminal() {
            let sections = sections(&read(&client).await?);
            println!("{}", fit(&sections, usize::MAX).join("\n"));
            return Ok(());
        }
        watch(&client, Duration::from_secs(args.interval.into())).await
    });
    // The lookup of a host's name may block its thread.
    runtime.shutdown_background();
    outcome
}

/// Reads and draws until the operator quits.
async fn watch(client: &AdminClient, interval: Duration) -> Result<()> {
    let mut screen = Screen::open()?;
    let mut view = View::new(client.address(), interval);
    while let Some(answers) = screen.while_drawing(&view, read(client)).await? {
        view.update(answers, Instant::now());
        if screen.while_drawing(&view, tokio::time::sleep(interval)).await?.is_none() {
            break;
        }
    }
    Ok(())
}

/// Reads the answers at one time.
async fn read(client: &AdminClient) -> Result<Answers> {
    let requests = format!("/v1/explain?recent={REQUESTS_MAX}");
    let (nodes, requests, weights) = tokio::try_join!(
        client.call("GET", "/v1/nodes"),
        client.call("GET", &requests),
        client.call("GET", "/v1/weights"),
    )?;
    Ok(Answers { nodes, requests, weights })
}

impl Screen {
    /// Draws the view until `work` completes, and again when the terminal is resized. Returns `None`
    /// if the operator quits first.
    async fn while_drawing<T>(
        &mut self,
        view: &View,
        work: impl Future<Output = T>,
    ) -> Result<Option<T>> {
        tokio::pin!(work);
        loop {
            self.draw(|lines_max| view.lines(lines_max, Instant::now()))?;
            tokio::select! {
                outcome = &mut work => return Ok(Some(outcome)),
                input = self.input() => match input? {
                    Input::Quit => return Ok(None),
                    Input::Resized => {}
                },
            }
        }
    }
}
