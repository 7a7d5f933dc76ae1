//! `baton bench engine`.
use anyhow::Result;
use clap::Args;
#[derive(Args, Clone)]
pub struct EngineArgs {}
pub fn run(_args: EngineArgs) -> Result<()> {
    Ok(())
}
