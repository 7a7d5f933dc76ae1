//! Matrices `[rows][cols]` in INT4, as GPTQ, AWQ and compressed-tensors store them. A word of 32
//! bits has eight numbers, the first in the lowest bits. `groups` is the number of groups of a row.
//!
//! GPTQ and AWQ have the tensors
//! * `qweight` (numbers): GPTQ `[cols / 8][rows]`, AWQ `[cols][rows / 8]`,
//! * `scales` `[groups][rows]`,
//! * `qzeros` (zero points) `[groups][rows / 8]`,
//! * `g_idx` (group of each column) `[cols]`: GPTQ only.
//!
//! compressed-tensors have the tensors
//! * `weight_packed` (numbers) `[rows][cols / 8]`,
//! * `weight_scale` `[rows][groups]`,
//! * `weight_zero_point` `[rows / 8][groups]`: without it, all zero points are 8,
//! * `weight_g_idx` (group of each column) `[cols]`,
//! * `weight_shape`: rows and columns.
//!
//! AWQ's words have rows in the order [`AWQ_ORDER`]. The first format of GPTQ has each word of zero
//! points less [`V1_OFFSET`], as GPTQModel writes it: the subtraction may borrow from the next
//! number.

use std::collections::HashMap;

use kernels::{
    Shard,
    int4::{self, ColumnGroups},
};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::stored::{StoredTensor, StoredWeights};
use crate::{
    config::{
        ModelConfig,
        quantization::{Int4Format, Int4Packing},
    },
    encoding::Encoding,
    error::ModelError,
    packing::packing_order,
    rope::RowOrder,
    weight::{Weight, WeightShape},
};

/// Numbers of a word.
const WORD: usize = 8;
/// The row of eight whose number is at each place of a word of AWQ, from the lowest bits on.
const AWQ_ORDER: [usize; WORD] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Constant that the first format of GPTQ subtracts from every word of zero points, modulo 2^32.
const V1_OFFSET: u32 = 0x1111_1111;
/// The zero point of symmetric numbers.
const ZERO: u8 = 8;
/// The type of words in files.
const WORDS: &str = "I32";

/// Last components of the names of a matrix's tensors.
struct Names {
    numbers: &'static str,
    scales: &'static str,
    zeros: &'static str,
    groups: &'static str,
}

impl Int4Packing {
    fn names(self) -> Names {
        match self {
            Self::Gptq { .. } | Self::Awq => {
                let (numbers, scales) = ("qweight", "scales");
                Names { numbers, scales, zeros: "qzeros", groups: "g_idx" }
            }
            Self::CompressedTensors { .. } => Names {
                numbers: "weight_packed",
                scales: "weight_scale",
                zeros: "weight_zero_point",
                groups: "weight_g_idx",
            },
        }
    }
}

/// Sizes of the matrices in INT4 of a model, or of a rank's part of them, on CPUs or on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Int4Sizes {
    /// Elements of the matrices that stay packed.
    pub packed_elements: u64,
    /// Bytes of the matrices that stay packed.
    pub packed_bytes: u64,
    /// Elements of the largest matrix that stays packed.
    pub largest_elements: u64,
    /// Number of matrices that are dequantized, because a matrix that is fused with them is not in
    /// INT4 or has other groups of columns. On GPUs also embeddings, output heads, routers, the
    /// rates of linear attention, and matrices whose groups do not fit the kernels.
    pub dequantized: usize,
}

/// The tensors of a matrix.
pub(super) struct Int4Tensors<'a> {
    format: Int4Format,
    /// Rows, columns, and groups of a row.
    size: [usize; 3],
    pub(super) order: RowOrder,
    numbers: StoredTensor<'a>,
    scales: StoredTensor<'a>,
    zeros: Option<StoredTensor<'a>>,
    groups: Option<StoredTensor<'a>>,
    /// Rows and columns, which compressed-tensors stores.
    shape: Option<StoredTensor<'a>>,
}

/// Numbers, scales and zero points of a matrix, row after row in the order of the file.
#[derive(Debug)]
pub(crate) struct Int4Matrix {
    /// `[rows][cols / 8]`.
    numbers: Vec<u32>,
    row_words: usize,
    /// `[rows][groups]`.
    scales: Vec<f32>,
    zeros: Vec<u8>,
    /// Groups of a row, of which the columns may need fewer.
    group_count: usize,
    groups: ColumnGroups,
}

impl Int4Matrix {
    pub(crate) fn groups(&self) -> &ColumnGroups {
        &self.groups
    }

    /// Returns a number.
    pub(crate) fn number(&self, row: usize, col: usize) -> u8 {
        nibble(self.numbers[row * self.row_words + col / WORD], col % WORD)
    }

    /// Returns the scales and the zero points of a row.
    pub(crate) fn groups_of(&self, row: usize) -> (&[f32], &[u8]) {
        let of_row = row * self.group_count..(row + 1) * self.group_count;
        (&self.scales[of_row.clone()], &self.zeros[of_row])
    }
}

/// Returns the number at place `at` of a word.
fn nibble(word: u32, at: usize) -> u8 {
    (word >> (4 * at)) as u8 & int4::MAX
}

impl StoredWeights {
    /// Returns the name of the module that has a weight if the files have the weight in INT4.
    fn int4_module(&self, weight: Weight, config: &ModelConfig) -> Option<(Int4Format, String)> {
        let format = self.int4?;
        let WeightShape::Matrix { .. } = weight.shape(config) else { return None };
        let name = weight.hugging_face_name(config);
        let module = name.strip_suffix("weight")?;
        let names = format.packing.names();
        // Without its numbers, a matrix with scales is incomplete.
        let names = [names.numbers, names.scales].map(|name| format!("{module}{name}"));
        let is_stored = names.into_iter().any(|name| self.has(&self.name_in_files(name)));
        is_stored.then(|| (format, module.to_owned()))
    }

    pub(super) fn is_int4(&self, weight: Weight, config: &ModelConfig) -> bool {
        self.int4_module(weight, config).is_some()
    }

    /// Returns the tensors of a matrix in INT4 after checking their shapes and types; `None` if the
    /// weight is not stored in INT4.
    pub(super) fn int4(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<Option<Int4Tensors<'_>>, ModelError> {
        let Some((format, module)) = self.int4_module(weight, config) else { return Ok(None) };
        let order = self.order_of(weight, config);
        let (rows, cols) = weight.matrix_shape(config);
        let rows = order.stored_rows(rows);
        let group_count = format.group_count(cols);
        let names = format.packing.names();
        let named = |name: &str| self.name_in_files(format!("{module}{name}"));
        let packed = |name: String, encoding: Encoding, expected: [usize; 2]| {
            self.raw_tensor(name, WORDS, encoding, expected.map(|len| len as u64).to_vec())
        };
        let (row_words, col_words) = (rows.div_ceil(WORD), cols.div_ceil(WORD));
        let (of_numbers, of_scales, of_zeros) = match format.packing {
            Int4Packing::Gptq { .. } => {
                ([col_words, rows], [group_count, rows], [group_count, row_words])
            }
            Int4Packing::Awq => ([cols, row_words], [group_count, rows], [group_count, row_words]),
            Int4Packing::CompressedTensors { .. } => {
                ([rows, col_words], [rows, group_count], [row_words, group_count])
            }
        };
        let numbers = packed(named(names.numbers), Encoding::Int4, of_numbers)?;
        if group_count > int4::GROUPS_MAX {
            let (path, found) = (numbers.path.into(), group_count.to_string());
            let (name, allowed) =
                ("number of groups in INT4", format!("up to {}", int4::GROUPS_MAX));
            return Err(ModelError::ConfigValue { path, name, found, allowed });
        }
        // Words along rows must be whole, and words along columns.
        let (has_words_of_rows, has_words_of_cols) = match format.packing {
            Int4Packing::Gptq { .. } => (true, true),
            Int4Packing::Awq => (true, false),
            Int4Packing::CompressedTensors { .. } => (false, false),
        };
        for (len, is_whole, name) in [
            (rows, has_words_of_rows, "height of a matrix in INT4"),
            (cols, has_words_of_cols, "width of a matrix in INT4"),
        ] {
            if is_whole && !len.is_multiple_of(WORD) {
                let (path, found) = (numbers.path.into(), len.to_string());
                let allowed = format!("a multiple of {WORD}");
                return Err(ModelError::ConfigValue { path, name, found, allowed });
            }
        }
        let of_scales = of_scales.map(|len| len as u64).to_vec();
        let scales = self.float_tensor(named(names.scales), &[of_scales])?;
        let zeros = match format.packing {
            Int4Packing::CompressedTensors { is_symmetric: true } => None,
            Int4Packing::Gptq { is_v1: true, .. } => {
                Some(packed(named(names.zeros), Encoding::Int4LessOne, of_zeros)?)
            }
            _ => Some(packed(named(names.zeros), Encoding::Int4, of_zeros)?),
        };
        let groups = named(names.groups);
        let is_required = matches!(format.packing, Int4Packing::Gptq { desc_act: true, .. });
        let groups = match format.packing {
            Int4Packing::Awq => None,
            _ if !is_required && !self.has(&groups) => None,
            _ => Some(self.raw_tensor(groups, WORDS, Encoding::I32, vec![cols as u64])?),
        };
        let shape = match format.packing {
            Int4Packing::CompressedTensors { .. } => {
                let name = named("weight_shape");
                let declared = self.tensors.get(&name).map(|it| &it.encoding);
                let encoding = match declared {
                    Some(Err(declared)) if declared == "I32" => Encoding::I32,
                    _ => Encoding::I64,
                };
                Some(self.raw_tensor(name, encoding.name(), encoding, vec![2])?)
            }
            _ => None,
        };
        let size = [rows, cols, group_count];
        Ok(Some(Int4Tensors { format, size, order, numbers, scales, zeros, groups, shape }))
    }

    /// Checks the tensors of all matrices in INT4, and the values of all but the numbers and zero
    /// points, of which any are valid. Keeps the groups of columns.
    pub(super) fn check_int4(&mut self, config: &ModelConfig) -> Result<(), ModelError> {
        let (mut column_groups, mut contiguous) = (HashMap::new(), HashMap::new());
        for weight in Weight::all(config) {
            let Some(tensors) = self.int4(weight, config)? else { continue };
            let checked = tensors.check();
            // A read that fails gives zeros.
            self.check_reads()?;
            let [_, cols, _] = tensors.size;
            let size = tensors.format.group_size.unwrap_or(cols);
            let contiguous =
                contiguous.entry(cols).or_insert_with(|| ColumnGroups::contiguous(cols, size));
            // Most matrices share one list.
            let groups = checked?.filter(|listed| listed != contiguous);
            column_groups.insert(weight, groups.unwrap_or_else(|| contiguous.clone()));
        }
        self.column_groups = column_groups;
        Ok(())
    }

    /// Reads a matrix in INT4, and returns the order of its rows, too; `None` if the weight is not
    /// stored in INT4.
    pub(super) fn int4_matrix(
        &self,
        weight: Weight,
        config: &ModelConfig,
    ) -> Result<Option<(Int4Matrix, RowOrder)>, ModelError> {
        let Some(tensors) = self.int4(weight, config)? else { return Ok(None) };
        let groups = self.column_groups[&weight].clone();
        Ok(Some((tensors.read(groups), tensors.order)))
    }

    /// Returns the names of the tensors of all matrices in INT4.
    pub(super) fn names_of_int4(&self, config: &ModelConfig) -> Vec<String> {
        let tensors = |weight| self.int4(weight, config).expect("matrices are checked when opened");
        let all = Weight::all(config).filter_map(tensors).flat_map(Int4Tensors::into_list);
        all.map(|tensor| tensor.name).collect()
    }

    /// Returns whether a tensor is a bias of zeros beside a matrix in INT4. Older files of GPTQ
    /// have such a bias for every matrix.
    pub(super) fn is_empty_bias(&self, name: &str) -> bool {
        let (Some(format), Some(module)) = (self.int4, name.strip_suffix("bias")) else {
            return false;
        };
        let is_zero = |bias: StoredTensor<'_>| bias.values().iter().all(|value| *value == 0.0);
        self.has(&format!("{module}{}", format.packing.names().numbers))
            && self.named(name.to_owned(), RowOrder::Halves).is_ok_and(is_zero)
    }
}

/// Returns a hash of these groups of columns; 0 without groups.
pub(super) fn layout(column_groups: &HashMap<Weight, ColumnGroups>, config: &ModelConfig) -> u64 {
    let groups = Weight::all(config).enumerate();
    let groups = groups.filter_map(|(index, weight)| Some((index, column_groups.get(&weight)?)));
    groups.fold(0, |hash, (index, groups)| {
        let columns: Vec<u8> = groups.of_columns().iter().flat_map(|it| it.to_le_bytes()).collect();
        xxh3_64_with_seed(&columns, xxh3_64_with_seed(&index.to_le_bytes(), hash))
    })
}

/// Returns the sizes of a rank's part of the matrices in INT4, which have these groups of columns.
pub(super) fn sizes(
    column_groups: &HashMap<Weight, ColumnGroups>,
    config: &ModelConfig,
    shard: Shard,
    is_gpu: bool,
) -> Int4Sizes {
    let mut sizes = Int4Sizes::default();
    if column_groups.is_empty() {
        return sizes;
    }
    for matrix in packing_order(config, shard).iter().filter(|it| !it.is_vector) {
        let groups = matrix.parts.iter().map(|part| {
            let groups = column_groups.get(&part.weight)?;
            Some(groups.part(part.cols.clone()).1)
        });
        let groups: Vec<_> = groups.collect();
        let stored = groups.iter().flatten().count();
        let rows: usize = matrix.parts.iter().map(|part| part.rows.len()).sum();
        let cols = matrix.parts[0].cols.len();
        let is_quantizable = matrix.parts.iter().all(|part| part.weight.may_be_quantized());
        let bytes = ColumnGroups::common(groups).and_then(|groups| match is_gpu {
            false => Some(int4::bytes(rows as u64, cols as u64, groups.count() as u64)),
            true => {
                let block = groups.block().filter(|_| is_quantizable)?;
                Some(int4::packed_bytes(rows, cols, block) as u64)
            }
        });
        let Some(bytes) = bytes else {
            sizes.dequantized += stored;
            continue;
        };
        let elements = matrix.elements() as u64;
        sizes.packed_elements += elements;
        sizes.packed_bytes += bytes;
        sizes.largest_elements = sizes.largest_elements.max(elements);
    }
    sizes
}

impl<'a> Int4Tensors<'a> {
    /// Returns all tensors.
    pub(super) fn into_list(self) -> impl Iterator<Item = StoredTensor<'a>> {
        let optional = [self.zeros, self.groups, self.shape].into_iter().flatten();
        [self.numbers, self.scales].into_iter().chain(optional)
    }

    /// Returns the name of the format.
    pub(super) fn format(&self) -> String {
        match self.format.group_size {
            Some(size) => format!("INT4 with a scale for each {size} of a row"),
            None => "INT4 with a scale for each row".to_owned(),
        }
    }

    /// Returns the error for an element that is infinite or NaN.
    pub(super) fn not_finite(&self, element: usize, found: f32) -> ModelError {
        self.numbers.not_finite(element, found)
    }

    /// Checks scales, groups and shape. Returns the groups of columns, if the file lists them.
    fn check(&self) -> Result<Option<ColumnGroups>, ModelError> {
        let scales = self.scales.values();
        if let Some(element) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(self.scales.not_finite(element, scales[element]));
        }
        let [rows, cols, group_count] = self.size;
        if let Some(shape) = &self.shape {
            let found = integers(shape);
            if found != [rows as i64, cols as i64] {
                return Err(shape.wrong_value(format!("{found:?}"), format!("[{rows}, {cols}]")));
            }
        }
        let Some(groups) = &self.groups else { return Ok(None) };
        let indices = words(groups);
        // compressed-tensors writes -1 for groups of neighbouring columns.
        let may_be_unset = matches!(self.format.packing, Int4Packing::CompressedTensors { .. });
        if may_be_unset && indices.iter().all(|&index| index == u32::MAX) {
            return Ok(None);
        }
        if let Some(element) = indices.iter().position(|&index| index as usize >= group_count) {
            let found = format!("group {} at element {element}", indices[element].cast_signed());
            return Err(groups.wrong_value(found, format!("0 to {}", group_count - 1)));
        }
        Ok(Some(ColumnGroups::new(indices.into_iter().map(|index| index as u16).collect())))
    }

    /// Reads the matrix, of which `groups` are the groups of columns.
    fn read(&self, groups: ColumnGroups) -> Int4Matrix {
        let [rows, cols, group_count] = self.size;
        let row_words = cols.div_ceil(WORD);
        let words_of = words(&self.numbers);
        let numbers = match self.format.packing {
            Int4Packing::Gptq { .. } => transposed(&words_of, rows),
            Int4Packing::Awq => awq_numbers(&words_of, rows, row_words),
            Int4Packing::CompressedTensors { .. } => words_of,
        };
        let zeros = self.zeros.as_ref().map(words);
        let zero = |row: usize, group: usize| {
            let Some(zeros) = &zeros else { return ZERO };
            let (word, at) = (row / WORD, row % WORD);
            match self.format.packing {
                Int4Packing::CompressedTensors { .. } => {
                    nibble(zeros[word * group_count + group], at)
                }
                Int4Packing::Gptq { is_v1, .. } => {
                    let offset = if is_v1 { V1_OFFSET } else { 0 };
                    let word = zeros[group * rows.div_ceil(WORD) + word];
                    nibble(word.wrapping_add(offset), at)
                }
                Int4Packing::Awq => {
                    // The place of the row in the word.
                    let place = AWQ_ORDER.iter().position(|&row| row == at).unwrap_or(at);
                    nibble(zeros[group * rows.div_ceil(WORD) + word], place)
                }
            }
        };
        let zeros = (0..rows).flat_map(|row| (0..group_count).map(move |group| (row, group)));
        let zeros = zeros.map(|(row, group)| zero(row, group)).collect();
        let scales = self.scales.values();
        let scales = match self.format.packing {
            Int4Packing::CompressedTensors { .. } => scales,
            Int4Packing::Gptq { .. } | Int4Packing::Awq => transposed(&scales, rows),
        };
        Int4Matrix { numbers, row_words, scales, zeros, group_count, groups }
    }
}

/// Reads the words of a tensor.
fn words(tensor: &StoredTensor<'_>) -> Vec<u32> {
    let mut bytes = vec![0; tensor.bytes.len()];
    tensor.bytes.read(0, &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// Reads the elements of a tensor of [`Encoding::I32`] or [`Encoding::I64`].
fn integers(tensor: &StoredTensor<'_>) -> Vec<i64> {
    let words = words(tensor);
    match tensor.encoding {
        Encoding::I32 => words.into_iter().map(|word| word.cast_signed().into()).collect(),
        _ => {
            let pairs = words.as_chunks().0.iter();
            pairs
                .map(|&[low, high]| (i64::from(high.cast_signed()) << 32) | i64::from(low))
                .collect()
        }
    }
}

/// Returns the transpose of a matrix of this width.
fn transposed<T: Copy + Default>(values: &[T], width: usize) -> Vec<T> {
    let height = values.len() / width.max(1);
    let mut out = vec![T::default(); values.len()];
    for (row, values) in values.chunks_exact(width.max(1)).enumerate() {
        for (col, value) in values.iter().enumerate() {
            out[col * height + row] = *value;
        }
    }
    out
}

/// Returns the numbers `[rows][row_words]` of AWQ's words `[cols][rows / 8]`.
fn awq_numbers(words: &[u32], rows: usize, row_words: usize) -> Vec<u32> {
    let stride = rows.div_ceil(WORD);
    let mut numbers = vec![0; rows * row_words];
    for (to, columns) in words.chunks(WORD * stride).enumerate() {
        for block in 0..stride {
            for (place, row) in AWQ_ORDER.into_iter().enumerate() {
                let columns = columns.iter().skip(block).step_by(stride).enumerate();
                let word = columns.fold(0, |word, (at, column)| {
                    word | u32::from(nibble(*column, place)) << (4 * at)
                });
                numbers[(block * WORD + row) * row_words + to] = word;
            }
        }
    }
    numbers
}
