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
//! AWQ's words have rows in the order [`AWQ_ORDER`]. The first format of GPTQ stores zero points
//! minus 1.

use kernels::{
    Shard,
    int4::{self, ColumnGroups},
};

use super::stored::{StoredTensor, StoredWeights};
use crate::{
    config::{
        ModelConfig,
        quantization::{Int4Format, Int4Packing},
    },
    encoding::Encoding,
    error::ModelError,
    rope::RowOrder,
    weight::{Weight, WeightShape},
};

/// Numbers of a word.
const WORD: usize = 8;
/// The row of eight whose number is at each place of a word of AWQ, from the lowest bits on.
const AWQ_ORDER: [usize; WORD] = [0, 2, 4, 6, 1, 3, 5, 7];
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
        let (rows, cols) = weight.matrix_shape(config);
        let group_count = format.group_size.map_or(1, |size| cols.div_ceil(size));
        let names = format.packing.names();
        let named = |name: &str| self.name_in_files(format!("{module}{name}"));
        let packed = |name: String, expected: [usize; 2]| {
            self.raw_tensor(name, WORDS, Encoding::Int4, expected.map(|len| len as u64).to_vec())
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
        let numbers = packed(named(names.numbers), of_numbers)?;
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
        let scales = self.scales_tensor(named(names.scales), of_scales)?;
        let zeros = match format.packing {
            Int4Packing::CompressedTensors { is_symmetric: true } => None,
            _ => Some(packed(named(names.zeros), of_zeros)?),
        };
        let groups = named(names.groups);
        let is_required = matches!(format.packing, Int4Packing::Gptq { is_reordered: true, .. });
        let groups = match format.packing {
            Int4Packing::Awq => None,
            _ if !is_required && !self.has(&groups) => None,
            _ => Some(self.raw_tensor(groups, WORDS, Encoding::I32, vec![cols as u64])?),
        };
        let shape = match format.packing {
            Int4Packing::CompressedTensors { .. } => {
                Some(self.raw_tensor(named("weight_shape"), "I64", Encoding::I64, vec![2])?)
            }
            _ => None,
        };
        let order = self.order_of(weight, config);
        let size = [rows, cols, group_count];
        Ok(Some(Int4Tensors { format, size, order, numbers, scales, zeros, groups, shape }))
    }

    fn scales_tensor(
        &self,
        name: String,
        expected: [usize; 2],
    ) -> Result<StoredTensor<'_>, ModelError> {
        let expected = expected.map(|len| len as u64).to_vec();
        if !self.has(&name) {
            return Err(self.missing(name, expected));
        }
        let tensor = self.named(name, RowOrder::Halves)?;
        if tensor.encoding == Encoding::F8E4m3 {
            return Err(tensor.wrong_type("F32, F16 or BF16".into()));
        }
        if tensor.dims != expected {
            return Err(tensor.wrong_shape(expected));
        }
        Ok(tensor)
    }

    /// Checks the tensors of all matrices in INT4, and the values of all but the numbers and zero
    /// points, of which any are valid.
    pub(super) fn check_int4(&self, config: &ModelConfig) -> Result<(), ModelError> {
        for weight in Weight::all(config) {
            if let Some(tensors) = self.int4(weight, config)? {
                tensors.check()?;
            }
        }
        self.check_reads()
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

    /// Returns the number of elements of a rank's part of the matrices in INT4, and their bytes on
    /// CPUs.
    pub(super) fn int4_sizes(&self, config: &ModelConfig, shard: Shard) -> (u64, u64) {
        let sizes = |weight: Weight| {
            let (format, _) = self.int4_module(weight, config)?;
            let part = weight.part(config, shard);
            let (rows, cols) = (part.rows.len() as u64, part.cols.len() as u64);
            let groups = format.group_size.map_or(1, |size| cols.div_ceil(size as u64));
            Some((part.elements(), int4::bytes(rows, cols, groups)))
        };
        let all = Weight::all(config).filter_map(sizes);
        all.fold((0, 0), |(elements, bytes), (of, its)| (elements + of, bytes + its))
    }
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

    fn check(&self) -> Result<(), ModelError> {
        let scales = self.scales.values();
        if let Some(element) = scales.iter().position(|scale| !scale.is_finite()) {
            return Err(self.scales.not_finite(element, scales[element]));
        }
        let [rows, cols, group_count] = self.size;
        if let Some(groups) = &self.groups {
            let indices = words(groups);
            let bad = indices.iter().position(|&index| index as usize >= group_count);
            if let Some(element) = bad.filter(|_| !are_unset(&indices)) {
                let found =
                    format!("group {} at element {element}", indices[element].cast_signed());
                let expected = format!("0 to {}", group_count - 1);
                return Err(groups.wrong_value(found, expected));
            }
        }
        if let Some(shape) = &self.shape {
            let found = shape.values();
            if found != [rows as f32, cols as f32] {
                return Err(shape.wrong_value(format!("{found:?}"), format!("[{rows}, {cols}]")));
            }
        }
        Ok(())
    }

    /// Reads the matrix. The tensors were checked.
    pub(super) fn read(&self) -> Int4Matrix {
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
                Int4Packing::Gptq { zero_offset, .. } => {
                    let stored = nibble(zeros[group * rows.div_ceil(WORD) + word], at);
                    (stored + zero_offset) & int4::MAX
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
        let groups = self.column_groups();
        Int4Matrix { numbers, row_words, scales, zeros, group_count, groups }
    }

    fn column_groups(&self) -> ColumnGroups {
        let indices = self.groups.as_ref().map(words).filter(|indices| !are_unset(indices));
        match indices {
            Some(indices) => ColumnGroups::new(indices.iter().map(|&index| index as u16).collect()),
            None => {
                let cols = self.size[1];
                ColumnGroups::neighbours(cols, self.format.group_size.unwrap_or(cols))
            }
        }
    }
}

/// Returns whether all groups of columns are -1, which compressed-tensors writes for groups of
/// neighbouring columns.
fn are_unset(indices: &[u32]) -> bool {
    indices.iter().all(|&index| index == u32::MAX)
}

/// Reads the words of a tensor.
fn words(tensor: &StoredTensor<'_>) -> Vec<u32> {
    let mut bytes = vec![0; tensor.bytes.len()];
    tensor.bytes.read(0, &mut bytes);
    bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
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
