//! Weight updates of a group, in the node process.
//!
//! The ranks prepare new weights while steps run. The orders for this go through a ring of their
//! own ([`RankedUpdate`]). The switch to new weights goes through the ring of step plans instead,
//! so all ranks switch between the same two steps. The node waits until every rank has switched.

use std::{
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use engine::executor::{
    ChunkReceiver, DeclaredTensor, Executor, ExecutorError, PrepareError, ReceivedWeights,
    TensorDigest, TensorPiece, WeightUpdate,
};
use kernels::{cuda::ChunkSource, peer::WaitLimit};
use model::Checkpoint;

use super::{
    RankGroup, SLEEP_MAX,
    failure::{RankFailure, RankName},
    watch::GroupWatch,
};
use crate::{
    codec::{self, WeightChange},
    region::GroupRegion,
    ring::{Bell, RingError, RingReader, RingWriter},
    weight_messages::{ModelFiles, WeightAnswer, WeightOrder},
};

/// Time-out for all ranks to release weights or to switch to new ones. A rank's own time-out is
/// shorter.
const CHANGE_MAX: Duration = Duration::from_secs(20);
/// Time-out for all ranks to pack weights from files: the same as at the start of a node.
const PREPARE_MAX: Duration = Duration::from_secs(1800);
/// Time-out for all ranks to map a trainer's buffers.
const MAP_MAX: Duration = Duration::from_secs(60);
/// Time-out of [`WeightOrder::End`] and [`WeightOrder::Discard`]. A rank's own time-outs are
/// shorter.
const END_MAX: Duration = Duration::from_secs(30);
/// Time that the node waits beyond a rank's own time-out, so that the rank's error arrives.
const GRACE: Duration = Duration::from_millis(200);
/// Interval of checks for cancellation while the node waits for answers.
const CANCEL_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Time of busy polling for answers before the node sleeps: the copy of a chunk takes less than a
/// millisecond.
const SPIN: Duration = Duration::from_millis(2);

/// The node's interface to weight updates on all ranks.
#[derive(Debug)]
pub(super) struct RankedUpdate {
    /// Whether new weights overwrite the weights in use.
    is_in_place: bool,
    link: Mutex<WeightsLink>,
}

/// Rings through which the node sends orders about new weights and the ranks answer them.
#[derive(Debug)]
pub(super) struct WeightsLink {
    watch: Arc<GroupWatch>,
    orders: RingWriter,
    answers: Vec<RingReader>,
    answers_bell: Bell,
    /// Time that a rank may leave orders unread.
    unread_max: Duration,
    /// Number of orders that each rank has yet to answer.
    pending: Vec<u32>,
    /// First failure that a rank has reported and `settle` has not returned yet.
    failure: Option<PrepareError>,
    /// Last answer of each rank: the received weights after [`WeightOrder::Finish`], else `None`.
    received: Vec<Option<ReceivedWeights>>,
    /// Whether a rank did not answer `End` or `Discard` in time. Its copies may still write to the
    /// memory of new weights, so all later orders fail.
    is_stuck: bool,
}

impl WeightsLink {
    pub(super) fn new(
        region: &GroupRegion,
        watch: Arc<GroupWatch>,
        ranks: usize,
        unread_max: Duration,
    ) -> Self {
        let answers = |rank| RingReader::new(region.weight_answers(rank), 0);
        Self {
            watch,
            orders: RingWriter::new(region.weight_orders()),
            answers: (0..ranks).map(answers).collect(),
            answers_bell: region.weight_answers_bell(),
            unread_max,
            pending: vec![0; ranks],
            failure: None,
            received: vec![None; ranks],
            is_stuck: false,
        }
    }

    /// Sends an order to every rank.
    fn send(&mut self, order: &WeightOrder) -> Result<(), PrepareError> {
        if self.is_stuck {
            return Err(update_error(
                "a rank did not end an earlier update; expected a restart of the node",
            ));
        }
        // Empties the rings of answers: a rank whose ring is full reads no further order.
        self.take_answers()?;
        let message = postcard::to_stdvec(order).expect("a vector takes every order");
        let watch = &self.watch;
        let written = self.orders.write(&message, self.unread_max, || watch.is_over());
        written.map_err(|error| self.fail_group(error))?;
        self.pending.iter_mut().for_each(|pending| *pending += 1);
        Ok(())
    }

    /// Waits until every rank has answered every order. Returns the first failure.
    fn settle(&mut self, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        let began = Instant::now();
        loop {
            self.take_answers()?;
            if self.pending.iter().all(|pending| *pending == 0) {
                return self.failure.take().map_or(Ok(()), Err);
            }
            if self.watch.is_over() {
                return Err(update_error("the ranks have ended"));
            }
            if (limit.cancelled)() {
                return Err(update_error("the update was cancelled"));
            }
            if Instant::now() > limit.deadline {
                return Err(update_error("a rank did not answer in time"));
            }
            match began.elapsed() < SPIN {
                true => std::thread::yield_now(),
                false => {
                    let has_news = || self.answers.iter().any(RingReader::has_news);
                    self.answers_bell.wait(CANCEL_POLL_INTERVAL, has_news);
                }
            }
        }
    }

    /// Takes the answers that have arrived, without waiting.
    fn take_answers(&mut self) -> Result<(), PrepareError> {
        let of = self.answers.len() as u32;
        for rank in 0..self.answers.len() {
            let name = RankName { rank: rank as u32, of };
            loop {
                let answer = match self.answers[rank].poll() {
                    Ok(None) => break,
                    Ok(Some(message)) => codec::decode::<WeightAnswer>(message),
                    Err(error) => return Err(self.fail_group(error)),
                };
                let is_expected = self.pending[rank] > 0;
                self.pending[rank] = self.pending[rank].saturating_sub(1);
                match answer {
                    Ok(Ok(received)) if is_expected => self.received[rank] = received,
                    Ok(Err(reason)) if is_expected => {
                        let rank = name.to_string();
                        self.failure.get_or_insert(PrepareError::Rank { rank, reason });
                    }
                    unexpected => {
                        let what = format!("{unexpected:?}");
                        self.watch.fail(name.sent(what.clone()));
                        return Err(update_error(&what));
                    }
                }
            }
        }
        Ok(())
    }

    /// Fails the group, because a ring is unusable. Returns the error of the update.
    fn fail_group(&self, error: RingError) -> PrepareError {
        let reason = error.to_string();
        self.watch.fail(RankFailure::Ring(error));
        update_error(&reason)
    }

    /// Sends an order, and waits until every rank has answered it. Returns the first failure.
    fn run(&mut self, order: &WeightOrder, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        self.send(order)?;
        self.settle(limit)
    }

    /// Sends `End` or `Discard`, and ignores failures. If a rank does not answer in time, all later
    /// orders fail.
    fn clean_up(&mut self, order: &WeightOrder) {
        let limit = WaitLimit { deadline: Instant::now() + END_MAX, cancelled: &|| false };
        // Failures of earlier orders were returned already, or no longer matter.
        let _ = self.run(order, limit);
        self.is_stuck |= self.pending.iter().any(|pending| *pending > 0);
        self.failure = None;
    }
}

fn update_error(reason: &str) -> PrepareError {
    PrepareError::Device(reason.to_owned())
}

impl RankedUpdate {
    pub(super) fn new(link: WeightsLink, is_in_place: bool) -> Arc<Self> {
        Arc::new(Self { is_in_place, link: Mutex::new(link) })
    }

    fn link(&self) -> MutexGuard<'_, WeightsLink> {
        // After a panic the link is still valid: `pending` counts an order before its answer is
        // taken.
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WeightUpdate for RankedUpdate {
    fn is_in_place(&self) -> bool {
        self.is_in_place
    }

    fn prepare(&self, path: &Path, checkpoint: &Checkpoint) -> Result<(), PrepareError> {
        let order = WeightOrder::Prepare(ModelFiles {
            path: path.as_os_str().as_encoded_bytes().to_vec(),
            format: checkpoint.load_format(),
            files: checkpoint.files(),
        });
        let limit = WaitLimit { deadline: Instant::now() + PREPARE_MAX, cancelled: &|| false };
        self.link().run(&order, limit)
    }

    fn receive(
        &self,
        tensors: &[DeclaredTensor],
        source: ChunkSource<'_>,
    ) -> Result<Box<dyn ChunkReceiver + '_>, PrepareError> {
        let ChunkSource::Mapped(buffers) = source else {
            let reason = "transport nccl is unsupported with node.tp > 1; expected ipc or disk";
            return Err(update_error(reason));
        };
        // Created before the order is sent: after an error its drop makes the ranks unmap the
        // buffers.
        let mut receiver = RankedReceiver {
            link: self.link(),
            names: tensors.iter().map(|it| it.name.clone()).collect(),
        };
        let order = WeightOrder::Receive {
            tensors: tensors.to_vec(),
            buffers: buffers.iter().map(Into::into).collect(),
        };
        let limit = WaitLimit { deadline: Instant::now() + MAP_MAX, cancelled: &|| false };
        receiver.link.run(&order, limit)?;
        Ok(Box::new(receiver))
    }

    fn discard(&self) {
        self.link().clean_up(&WeightOrder::Discard);
    }
}

/// Receiver of a trainer's chunks, of which every rank copies its part.
struct RankedReceiver<'a> {
    link: MutexGuard<'a, WeightsLink>,
    /// Names of the declared tensors.
    names: Vec<String>,
}

impl ChunkReceiver for RankedReceiver<'_> {
    /// Does nothing: ranks support mapped buffers only, which the trainer fills.
    fn fill(&mut self, _: usize, _: usize, _: WaitLimit<'_>) -> Result<(), PrepareError> {
        Ok(())
    }

    /// Sends the order only. [`wait`](ChunkReceiver::wait) waits for the ranks and returns their
    /// failures.
    fn scatter(&mut self, buffer: usize, pieces: &[TensorPiece]) -> Result<(), PrepareError> {
        self.link.send(&WeightOrder::Scatter { buffer, pieces: pieces.to_vec() })
    }

    fn wait(&mut self, buffer: usize, limit: WaitLimit<'_>) -> Result<(), PrepareError> {
        let within = limit.deadline.saturating_duration_since(Instant::now());
        let limit = WaitLimit { deadline: limit.deadline + GRACE, ..limit };
        self.link.run(&WeightOrder::Wait { buffer, within }, limit)
    }

    fn finish(&mut self, limit: WaitLimit<'_>) -> Result<ReceivedWeights, PrepareError> {
        let within = limit.deadline.saturating_duration_since(Instant::now());
        let limit = WaitLimit { deadline: limit.deadline + GRACE, ..limit };
        self.link.run(&WeightOrder::Finish { within }, limit)?;
        let parts: Option<Vec<_>> = self.link.received.iter_mut().map(Option::take).collect();
        let parts = parts.ok_or_else(|| update_error("a rank did not report what it received"))?;
        combine_parts(&parts, &self.names)
    }
}

impl Drop for RankedReceiver<'_> {
    fn drop(&mut self) {
        self.link.clean_up(&WeightOrder::End);
    }
}

/// Combines what the ranks have received. The digests of a split tensor's parts are added. The
/// digests of a tensor that every rank received whole must be equal.
fn combine_parts(
    parts: &[ReceivedWeights],
    names: &[String],
) -> Result<ReceivedWeights, PrepareError> {
    let digest = |(index, name): (usize, &String)| {
        let parts: Vec<_> =
            parts.iter().map(|part| part.digests.get(index).copied().flatten()).collect();
        let differ = || update_error(&format!("ranks received different bytes of tensor {name:?}"));
        if parts.iter().all(Option::is_none) {
            return Ok(None);
        }
        let parts: Vec<TensorDigest> =
            parts.into_iter().collect::<Option<_>>().ok_or_else(differ)?;
        let value = match parts.iter().all(|part| part.is_whole) {
            true if parts.iter().all(|part| *part == parts[0]) => parts[0].value,
            false if parts.iter().all(|part| !part.is_whole) => {
                parts.iter().fold(0, |sum: u64, part| sum.wrapping_add(part.value))
            }
            _ => return Err(differ()),
        };
        Ok(Some(TensorDigest { value, is_whole: true }))
    };
    let digests = names.iter().enumerate().map(digest).collect::<Result<_, _>>()?;
    let bytes = parts.iter().map(|part| part.bytes).max().unwrap_or(0);
    Ok(ReceivedWeights { digests, bytes })
}

impl RankGroup {
    /// Sends a change of the weights behind the plans sent so far, and waits until every rank has
    /// made the change.
    pub(super) fn change_weights(&mut self, change: WeightChange) -> Result<(), ExecutorError> {
        assert!(self.in_flight.is_empty(), "weights change between steps");
        self.check()?;
        codec::encode_weight_change(change, &mut self.history, &mut self.message);
        self.write_message()?;
        // A rank answers with the running hash of the plans and changes that it has read.
        let state = Some(self.history.state());
        let deadline = Instant::now() + CHANGE_MAX;
        loop {
            self.take_answers().map_err(|failure| self.stopped(failure))?;
            let missing = self.members.iter().position(|member| member.weights_changed != state);
            let Some(rank) = missing else { return Ok(()) };
            self.check()?;
            if Instant::now() > deadline {
                let what = format!("no change of the weights within {CHANGE_MAX:?}");
                let failure = self.name(rank).sent(what);
                return Err(self.stopped(failure));
            }
            let has_news = || {
                self.members.iter().any(|member| member.results.has_news())
                    || self.watch.has_failed()
            };
            if !(self.polls && has_news()) {
                self.results_bell.wait(SLEEP_MAX, has_news);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(digests: &[Option<(u64, bool)>], bytes: u64) -> ReceivedWeights {
        let digest =
            |it: &Option<(u64, bool)>| it.map(|(value, is_whole)| TensorDigest { value, is_whole });
        ReceivedWeights { digests: digests.iter().map(digest).collect(), bytes }
    }

    #[test]
    fn digests_of_parts_add_up_and_those_of_copies_must_be_equal() {
        let names: Vec<String> = ["up", "norm", "unused"].map(str::to_owned).into();
        let one = part(&[Some((u64::MAX, false)), Some((7, true)), None], 10);
        let two = part(&[Some((3, false)), Some((7, true)), None], 12);
        let whole = combine_parts(&[one.clone(), two.clone()], &names).unwrap();
        assert_eq!(whole, part(&[Some((2, true)), Some((7, true)), None], 12));
        for (index, other) in
            [(0, Some((3, true))), (0, None), (1, Some((8, true))), (2, Some((1, true)))]
        {
            let mut two = two.clone();
            two.digests[index] = part(&[other], 0).digests[0];
            let error = combine_parts(&[one.clone(), two], &names).unwrap_err().to_string();
            assert!(error.contains(&format!("of tensor {:?}", names[index])), "{error}");
        }
    }
}
