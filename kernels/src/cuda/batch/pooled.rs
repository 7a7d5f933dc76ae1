//! Pooled values: hidden states and logits that a step returns with its sampled tokens.
//!
//! After the forward pass the device copies the requested values to a buffer of their own, because
//! the next step overwrites the activations. A hidden state is copied as a whole row. A logit is
//! copied with the aligned group of 8 logits that contains it.

use super::DeviceBatch;
use crate::{
    cuda::{
        backend::CudaBackend,
        batch_memory::BatchLimits,
        buffer::CudaBuffer,
        error::CudaError,
        ffi::{self, dtype_code},
        library::KernelLibrary,
    },
    layout::Dtype,
    sampling::{POOLED_LOGITS_MAX, Pooling},
};

/// Logits in a group: the shortest row that `baton_gather_rows` copies.
const GROUP: usize = 8;

/// Pooled values of a step. The device copies all hidden states, then all groups of logits.
#[derive(Debug, Default)]
pub(super) struct PooledValues {
    /// Samples whose hidden states are returned.
    hidden: Vec<u32>,
    /// Element type and width of a hidden state.
    hidden_row: Option<(Dtype, usize)>,
    /// Samples whose logits are returned, each with the position of every logit in its group.
    logits: Vec<(u32, Vec<usize>)>,
}

/// Returns the maximum bytes of the pooled values of a step.
pub(super) fn pooled_bytes(limits: &BatchLimits) -> usize {
    let hidden = limits.hidden as usize * Dtype::F32.bytes();
    let logits = POOLED_LOGITS_MAX * GROUP * Dtype::F32.bytes();
    limits.samples as usize * hidden.max(logits)
}

impl DeviceBatch {
    /// Copies the pooled values of the step's samples. Called after [`Self::sample`] and before
    /// [`Self::end`]. `hidden` and `logits` are the outputs of the step's forward pass. The forward
    /// pass must have run eagerly: a graph replay does not tell whether `hidden` lacks its norm.
    ///
    /// # Errors
    /// When the values take more bytes than a step's buffer has, or after a GPU error.
    pub fn pool(
        &mut self,
        backend: &CudaBackend,
        (hidden, logits): (&CudaBuffer, &CudaBuffer),
        pooled: &[(u32, Pooling)],
    ) -> Result<(), CudaError> {
        let samples = pooled.iter().map(|(sample, _)| *sample as usize + 1).max().unwrap_or(0);
        backend.finish_rows(samples, hidden);
        let hidden_row = Some((hidden.dtype, hidden.width));
        let mut values = PooledValues { hidden_row, ..PooledValues::default() };
        let mut groups: Vec<u32> = Vec::new();
        for (sample, pooling) in pooled {
            match pooling {
                Pooling::Hidden => values.hidden.push(*sample),
                Pooling::Logits(tokens) => {
                    let first = *sample as usize * logits.stride;
                    let indices = tokens.iter().map(|token| first + *token as usize);
                    groups.extend(indices.clone().map(|index| (index / GROUP) as u32));
                    values.logits.push((*sample, indices.map(|index| index % GROUP).collect()));
                }
            }
        }
        let hidden_bytes = values.hidden.len() * hidden.bytes(1);
        let group_bytes = groups.len() * GROUP * Dtype::F32.bytes();
        let bytes = hidden_bytes + group_bytes;
        if bytes > self.pooled.bytes() {
            let (what, allowed) = ("the bytes of pooled values", "those of a step's samples");
            return Err(CudaError::Unsupported { what, value: bytes.to_string(), allowed });
        }
        let words = [&values.hidden[..], &groups].concat();
        let (rows, count) = (values.hidden.len() as i32, groups.len() as i32);
        self.upload(backend, &words, &[], |batch, indices, library| {
            let (dtype, width) = (dtype_code(hidden.dtype), hidden.width as i32);
            let from = hidden.data.part(0, hidden.bytes(samples));
            let to = batch.pooled.part(0, hidden_bytes);
            // SAFETY: each sample is a row of the hidden states. `pooled` has space for the copies,
            // whose bytes were checked above.
            unsafe {
                launch!(
                    library,
                    backend.compute(),
                    baton_gather_rows(dtype, from, indices, to, rows, width)
                )
            }?;
            let (dtype, width) = (dtype_code(Dtype::F32), GROUP as i32);
            let from = logits.data.part(0, logits.bytes(samples));
            let to = batch.pooled.part(hidden_bytes, group_bytes);
            let groups = indices + 4 * rows as ffi::Address;
            // SAFETY: each group begins within the logits, whose memory is padded to whole groups.
            // `pooled` has space for the copies, whose bytes were checked above.
            unsafe {
                launch!(
                    library,
                    backend.compute(),
                    baton_gather_rows(dtype, from, groups, to, count, width)
                )
            }
        })?;
        self.pooled_values = Some(values);
        Ok(())
    }
}

impl PooledValues {
    /// Returns the number of bytes that the device has copied.
    pub(super) fn bytes(&self) -> usize {
        let hidden = self.hidden_row.map_or(0, |(dtype, width)| width * dtype.bytes());
        let groups: usize = self.logits.iter().map(|(_, places)| places.len()).sum();
        self.hidden.len() * hidden + groups * GROUP * Dtype::F32.bytes()
    }

    /// Decodes the copied bytes into the values of each sample.
    pub(super) fn decode(self, bytes: &[u8]) -> Vec<(u32, Box<[f32]>)> {
        let (dtype, width) = self.hidden_row.unwrap_or((Dtype::F32, 0));
        let (rows, groups) = bytes.split_at(self.hidden.len() * width * dtype.bytes());
        let mut rows = rows.chunks_exact((width * dtype.bytes()).max(1));
        let row = |sample| (sample, widened(rows.next().expect("a row for each sample"), dtype));
        let mut values: Vec<_> = self.hidden.into_iter().map(row).collect();
        let mut groups = groups.chunks_exact(GROUP * Dtype::F32.bytes());
        for (sample, places) in self.logits {
            let group = groups.by_ref().take(places.len());
            let logits = group.zip(places).map(|(group, place)| widened(group, Dtype::F32)[place]);
            values.push((sample, logits.collect()));
        }
        values
    }
}

/// Converts elements of type `dtype` to f32.
fn widened(bytes: &[u8], dtype: Dtype) -> Box<[f32]> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect(),
        Dtype::Bf16 => {
            let bits = bytes.as_chunks().0.iter().map(|bytes| u16::from_ne_bytes(*bytes));
            bits.map(|bits| f32::from_bits(u32::from(bits) << 16)).collect()
        }
    }
}
