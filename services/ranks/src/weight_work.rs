//! A rank's part in weight updates: a thread that carries out the node's orders while steps run.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt,
    path::PathBuf,
    time::{Duration, Instant},
};

use engine::executor::{ChunkReceiver, WeightUpdate};
use kernels::{cuda::ChunkSource, peer::WaitLimit};
use model::Checkpoint;

use crate::{
    codec,
    rank::{RankError, WAIT_MAX},
    ring::{RingReader, RingWriter},
    weight_messages::{ModelFiles, WeightAnswer, WeightOrder},
};

/// Time to spin for the next order of a transfer, in which chunks take less than a millisecond.
const SPIN: Duration = Duration::from_millis(2);

/// Carries out orders until the process ends. Returns only after an error.
pub(crate) fn carry_out(
    mut orders: RingReader,
    mut answers: RingWriter,
    update: &dyn WeightUpdate,
) -> RankError {
    let mut receiver = None;
    loop {
        let turn = carry_out_next(&mut orders, &mut answers, update, &mut receiver);
        if let Err(error) = turn {
            return error;
        }
    }
}

fn carry_out_next<'a>(
    orders: &mut RingReader,
    answers: &mut RingWriter,
    update: &'a dyn WeightUpdate,
    receiver: &mut Option<Box<dyn ChunkReceiver + 'a>>,
) -> Result<(), RankError> {
    let spin = if receiver.is_some() { SPIN } else { Duration::ZERO };
    let Some(message) = orders.read(WAIT_MAX, spin)? else { return Ok(()) };
    let order = codec::decode(message)?;
    let answer = outcome(order, orders, update, receiver);
    let answer = postcard::to_stdvec(&answer).expect("a vector takes every answer");
    // No deadline: the node reads answers as long as it lives, and the rank dies with the node.
    answers.write(&answer, Duration::MAX, || false)?;
    Ok(())
}

fn outcome<'a>(
    order: WeightOrder,
    orders: &RingReader,
    update: &'a dyn WeightUpdate,
    receiver: &mut Option<Box<dyn ChunkReceiver + 'a>>,
) -> WeightAnswer {
    let is_superseded = || orders.has_news();
    let limit = |within| WaitLimit { deadline: Instant::now() + within, cancelled: &is_superseded };
    let running = "cannot copy a chunk: no transfer is open";
    match order {
        WeightOrder::Prepare(files) => prepare(files, update)?,
        WeightOrder::Receive { tensors, buffers } => {
            // The previous receiver must unmap its buffers first.
            *receiver = None;
            let buffers: Vec<_> = buffers.into_iter().map(Into::into).collect();
            let received = update.receive(&tensors, ChunkSource::Mapped(&buffers));
            *receiver = Some(received.map_err(|error| error.to_string())?);
        }
        WeightOrder::Scatter { buffer, pieces } => {
            let receiver = receiver.as_mut().ok_or(running)?;
            receiver.scatter(buffer, &pieces).map_err(|error| error.to_string())?;
        }
        WeightOrder::Wait { buffer, within } => {
            let receiver = receiver.as_mut().ok_or(running)?;
            receiver.wait(buffer, limit(within)).map_err(|error| error.to_string())?;
        }
        WeightOrder::Finish { within } => {
            let receiver = receiver.as_mut().ok_or(running)?;
            let received = receiver.finish(limit(within));
            return received.map(Some).map_err(|error| error.to_string());
        }
        WeightOrder::End => *receiver = None,
        WeightOrder::Discard => update.discard(),
    }
    Ok(None)
}

/// Packs a model.
fn prepare(files: ModelFiles, update: &dyn WeightUpdate) -> Result<(), String> {
    let path = PathBuf::from(OsString::from_vec(files.path));
    let checkpoint = Checkpoint::open(&path, files.format).map_err(|error| error.to_string())?;
    if checkpoint.files() != files.files {
        let path = path.display();
        return Err(format!(
            "cannot use the weights of {path}: the files changed while they were read"
        ));
    }
    update.prepare(&path, &checkpoint).map_err(|error| error.to_string())
}
