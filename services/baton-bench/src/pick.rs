//! `baton-bench pick`: time in which a router chooses the nodes of an attempt, with fixed and with
//! fluid roles, for several numbers of nodes; no network.

use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use baton::bench::stats::Percentiles;
use clap::Args;
use cluster::{
    CacheIdentity, Directory, DirectoryAction, DirectoryInput, Load, MemberChange, ModelIdentity,
    NodeAddress, NodeRequirements, PrefixKeys, RequiredCapacity, Role, Selection,
};
use config::{Disaggregate, NodePolicy, Roles};
use proto::{ids::TransferId, v1};

const MODEL: &str = "model";
const BLOCK_TOKENS: u32 = 16;
/// Picks that are not measured.
const WARM_UP: u32 = 100;

#[derive(Args)]
pub(crate) struct PickArgs {
    /// Numbers of nodes, half of them prefill nodes.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 16, 1000], value_parser = clap::value_parser!(u32).range(2..=10_000))]
    nodes: Vec<u32>,
    /// Tokens of the prompt, half of them cached on every node.
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(32..=131_072))]
    tokens: u32,
    /// Measured picks.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    picks: u32,
}

pub(crate) fn run(args: PickArgs) -> Result<()> {
    println!("time of a pick for a prompt of {} tokens, µs:", args.tokens);
    for roles in [Roles::Fixed, Roles::Fluid] {
        for &nodes in &args.nodes {
            let it = measure(&args, nodes, roles)?;
            let role = if roles == Roles::Fixed { "fixed" } else { "fluid" };
            println!("  {role} {nodes:5} nodes  p50 {:8.1}  p90 {:8.1}", it.p50, it.p90);
        }
    }
    Ok(())
}

fn measure(args: &PickArgs, nodes: u32, roles: Roles) -> Result<Percentiles> {
    let selection =
        Selection { disaggregate: Disaggregate::Auto, roles, policy: NodePolicy::Predicted };
    let mut directory = Directory::new(1, selection);
    let now = Instant::now();
    let tokens: Vec<u32> = (0..args.tokens).collect();
    let prefix = [PrefixKeys::new(CacheIdentity::of(&identity()), None, "", &tokens)];
    let cached = &prefix[0].keys()[..prefix[0].keys().len() / 2];
    for number in 0..nodes {
        join(&mut directory, now, number, cached)?;
    }
    let requirements = NodeRequirements {
        model: MODEL,
        prompt_tokens: args.tokens,
        tokens: args.tokens,
        new_tokens_max: 256,
        local_prefill: false,
        moves_from: None,
        prefix: &prefix,
        identity: None,
        any_weights: false,
        grammar_version: 0,
        sampling_version: 0,
        pooling: false,
        adapter: None,
        exclude_decode: &[],
        exclude_prefill: &[],
        capacity: RequiredCapacity::Start { headroom: false },
        waits_since: None,
    };
    let mut micros = Vec::new();
    for number in 0..WARM_UP + args.picks {
        let started = Instant::now();
        let picked = directory.pick(now, TransferId(number.into()), &requirements)?;
        let taken = started.elapsed();
        if number >= WARM_UP {
            micros.push(taken.as_secs_f64() * 1e6);
        }
        directory.release(picked.decode.assignment);
        picked.prefill.into_iter().for_each(|prefill| directory.release(prefill.assignment));
    }
    Ok(Percentiles::of(micros))
}

/// Adds a node that has `cached` blocks and some running sequences.
fn join(directory: &mut Directory, now: Instant, number: u32, cached: &[u128]) -> Result<()> {
    let role = if number.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
    let address = NodeAddress { role, grpc: format!("http://host-{number}:1") };
    let mut actions = Vec::new();
    let joined = DirectoryInput::Member(MemberChange::Joined(address));
    directory.handle(now, joined, &mut actions);
    let stream = actions.into_iter().find_map(|action| match action {
        DirectoryAction::Observe { stream, .. } => Some(stream),
        _ => None,
    });
    let stream = stream.context("the directory does not observe the node")?;
    let snapshot = v1::NodeSnapshot {
        record: Some((&record(role, number)?).into()),
        load: Some(load(number % 48)),
        cached_blocks: cached.iter().map(|key| key.to_be_bytes().to_vec().into()).collect(),
        tiers: Vec::new(),
    };
    let event = v1::observe_event::Event::Snapshot(snapshot);
    let event = v1::ObserveEvent { sequence: 0, event: Some(event) };
    let mut actions = Vec::new();
    directory.handle(now, DirectoryInput::Observed { stream, event }, &mut actions);
    let rejected = actions.into_iter().find_map(|action| match action {
        DirectoryAction::Rejected { reason, .. } => Some(reason),
        _ => None,
    });
    rejected.map_or(Ok(()), |reason| Err(anyhow!("the directory rejects the node: {reason}")))
}

fn identity() -> ModelIdentity {
    ModelIdentity {
        model_fingerprint: 1,
        weight_version: 1,
        kv_layout: "block".into(),
        block_size: BLOCK_TOKENS,
        dtype: "bf16".into(),
        tp: 1,
        protocol_min: 1,
        protocol_max: 1,
    }
}

fn record(role: Role, number: u32) -> Result<cluster::NodeRecord> {
    Ok(cluster::NodeRecord {
        node_id: cluster::NodeId::parse(&format!("node-{number}"))?,
        epoch: cluster::Epoch::from_bytes(&u128::from(number + 1).to_be_bytes())?,
        role,
        control_endpoint: "tcp://127.0.0.1:1".into(),
        model: MODEL.into(),
        identity: identity(),
        prompt_tokens_max: 131_072,
        sequence_tokens_max: 131_072,
        block_count: 28_000,
        vocabulary_size: 131_072,
        grammar_version: 0,
        cpu_fallback: None,
        peer_tag: vec![1; 32],
        pooling: false,
        sampling_version: 0,
        adapters: Vec::new(),
        both_roles: true,
        kv_windows: vec![0],
        state_blocks: 0,
    })
}

/// Returns the load of a node of an 8B model with running sequences of 1,000 tokens.
fn load(running: u32) -> Load {
    Load {
        running,
        context_tokens: u64::from(running) * 1000,
        blocks_free: 20_000,
        step_costs: Some(v1::StepCosts {
            step_tokens: 4096,
            chunk_tokens: 4096,
            itl_max_ms: 20,
            slots: 256,
            prefill: Some(v1::PrefillCosts {
                step_ps: 3_790_000_000,
                token_ps: 20_180_000,
                pair_ps: 1450,
            }),
            decode: Some(v1::DecodeCosts {
                step_ps: 5_100_000_000,
                row_ps: 4_600_000,
                context_token_ps: 42_280,
            }),
        }),
        ..Load::default()
    }
}
