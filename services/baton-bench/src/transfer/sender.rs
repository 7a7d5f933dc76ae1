//! The sending process. It executes the lines of its standard input. Its answers begin with
//! [`ANSWER`], because libraries write to the same output (NCCL does with `NCCL_DEBUG`).
//!
//! `node TRANSPORT BLOCKS CHUNK_BLOCKS EPOCH ENDPOINT` starts a node for this receiver; the answer
//! is `node EPOCH ENDPOINT`. `expect ID...` announces transfers; the answer is `expected`. A
//! transfer is sent as soon as it is reserved. With forward passes during the transfers, `forget`
//! (answer `forgotten`) deletes all time windows, `begin KIND` and `end KIND` (`begun`, `ended`)
//! add one, and `stats` returns the statistics of the forward passes in the windows as JSON.

use std::{
    io::{BufRead, Write, stdin, stdout},
    sync::{
        Arc,
        mpsc::{Sender, channel},
    },
    thread,
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;
use kernels::{BlockId, KvArena, sampling::SampledToken};
use kv_transfer::api::{Command, Epoch, Event, PeerAddress, TransferId};

use super::{
    ANSWER, SENDER_SEED, TIMEOUT, TransferArgs, TransferNode, TransportArg, arena,
    forward_load::{ForwardKind, ForwardLoad, Windows},
    pattern, places, pool_blocks,
};

enum SenderInput {
    Line(String),
    End,
    Event(Event),
}

pub(super) fn run(args: &TransferArgs) -> Result<()> {
    let arena = arena(args, args.gpus.first().map(String::as_str))?;
    for block in (0..pool_blocks(args)).map(BlockId) {
        arena.write(block)?.copy_from_host(&pattern(block, arena.block_bytes()))?;
    }
    let (sender, inputs) = channel();
    let lines = sender.clone();
    // The thread ends with the input.
    thread::spawn(move || {
        for line in stdin().lock().lines().map_while(Result::ok) {
            if lines.send(SenderInput::Line(line)).is_err() {
                return;
            }
        }
        let _ = lines.send(SenderInput::End);
    });
    let mut sending: Option<SenderSetup> = None;
    let mut forward_load = match (&args.forward.model, args.gpus.first()) {
        (Some(_), Some(gpu)) => Some(ForwardLoad::start(args, gpu, ForwardKind::Prefill)?),
        _ => None,
    };
    let mut windows = <[Windows; 2]>::default();
    for input in inputs {
        match input {
            SenderInput::End => break,
            SenderInput::Event(event) => {
                // Without a node the event belongs to the previous node.
                if let Some(sending) = &sending {
                    sending.on_event(event)?;
                }
            }
            SenderInput::Line(line) => {
                let words: Vec<&str> = line.split_whitespace().collect();
                let answer = match (&words[..], &sending) {
                    (["node", rest @ ..], _) => {
                        // Stops the previous node first.
                        drop(sending.take());
                        let started = SenderSetup::start(args, &arena, rest, &sender)?;
                        let PeerAddress { epoch, control_endpoint, .. } = &started.node.address;
                        let answer = format!("node {epoch} {control_endpoint}");
                        sending = Some(started);
                        answer
                    }
                    (["expect", ids @ ..], Some(sending)) => {
                        sending.expect(ids)?;
                        "expected".to_owned()
                    }
                    (["forget"], _) => {
                        windows = Default::default();
                        "forgotten".to_owned()
                    }
                    (["begin", kind], _) => {
                        of_kind(&mut windows, kind)?.begin();
                        "begun".to_owned()
                    }
                    (["end", kind], _) => {
                        of_kind(&mut windows, kind)?.end();
                        "ended".to_owned()
                    }
                    (["stats"], _) => {
                        let forward_load = forward_load.as_mut().context("--model is missing")?;
                        serde_json::to_string(&forward_load.stats(&windows)?)?
                    }
                    _ => bail!("unknown line {line:?}"),
                };
                writeln!(stdout().lock(), "{ANSWER}{answer}")?;
            }
        }
    }
    Ok(())
}

fn of_kind<'a>([quiet, busy]: &'a mut [Windows; 2], kind: &str) -> Result<&'a mut Windows> {
    match kind {
        "quiet" => Ok(quiet),
        "busy" => Ok(busy),
        _ => bail!("invalid window: {kind:?}; expected quiet or busy"),
    }
}

/// The sender's node for one setting.
struct SenderSetup {
    node: TransferNode,
    receiver: PeerAddress,
    places: Vec<Vec<BlockId>>,
}

impl SenderSetup {
    fn start(
        args: &TransferArgs,
        arena: &Arc<KvArena>,
        words: &[&str],
        inputs: &Sender<SenderInput>,
    ) -> Result<Self> {
        let [transport, blocks, chunk_blocks, epoch, endpoint] = words else {
            bail!("malformed node command: {words:?}; expected five words")
        };
        let transport = TransportArg::from_str(transport, false).map_err(anyhow::Error::msg)?;
        let receiver = PeerAddress {
            node_id: "receiver".to_owned(),
            epoch: Epoch(u128::from_str_radix(epoch, 16)?),
            control_endpoint: (*endpoint).to_owned(),
        };
        let inputs = inputs.clone();
        let sink = move |event| {
            // Fails when this process exits.
            let _ = inputs.send(SenderInput::Event(event));
        };
        let chunk_blocks = chunk_blocks.parse()?;
        let node =
            TransferNode::start(args, "sender", arena, transport.choice(), chunk_blocks, sink)?;
        let places = places(args, blocks.parse()?, SENDER_SEED);
        Ok(Self { node, receiver, places })
    }

    fn expect(&self, ids: &[&str]) -> Result<()> {
        for id in ids {
            let transfer =
                TransferId(u128::from_str_radix(id, 16).context("malformed transfer id")?);
            self.node.transfers.command(Command::Send {
                transfer,
                peer: self.receiver.clone(),
                prompt_hash: transfer.0,
                deadline: TIMEOUT,
                traceparent: String::new(),
            })?;
        }
        Ok(())
    }

    fn on_event(&self, event: Event) -> Result<()> {
        match event {
            Event::Ready { transfer, .. } => {
                let blocks = self.places[transfer.0 as usize % self.places.len()].clone();
                let transfers = &self.node.transfers;
                transfers.command(Command::Written { transfer, first_block: 0, blocks })?;
                let token = SampledToken { id: 1, logprobs: None, pooled: None };
                Ok(transfers.command(Command::Finish { transfer, first_index: 0, token })?)
            }
            // Events of the previous node, whose receiver has stopped.
            Event::Delivered { .. } | Event::SendFailed { .. } => Ok(()),
            other => bail!("unexpected event: {other:?}"),
        }
    }
}
