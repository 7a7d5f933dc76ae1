//! Experts that a checkpoint stores in one tensor for each projection of a layer, in MXFP4. Gate
//! and up are one projection, whose rows alternate.
//!
//! A projection has the tensors `_blocks` (numbers) `[experts][rows][groups][16]`, `_scales`
//! `[experts][rows][groups]` and `_bias` `[experts][rows]`.

use kernels::mxfp4::GROUP as MXFP4_GROUP;

use super::{
    file::TensorBytes,
    stored::{StoredTensor, StoredWeights},
};
use crate::{
    config::ModelConfig,
    encoding::{E8M0_NAN, Encoding, Format},
    error::ModelError,
    matrix::Scales,
    rope::RowOrder,
    weight::{ExpertWeight, LayerWeight, Weight},
};

/// The type of blocks and scales in files.
const BYTES: &str = "U8";
/// Bytes of scales that are read and checked at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Matrices or biases of one projection of all experts of a layer.
pub(super) struct Stack {
    /// Name of the projection.
    name: String,
    is_bias: bool,
    expert: usize,
    part: ExpertWeight,
    order: RowOrder,
    /// Rows and columns of an expert's matrix in the file. Gate and up are one matrix there.
    rows: usize,
    cols: usize,
}

impl StoredWeights {
    /// Returns the stack that contains a weight; `None` if the weight has a tensor of its own.
    pub(super) fn stack_of(&self, weight: Weight, config: &ModelConfig) -> Option<Stack> {
        let Weight::Layer(layer, weight) = weight else { return None };
        let (expert, part, is_bias) = match weight {
            LayerWeight::Expert(expert, part) => (expert as usize, part, false),
            LayerWeight::ExpertBias(expert, part) => (expert as usize, part, true),
            _ => return None,
        };
        let experts = config.experts()?;
        if self.format != Format::Safetensors || !config.family.has_stacked_experts() {
            return None;
        }
        let (hidden, size) = (config.hidden_size, experts.size);
        let (name, order, rows, cols) = match part {
            ExpertWeight::Gate => ("gate_up", RowOrder::Alternate { first: 0 }, 2 * size, hidden),
            ExpertWeight::Up => ("gate_up", RowOrder::Alternate { first: 1 }, 2 * size, hidden),
            ExpertWeight::Down => ("down", RowOrder::Halves, hidden, size),
        };
        let name = format!("model.layers.{layer}.mlp.experts.{name}_proj");
        Some(Stack { name, is_bias, expert, part, order, rows, cols })
    }

    /// Returns the matrix or bias of one expert.
    pub(super) fn of_stack(
        &self,
        stack: Stack,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let count = config.experts().map_or(0, |experts| experts.count);
        let expert = stack.expert;
        let expert_of = |all| of_expert(all, expert, count);
        let (numbers, scales) = match stack.is_bias {
            true => (self.biases(&stack, count)?, None),
            false => {
                let [numbers, scales] = self.matrices(&stack, count)?;
                (numbers, Some(Scales::Mxfp4(expert_of(scales.bytes))))
            }
        };
        let (path, encoding, offset) = (numbers.path, numbers.encoding, numbers.offset);
        let name = format!("{}[{}]", numbers.name, stack.expert);
        let bytes = expert_of(numbers.bytes);
        let offset = offset + (stack.expert * bytes.len()) as u64;
        let (dims, order) = (weight.shape(config).dims(), stack.order);
        Ok(StoredTensor { path, name, offset, dims, encoding, bytes, order, scales })
    }

    /// Returns the tensors of a stack for the first weight of the stack, and no tensors for its
    /// other weights, so that a caller sees each tensor once. `None` if the weight has a tensor of
    /// its own. The stacks must have been checked.
    pub(super) fn tensors_of_stack(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Option<Vec<StoredTensor<'_>>> {
        const CHECKED: &str = "stacks are checked when opened";
        let stack = self.stack_of(weight, config)?;
        let count = config.experts()?.count;
        if stack.expert > 0 || stack.part == ExpertWeight::Up {
            return Some(Vec::new());
        }
        Some(match stack.is_bias {
            true => vec![self.biases(&stack, count).expect(CHECKED)],
            false => self.matrices(&stack, count).expect(CHECKED).into(),
        })
    }

    /// Checks the scales of all stacks.
    pub(super) fn check_stacks(&self, config: &ModelConfig) -> Result<(), ModelError> {
        let mut piece = vec![0; PIECE_BYTES];
        for weight in Weight::all(config) {
            let Some(stack) = self.stack_of(weight, config) else { continue };
            if stack.is_bias || stack.expert > 0 || stack.part == ExpertWeight::Up {
                continue;
            }
            let count = config.experts().map_or(0, |experts| experts.count);
            let [_, scales] = self.matrices(&stack, count)?;
            for begin in (0..scales.bytes.len()).step_by(PIECE_BYTES) {
                let bytes = &mut piece[..PIECE_BYTES.min(scales.bytes.len() - begin)];
                scales.bytes.read(begin, bytes);
                if let Some(at) = bytes.iter().position(|bits| *bits == E8M0_NAN) {
                    return Err(ModelError::InvalidScale {
                        path: scales.path.into(),
                        tensor: scales.name,
                        offset: scales.offset,
                        element: begin + at,
                        found: f32::NAN,
                    });
                }
            }
        }
        self.check_reads()
    }

    /// Returns the names of the tensors of all stacks.
    pub(super) fn names_of_stacks(&self, config: &ModelConfig) -> Vec<String> {
        let stacks = Weight::all(config).filter_map(|weight| self.stack_of(weight, config));
        let names = stacks.filter(|stack| stack.expert == 0).flat_map(|stack| {
            let suffixes: &[&str] =
                if stack.is_bias { &["_bias"] } else { &["_blocks", "_scales"] };
            suffixes.iter().map(move |suffix| format!("{}{suffix}", stack.name))
        });
        names.map(|name| self.name_in_files(name)).collect()
    }

    /// Returns the numbers and the scales of all experts. The dimensions of the numbers are
    /// experts, rows, and bytes of a row.
    fn matrices(&self, stack: &Stack, count: usize) -> Result<[StoredTensor<'_>; 2], ModelError> {
        let groups = stack.cols.div_ceil(MXFP4_GROUP);
        let dims = |last: &[usize]| -> Vec<u64> {
            [count, stack.rows].iter().chain(last).map(|size| *size as u64).collect()
        };
        let blocks = dims(&[groups, MXFP4_GROUP / 2]);
        let blocks = self.bytes_tensor(stack, "_blocks", Encoding::Mxfp4, blocks)?;
        if !stack.cols.is_multiple_of(MXFP4_GROUP) {
            return Err(ModelError::ConfigValue {
                path: blocks.path.into(),
                name: "width of an expert's matrix in MXFP4",
                found: stack.cols.to_string(),
                allowed: format!("a multiple of {MXFP4_GROUP}"),
            });
        }
        let blocks = StoredTensor { dims: dims(&[groups * MXFP4_GROUP / 2]), ..blocks };
        let scales = self.bytes_tensor(stack, "_scales", Encoding::F8E8m0, dims(&[groups]))?;
        Ok([blocks, scales])
    }

    /// Returns a tensor that the file declares as bytes, and whose bytes have this encoding.
    fn bytes_tensor(
        &self,
        stack: &Stack,
        suffix: &str,
        encoding: Encoding,
        expected: Vec<u64>,
    ) -> Result<StoredTensor<'_>, ModelError> {
        let name = self.name_in_files(format!("{}{suffix}", stack.name));
        self.raw_tensor(name, BYTES, encoding, expected)
    }

    /// Returns the biases of all experts.
    fn biases(&self, stack: &Stack, count: usize) -> Result<StoredTensor<'_>, ModelError> {
        let name = self.name_in_files(format!("{}_bias", stack.name));
        let expected = vec![count as u64, stack.rows as u64];
        self.float_tensor(name, &[expected])
    }
}

/// Returns the bytes of one of `count` experts.
fn of_expert(all: TensorBytes<'_>, expert: usize, count: usize) -> TensorBytes<'_> {
    let bytes = all.len() / count;
    all.part(expert * bytes..(expert + 1) * bytes)
}
