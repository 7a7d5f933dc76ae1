//! Weight matrices as row sources that a backend packs.

use std::{
    cell::Cell,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use kernels::{
    Dtype, RowSource,
    backend::{convert_rows, store_row},
    fp8::{self, BlockScales},
    int4::{self, ColumnGroups},
    mxfp4::GROUP as MXFP4_GROUP,
};

use crate::{
    checkpoint::{
        dummy::{RandomInt4, RandomMxfp4, RandomRows},
        file::TensorBytes,
        int4::Int4Matrix,
    },
    encoding::{self, Encoding},
    fingerprint::RowHashes,
    rope::RowOrder,
};

/// Matrix of a checkpoint, or a part of it, decoded to f32 row by row, in Hugging Face's row order.
#[derive(Clone, Debug)]
pub struct MatrixSource<'a> {
    /// Rows of the whole matrix that belong to the part.
    rows: Range<usize>,
    /// Columns of the whole matrix that belong to the part.
    cols: Range<usize>,
    /// Numbers of rows and columns of the whole matrix.
    stored_rows: usize,
    stored_cols: usize,
    data: MatrixData<'a>,
    /// Receives the hash of every stored row that is read; `None`: rows are not hashed.
    hashes: Option<&'a RowHashes>,
}

#[derive(Clone, Debug)]
pub(crate) enum MatrixData<'a> {
    Stored {
        /// `rows * row_bytes(cols)` bytes.
        bytes: TensorBytes<'a>,
        encoding: Encoding,
        order: RowOrder,
        /// Scales of the whole matrix: with [`Encoding::F8E4m3`] and [`Encoding::Mxfp4`].
        scales: Option<Scales<'a>>,
    },
    Int4 {
        matrix: Arc<Int4Matrix>,
        order: RowOrder,
    },
    Random(RandomRows),
    RandomMxfp4(RandomMxfp4),
    RandomInt4(RandomInt4),
}

/// Scales of a stored matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scales<'a> {
    Fp8(&'a BlockScales),
    /// Scales in [`Encoding::F8E8m0`] of the groups of every stored row of an MXFP4 matrix.
    Mxfp4(TensorBytes<'a>),
}

/// Bits of the greatest scale of MXFP4 ([`Encoding::F8E8m0`]) with which every number is finite in
/// f32.
const MXFP4_SCALE_MAX: u8 = 252;

thread_local! {
    /// Rows as the file stores them, while they are decoded: a buffer that is not zeroed for every
    /// read.
    static SPAN: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl<'a> MatrixSource<'a> {
    pub(crate) fn new(rows: usize, cols: usize, data: MatrixData<'a>) -> Self {
        let (stored_rows, stored_cols) = (rows, cols);
        Self { rows: 0..rows, cols: 0..cols, stored_rows, stored_cols, data, hashes: None }
    }

    /// Makes every read of a stored row add the row's hash to `hashes`, if there are `hashes`.
    pub(crate) fn hashing(self, hashes: Option<&'a RowHashes>) -> Self {
        Self { hashes, ..self }
    }

    /// Returns a part of the matrix. Of a matrix that is not in memory, only this part is read from
    /// the file.
    ///
    /// # Panics
    /// When the ranges exceed the matrix.
    pub fn part(&self, rows: Range<usize>, cols: Range<usize>) -> Self {
        let in_range = |part: &Range<usize>, len| part.start <= part.end && part.end <= len;
        assert!(in_range(&rows, self.rows.len()), "rows {rows:?} of {}", self.rows.len());
        assert!(in_range(&cols, self.cols.len()), "columns {cols:?} of {}", self.cols.len());
        let within = |whole: &Range<usize>, part: Range<usize>| {
            whole.start + part.start..whole.start + part.end
        };
        Self { rows: within(&self.rows, rows), cols: within(&self.cols, cols), ..self.clone() }
    }

    /// Returns the index of an element in the file's order.
    fn stored_element(&self, row: usize, column: usize) -> usize {
        let row = self.rows.start + row;
        let stored_row = match &self.data {
            MatrixData::Stored { order, .. } | MatrixData::Int4 { order, .. } => {
                order.stored_row(row)
            }
            MatrixData::Random(_) | MatrixData::RandomMxfp4(_) | MatrixData::RandomInt4(_) => row,
        };
        stored_row * self.stored_cols + self.cols.start + column
    }

    /// Decodes a row of this part, of which `bytes` are stored, as [`Encoding::decode_part`] does,
    /// and scales it.
    fn decode(&self, row: usize, bytes: &[u8], skipped: usize, out: &mut [f32]) {
        let MatrixData::Stored { encoding, order, scales, .. } = &self.data else {
            panic!("the rows are not those of a tensor");
        };
        encoding.decode_part(bytes, skipped, out);
        let row = order.stored_row(self.rows.start + row);
        match scales {
            None => {}
            Some(Scales::Fp8(scales)) => scales.apply(row, self.cols.start, out),
            Some(Scales::Mxfp4(scales)) => {
                let (groups, first) =
                    (self.stored_cols / MXFP4_GROUP, self.cols.start / MXFP4_GROUP);
                let mut bits = vec![0; self.cols.end.div_ceil(MXFP4_GROUP) - first];
                scales.read(row * groups + first, &mut bits);
                for (col, value) in (skipped..).zip(out) {
                    *value *= encoding::power(bits[col / MXFP4_GROUP]);
                }
            }
        }
    }

    /// Returns whether the rows of the matrix are the rows of one tensor of the file. Their hashes
    /// give the hash of the tensor.
    pub(crate) fn has_stored_rows(&self) -> bool {
        match &self.data {
            MatrixData::Stored { order: RowOrder::Part(_), .. } => false,
            MatrixData::Stored { scales, .. } => !matches!(scales, Some(Scales::Mxfp4(_))),
            MatrixData::Int4 { .. } => false,
            MatrixData::Random(_) | MatrixData::RandomMxfp4(_) | MatrixData::RandomInt4(_) => true,
        }
    }

    /// Reads stored rows and calls `each` with each row's index, with bytes that have its columns,
    /// and with the number of elements before its first column. Hashes whole rows.
    ///
    /// # Panics
    /// When the matrix is not stored.
    fn each_stored_row(&self, rows: Range<usize>, mut each: impl FnMut(usize, &[u8], usize)) {
        let MatrixData::Stored { bytes, encoding, order, .. } = &self.data else {
            panic!("the rows are not those of a tensor");
        };
        let row_bytes = bytes.len() / order.stored_rows(self.stored_rows).max(1);
        let stored_row = |row| order.stored_row(self.rows.start + row);
        if self.cols.len() < self.stored_cols && self.hashes.is_none() {
            // Other ranks have the other columns.
            let (range, skipped) = encoding.bytes_of(self.cols.clone());
            let mut part = vec![0; range.len()];
            for row in rows {
                bytes.read(stored_row(row) * row_bytes + range.start, &mut part);
                each(row, &part, skipped);
            }
            return;
        }
        // Rows that follow one another are stored in few heads, so one read gets all of them.
        let Some(begin) = rows.clone().map(stored_row).min() else { return };
        let end = rows.clone().map(stored_row).max().map_or(begin, |last| last + 1);
        let mut span = SPAN.take();
        span.resize((end - begin) * row_bytes, 0);
        bytes.read(begin * row_bytes, &mut span);
        for row in rows {
            let stored_row = stored_row(row);
            let bytes = &span[(stored_row - begin) * row_bytes..][..row_bytes];
            if let Some(hashes) = self.hashes {
                hashes.add(stored_row, bytes);
            }
            let (range, skipped) = encoding.bytes_of(self.cols.clone());
            each(row, &bytes[range], skipped);
        }
        SPAN.set(span);
    }

    /// Returns whether the columns are whole groups of MXFP4.
    fn has_whole_groups(&self) -> bool {
        [self.cols.start, self.cols.end].iter().all(|col| col.is_multiple_of(MXFP4_GROUP))
    }
}

impl RowSource for MatrixSource<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn cols(&self) -> usize {
        self.cols.len()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows.len() && out.len() == self.cols.len());
        self.read_values(row, out);
    }

    fn read_values(&self, first: usize, out: &mut [f32]) {
        let cols = self.cols.len().max(1);
        let rows = first..first + out.len() / cols;
        match &self.data {
            MatrixData::Stored { .. } => {
                self.each_stored_row(rows, |row, bytes, skipped| {
                    let out = &mut out[(row - first) * cols..][..cols];
                    self.decode(row, bytes, skipped, out);
                });
            }
            MatrixData::Int4 { matrix, order } => {
                let groups = &matrix.groups().of_columns()[self.cols.clone()];
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    let row = order.stored_row(self.rows.start + row);
                    let (scales, zeros) = matrix.groups_of(row);
                    for ((col, group), out) in self.cols.clone().zip(groups).zip(out) {
                        let (number, group) = (matrix.number(row, col), usize::from(*group));
                        *out = int4::element(number, zeros[group], scales[group]);
                    }
                }
            }
            MatrixData::Random(random) => {
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    random.read_part(self.rows.start + row, self.cols.start, out);
                }
            }
            MatrixData::RandomMxfp4(random) => {
                let (mut numbers, scale) = (vec![0; cols], encoding::power(random.scale));
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    random.rows.read_numbers(self.rows.start + row, self.cols.start, &mut numbers);
                    let values = numbers.iter().map(|&bits| encoding::fp4(bits) * scale);
                    out.iter_mut().zip(values).for_each(|(out, value)| *out = value);
                }
            }
            MatrixData::RandomInt4(random) => {
                let mut numbers = vec![0; cols];
                let groups = &random.groups.of_columns()[self.cols.clone()];
                for (row, out) in rows.zip(out.chunks_exact_mut(cols)) {
                    let row = self.rows.start + row;
                    random.rows.read_numbers(row, self.cols.start, &mut numbers);
                    for ((number, group), out) in numbers.iter().zip(groups).zip(out) {
                        let zero = RandomInt4::zero(row, usize::from(*group));
                        *out = int4::element(*number, zero, random.scale);
                    }
                }
            }
        }
    }

    /// Copies rows that are stored in the requested type, and converts other rows.
    fn read_rows(&self, first: usize, dtype: Dtype, out: &mut [u8]) {
        let MatrixData::Stored { bytes, encoding, order, .. } = &self.data else {
            return convert_rows(self, first, dtype, out);
        };
        let row_bytes = (self.cols.len() * dtype.bytes()).max(1);
        let rows = first..first + out.len() / row_bytes;
        if !encoding.is(dtype) {
            let mut values = vec![0.0; self.cols.len()];
            return self.each_stored_row(rows, |row, bytes, skipped| {
                self.decode(row, bytes, skipped, &mut values);
                store_row(&values, dtype, &mut out[(row - first) * row_bytes..][..row_bytes]);
            });
        }
        if *order == RowOrder::Halves && self.cols.len() == self.stored_cols {
            let begin = self.rows.start + first;
            bytes.read(begin * row_bytes, out);
            if let Some(hashes) = self.hashes {
                let rows = out.chunks_exact(row_bytes).enumerate();
                rows.for_each(|(row, bytes)| hashes.add(begin + row, bytes));
            }
            return;
        }
        self.each_stored_row(rows, |row, bytes, _| {
            out[(row - first) * row_bytes..][..row_bytes].copy_from_slice(&bytes[..row_bytes]);
        });
    }

    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        // The rows of other orders have no common blocks.
        let MatrixData::Stored { order: RowOrder::Halves, scales, .. } = &self.data else {
            return None;
        };
        let part =
            |scales: &BlockScales| scales.part([self.rows.start, self.cols.start], self.rows.len());
        match scales {
            Some(Scales::Fp8(scales)) => Some(vec![part(scales)]),
            Some(Scales::Mxfp4(_)) | None => None,
        }
    }

    fn read_fp8(&self, first: usize, out: &mut [u8]) {
        assert!(self.fp8_scales().is_some(), "the matrix is stored in FP8");
        let cols = self.cols.len().max(1);
        self.each_stored_row(first..first + out.len() / cols, |row, bytes, _| {
            out[(row - first) * cols..][..cols].copy_from_slice(bytes);
        });
    }

    fn mxfp4_parts(&self) -> Option<usize> {
        let is_mxfp4 = match &self.data {
            MatrixData::Stored { scales, .. } => matches!(scales, Some(Scales::Mxfp4(_))),
            MatrixData::Int4 { .. } | MatrixData::Random(_) | MatrixData::RandomInt4(_) => false,
            MatrixData::RandomMxfp4(_) => true,
        };
        (is_mxfp4 && self.has_whole_groups()).then_some(1)
    }

    fn read_mxfp4(&self, first: usize, numbers: &mut [u8], scales: &mut [u8]) {
        let groups = (self.cols.len() / MXFP4_GROUP).max(1);
        let row_bytes = groups * MXFP4_GROUP / 2;
        match &self.data {
            MatrixData::Stored { order, scales: Some(Scales::Mxfp4(stored)), .. } => {
                let (stored_groups, first_group) =
                    (self.stored_cols / MXFP4_GROUP, self.cols.start / MXFP4_GROUP);
                let rows = self.rows.start + first..;
                for (row, scales) in rows.zip(scales.chunks_exact_mut(groups)) {
                    stored.read(order.stored_row(row) * stored_groups + first_group, scales);
                }
                self.each_stored_row(first..first + numbers.len() / row_bytes, |row, bytes, _| {
                    numbers[(row - first) * row_bytes..][..row_bytes].copy_from_slice(bytes);
                });
            }
            MatrixData::RandomMxfp4(random) => {
                scales.fill(random.scale);
                let mut bits = vec![0; self.cols.len()];
                let rows = self.rows.start + first..;
                for (row, numbers) in rows.zip(numbers.chunks_exact_mut(row_bytes)) {
                    random.rows.read_numbers(row, self.cols.start, &mut bits);
                    for (byte, [low, high]) in numbers.iter_mut().zip(bits.as_chunks().0) {
                        *byte = low | high << 4;
                    }
                }
            }
            _ => panic!("the matrix is not stored in MXFP4"),
        }
    }

    fn int4_groups(&self) -> Option<ColumnGroups> {
        let groups = match &self.data {
            MatrixData::Int4 { matrix, .. } => matrix.groups(),
            MatrixData::RandomInt4(random) => &random.groups,
            _ => return None,
        };
        Some(groups.part(self.cols.clone()).1)
    }

    fn read_int4(&self, first: usize, numbers: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
        let groups = match &self.data {
            MatrixData::Int4 { matrix, .. } => matrix.groups(),
            MatrixData::RandomInt4(random) => &random.groups,
            _ => panic!("the matrix is not stored in INT4"),
        };
        let (needed, _) = groups.part(self.cols.clone());
        let groups =
            scales.chunks_exact_mut(needed.len()).zip(zeros.chunks_exact_mut(needed.len()));
        let rows = numbers.chunks_exact_mut(self.cols.len()).zip(groups);
        for (row, (numbers, (scales, zeros))) in (self.rows.start + first..).zip(rows) {
            match &self.data {
                MatrixData::Int4 { matrix, order } => {
                    let row = order.stored_row(row);
                    let (of_scales, of_zeros) = matrix.groups_of(row);
                    scales.copy_from_slice(&of_scales[needed.clone()]);
                    zeros.copy_from_slice(&of_zeros[needed.clone()]);
                    for (col, number) in self.cols.clone().zip(numbers) {
                        *number = matrix.number(row, col);
                    }
                }
                MatrixData::RandomInt4(random) => {
                    random.rows.read_numbers(row, self.cols.start, numbers);
                    scales.fill(random.scale);
                    for (group, zero) in needed.clone().zip(zeros) {
                        *zero = RandomInt4::zero(row, group);
                    }
                }
                _ => unreachable!("the groups are those of a matrix in INT4"),
            }
        }
    }
}

/// Matrices of equal width stacked by rows: Q, K and V; gate and up. Records the lowest row with a
/// non-finite element, because a backend that packs the rows cannot return an error.
pub(crate) struct StackedRows<'a> {
    parts: Vec<MatrixSource<'a>>,
    may_be_quantized: bool,
    first_bad: AtomicUsize,
}

/// Position and value of a non-finite element.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct NotFinite {
    /// Index of the matrix in the stack.
    pub part: usize,
    /// Index of the element in the file's order.
    pub element: usize,
    pub found: f32,
}

impl<'a> StackedRows<'a> {
    /// Stacks the parts.
    ///
    /// # Panics
    /// When there are no parts, or their widths differ; a model's validated shapes exclude both.
    pub(crate) fn new(parts: Vec<MatrixSource<'a>>) -> Self {
        assert!(!parts.is_empty() && parts.iter().all(|part| part.cols() == parts[0].cols()));
        Self { parts, may_be_quantized: false, first_bad: AtomicUsize::new(usize::MAX) }
    }

    /// Sets [`RowSource::may_be_quantized`].
    pub(crate) fn quantizable(self, may_be_quantized: bool) -> Self {
        Self { may_be_quantized, ..self }
    }

    /// Returns the index of the part that has `row`, and the row's index in this part.
    fn locate(&self, mut row: usize) -> Option<(usize, usize)> {
        for (index, part) in self.parts.iter().enumerate() {
            if row < part.rows() {
                return Some((index, row));
            }
            row -= part.rows();
        }
        None
    }

    /// Divides `out`, the rows from `first` on with `row_len` elements each, between the parts.
    /// Calls `read` for each with the index of its first row.
    fn split<T>(
        &self,
        mut first: usize,
        row_len: usize,
        mut out: &mut [T],
        read: impl Fn(&MatrixSource<'a>, usize, &mut [T]),
    ) {
        for part in &self.parts {
            if first < part.rows() {
                let rows = (part.rows() - first).min(out.len() / row_len.max(1));
                let (here, after) = out.split_at_mut(rows * row_len);
                read(part, first, here);
                (first, out) = (part.rows(), after);
            }
            first -= part.rows();
        }
        assert!(out.is_empty(), "rows past the last of {}", self.rows());
    }

    /// Returns the first non-finite element found so far.
    pub(crate) fn not_finite(&self) -> Option<NotFinite> {
        let (part, row) = self.locate(self.first_bad.load(Ordering::Relaxed))?;
        let matrix = &self.parts[part];
        let mut values = vec![0.0; matrix.cols()];
        matrix.read_row(row, &mut values);
        let column = values.iter().position(|value| !value.is_finite())?;
        let element = matrix.stored_element(row, column);
        Some(NotFinite { part, element, found: values[column] })
    }
}

impl RowSource for StackedRows<'_> {
    fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows()).sum()
    }

    fn cols(&self) -> usize {
        self.parts[0].cols()
    }

    fn read_row(&self, row: usize, out: &mut [f32]) {
        self.read_values(row, out);
    }

    fn read_values(&self, first: usize, out: &mut [f32]) {
        let cols = self.cols();
        self.split(first, cols, out, |part, first, out| part.read_values(first, out));
        for (row, values) in out.chunks_exact(cols.max(1)).enumerate() {
            // Without a branch per element, so that the check is negligible compared with the
            // decoding.
            let all_finite = values.iter().fold(true, |finite, value| finite & value.is_finite());
            if !all_finite {
                self.first_bad.fetch_min(first + row, Ordering::Relaxed);
            }
        }
    }

    fn read_rows(&self, first: usize, dtype: Dtype, out: &mut [u8]) {
        let row_bytes = self.cols() * dtype.bytes();
        if out.is_empty() || row_bytes == 0 {
            return;
        }
        self.split(first, row_bytes, out, |part, first, out| part.read_rows(first, dtype, out));
        if !are_finite(dtype, out) {
            // Checks the stored values: a finite f32 may be outside bf16's range.
            let mut values = vec![0.0; self.cols()];
            let rows = out.len() / row_bytes;
            (first..first + rows).for_each(|row| self.read_row(row, &mut values));
        }
    }

    fn may_be_quantized(&self) -> bool {
        self.may_be_quantized
    }

    fn fp8_scales(&self) -> Option<Vec<BlockScales>> {
        let scales: Option<Vec<_>> = self.parts.iter().map(MatrixSource::fp8_scales).collect();
        Some(scales?.into_iter().flatten().collect())
    }

    fn read_fp8(&self, first: usize, out: &mut [u8]) {
        let cols = self.cols().max(1);
        self.split(first, cols, out, |part, first, out| part.read_fp8(first, out));
        for (row, numbers) in out.chunks_exact(cols).enumerate() {
            if numbers.iter().fold(false, |found, &bits| found | fp8::is_nan(bits)) {
                self.first_bad.fetch_min(first + row, Ordering::Relaxed);
            }
        }
    }

    fn mxfp4_parts(&self) -> Option<usize> {
        let is_equal = |part: &MatrixSource<'_>| {
            part.mxfp4_parts().is_some() && part.rows() == self.parts[0].rows()
        };
        self.parts.iter().all(is_equal).then_some(self.parts.len())
    }

    fn read_mxfp4(&self, first: usize, numbers: &mut [u8], scales: &mut [u8]) {
        let Some((part, row)) = self.locate(first) else { return };
        self.parts[part].read_mxfp4(row, numbers, scales);
        let groups = (self.cols() / MXFP4_GROUP).max(1);
        let mut values = vec![0.0; self.cols()];
        for (row, scales) in (first..).zip(scales.chunks_exact(groups)) {
            // With a greater scale, the greatest number exceeds f32.
            if scales.iter().any(|&bits| bits > MXFP4_SCALE_MAX) {
                self.read_row(row, &mut values);
            }
        }
    }

    fn int4_groups(&self) -> Option<ColumnGroups> {
        ColumnGroups::common(self.parts.iter().map(MatrixSource::int4_groups))
    }

    fn read_int4(&self, first: usize, numbers: &mut [u8], scales: &mut [f32], zeros: &mut [u8]) {
        let (cols, groups) = (self.cols(), scales.len() * self.cols() / numbers.len().max(1));
        for row in 0..numbers.len() / cols.max(1) {
            let Some((part, in_part)) = self.locate(first + row) else { return };
            let of_groups = row * groups..(row + 1) * groups;
            let (numbers, scales) =
                (&mut numbers[row * cols..][..cols], &mut scales[of_groups.clone()]);
            self.parts[part].read_int4(in_part, numbers, scales, &mut zeros[of_groups]);
            // The greatest number with this scale must be finite.
            if scales.iter().any(|scale| !(scale * f32::from(int4::MAX)).is_finite()) {
                self.read_row(first + row, &mut vec![0.0; cols]);
            }
        }
    }
}

/// Returns whether all elements are finite: a non-finite float has all exponent bits set. Without
/// branches, so that the check is negligible compared with the copying.
fn are_finite(dtype: Dtype, elements: &[u8]) -> bool {
    match dtype {
        Dtype::Bf16 => {
            let bits = elements.as_chunks().0.iter().map(|bytes| u16::from_ne_bytes(*bytes));
            !bits.fold(false, |found, bits| found | (bits & 0x7f80 == 0x7f80))
        }
        Dtype::F32 => {
            let bits = elements.as_chunks().0.iter().map(|bytes| u32::from_ne_bytes(*bytes));
            !bits.fold(false, |found, bits| found | (bits & 0x7f80_0000 == 0x7f80_0000))
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;
    use proptest::prelude::*;

    use super::*;
    use crate::checkpoint::file::CheckpointFile;

    /// Returns a file with these bytes. The file has no name any more.
    fn file_of(bytes: &[u8]) -> CheckpointFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        CheckpointFile::open(file.path()).unwrap()
    }

    fn tensor(file: &CheckpointFile) -> TensorBytes<'_> {
        TensorBytes::new(file, 0..file.bytes())
    }

    /// Computes the converter's permutation from its definition: a head's rows `[2][dim/2]`
    /// transposed.
    fn permute(rows: &[u32], head_dim: usize) -> Vec<u32> {
        let mut out = Vec::new();
        for head in rows.chunks(head_dim) {
            for pair in 0..head_dim / 2 {
                out.extend([head[pair], head[head_dim / 2 + pair]]);
            }
        }
        out
    }

    proptest! {
        #[test]
        fn row_order_inverts_the_converters_permutation(heads in 1usize..6, half in 1usize..40) {
            let head_dim = half * 2;
            let rows: Vec<u32> = (0..(heads * head_dim) as u32).collect();
            let stored = permute(&rows, head_dim);
            let bytes: Vec<u8> = stored.iter().flat_map(|&row| (row as f32).to_le_bytes()).collect();
            let order = RowOrder::Pairs { head_dim };
            let file = file_of(&bytes);
            let data = MatrixData::Stored { bytes: tensor(&file), encoding: Encoding::F32, order, scales: None };
            let matrix = MatrixSource::new(rows.len(), 1, data);
            for &row in &rows {
                let mut out = [f32::NAN];
                matrix.read_row(row as usize, &mut out);
                prop_assert_eq!(out[0], row as f32);
            }
        }
    }

    /// Covers every stored and requested type, in one piece or several, across the boundaries of
    /// parts.
    #[test]
    fn rows_read_together_are_the_rows_read_one_by_one() {
        let values: Vec<f32> = (0..18 * 6).map(|i| (i as f32 - 50.0) * 0.37).collect();
        let in_f32: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let in_bf16: Vec<u8> =
            values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        for (encoding, bytes) in [(Encoding::F32, &in_f32), (Encoding::BF16, &in_bf16)] {
            let file = file_of(bytes);
            for order in [RowOrder::Halves, RowOrder::Pairs { head_dim: 6 }] {
                let part = |rows: Range<usize>| {
                    let at = |row| (row * bytes.len() / 18) as u64;
                    let bytes = TensorBytes::new(&file, at(rows.start)..at(rows.end));
                    MatrixSource::new(
                        rows.len(),
                        6,
                        MatrixData::Stored { bytes, encoding, order, scales: None },
                    )
                };
                let rows = StackedRows::new(vec![part(0..6), part(6..12), part(12..18)]);

                for dtype in [Dtype::F32, Dtype::Bf16] {
                    for (first, count) in [(0, 18), (5, 2), (6, 6), (17, 1), (3, 12), (9, 0)] {
                        let bytes = count * 6 * dtype.bytes();
                        let (mut found, mut expected) = (vec![1; bytes], vec![2; bytes]);
                        rows.read_rows(first, dtype, &mut found);
                        convert_rows(&rows, first, dtype, &mut expected);
                        assert_eq!(found, expected, "{encoding:?} {order:?} {dtype} {first}");
                    }
                }
                assert_eq!(rows.not_finite(), None);
            }
        }
    }

    /// Covers every stored and requested type, and rows that are read twice.
    #[test]
    fn rows_are_hashed_however_they_are_read() {
        let bytes: Vec<u8> = (0..12 * 6 * 4).map(|at| (at * 7 % 64) as u8).collect();
        let expected = |row_bytes| {
            let hashes = RowHashes::new(12);
            let rows = bytes[..12 * row_bytes].chunks(row_bytes);
            rows.enumerate().for_each(|(row, bytes)| hashes.add(row, bytes));
            hashes.finish_read()
        };
        let file = file_of(&bytes);
        for (encoding, row_bytes) in [(Encoding::F32, 24), (Encoding::BF16, 12)] {
            for order in [RowOrder::Halves, RowOrder::Pairs { head_dim: 6 }] {
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    let hashes = RowHashes::new(12);
                    let bytes = TensorBytes::new(&file, 0..12 * row_bytes as u64);
                    let data = MatrixData::Stored { bytes, encoding, order, scales: None };
                    let matrix = MatrixSource::new(12, 6, data).hashing(Some(&hashes));
                    matrix.read_rows(7, dtype, &mut vec![0; 5 * 6 * dtype.bytes()]);
                    matrix.read_rows(2, dtype, &mut vec![0; 6 * 6 * dtype.bytes()]);
                    (0..2).for_each(|row| matrix.read_row(row, &mut [0.0; 6]));
                    assert_eq!(
                        hashes.finish_read(),
                        expected(row_bytes),
                        "{encoding:?} {order:?} {dtype}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_first_element_that_is_not_finite_is_found_however_rows_are_read() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = vec![f32::from_bits(0x7f7f_0000); 40 * 33];
            (values[7 * 33 + 32], values[31 * 33 + 1]) = (bad, bad);
            // Finite, though outside bf16's range, and before the non-finite elements.
            let in_f32: Vec<u8> = [f32::MAX]
                .iter()
                .chain(&values[1..])
                .flat_map(|value| value.to_le_bytes())
                .collect();
            let in_bf16: Vec<u8> =
                values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
            for (encoding, bytes) in [(Encoding::F32, &in_f32), (Encoding::BF16, &in_bf16)] {
                let file = file_of(bytes);
                for dtype in [Dtype::F32, Dtype::Bf16] {
                    let order = RowOrder::Halves;
                    let data =
                        MatrixData::Stored { bytes: tensor(&file), encoding, order, scales: None };
                    let matrix = MatrixSource::new(40, 33, data);
                    let rows = StackedRows::new(vec![matrix]);
                    let mut out = vec![0; 20 * 33 * dtype.bytes()];
                    rows.read_rows(20, dtype, &mut out);
                    let found = rows.not_finite().expect("one is in the second half");
                    assert_eq!((found.part, found.element), (0, 31 * 33 + 1));
                    rows.read_rows(0, dtype, &mut out);
                    let found = rows.not_finite().expect("one is in the first half");
                    assert_eq!((found.part, found.element), (0, 7 * 33 + 32));
                    assert_eq!(found.found.is_nan(), bad.is_nan());
                }
            }
        }
    }

    /// Covers every encoding and any first column: a part may begin inside a quantized block.
    #[test]
    fn a_part_has_the_rows_and_columns_of_the_whole() {
        let noise =
            |at: usize| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()[7] & 0x3f;
        const ROWS: usize = 12;
        for encoding in Encoding::all() {
            let cols = 512;
            let bytes: Vec<u8> = (0..ROWS * encoding.row_bytes(cols).unwrap()).map(noise).collect();
            let file = file_of(&bytes);
            for order in [RowOrder::Halves, RowOrder::Pairs { head_dim: 6 }] {
                let data =
                    MatrixData::Stored { bytes: tensor(&file), encoding, order, scales: None };
                let whole = MatrixSource::new(ROWS, cols, data);
                for (rows, cols) in [
                    (0..6, 0..512),
                    (6..12, 256..512),
                    (3..4, 32..96),
                    (0..12, 77..300),
                    (2..9, 5..5),
                ] {
                    let part = whole.part(rows.clone(), cols.clone());
                    assert_eq!((part.rows(), part.cols()), (rows.len(), cols.len()));
                    for row in 0..rows.len() {
                        let (mut all, mut found) = (vec![0.0; 512], vec![1.0; cols.len()]);
                        whole.read_row(rows.start + row, &mut all);
                        part.read_row(row, &mut found);
                        assert_eq!(found, all[cols.clone()], "{encoding:?} {rows:?}");
                    }
                    for dtype in [Dtype::F32, Dtype::Bf16] {
                        let bytes = rows.len() * cols.len() * dtype.bytes();
                        let (mut found, mut expected) = (vec![1; bytes], vec![2; bytes]);
                        part.read_rows(0, dtype, &mut found);
                        convert_rows(&part, 0, dtype, &mut expected);
                        assert_eq!(found, expected, "{encoding:?} {dtype}");
                    }
                    let inner = part.part(1..rows.len(), 0..cols.len() / 2);
                    let (mut all, mut found) = (vec![0.0; cols.len()], vec![1.0; cols.len() / 2]);
                    if rows.len() > 1 {
                        part.read_row(1, &mut all);
                        inner.read_row(0, &mut found);
                        assert_eq!(found, all[..cols.len() / 2]);
                        let at = order.stored_row(rows.start + 1) * 512 + cols.start;
                        assert_eq!(inner.stored_element(0, 0), at);
                    }
                }
            }
        }
    }

    #[test]
    fn stacked_matrices_concatenate_their_rows() {
        let files = [&[1.0f32, 2.0][..], &[3.0, 4.0, 5.0, 6.0]].map(|values| {
            file_of(&values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>())
        });
        let (encoding, order) = (Encoding::F32, RowOrder::Halves);
        let parts = files.iter().map(|file| {
            let data = MatrixData::Stored { bytes: tensor(file), encoding, order, scales: None };
            MatrixSource::new(file.bytes() as usize / 8, 2, data)
        });
        let stacked = StackedRows::new(parts.collect());
        assert_eq!((stacked.rows(), stacked.cols()), (3, 2));
        let read = |row| {
            let mut out = [0.0; 2];
            stacked.read_row(row, &mut out);
            out
        };
        assert_eq!([read(0), read(1), read(2)], [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]);
    }

    #[test]
    fn numbers_that_overflow_with_their_scale_are_found() {
        // 6 in every column of two rows.
        let numbers = file_of(&[0x77; 32]);
        for (scale, found) in [(0, false), (252, false), (253, true), (254, true)] {
            let scales = file_of(&[120, scale]);
            let (encoding, order) = (Encoding::Mxfp4, RowOrder::Halves);
            let scales = Some(Scales::Mxfp4(tensor(&scales)));
            let data = MatrixData::Stored { bytes: tensor(&numbers), encoding, order, scales };
            let stacked = StackedRows::new(vec![MatrixSource::new(2, 32, data)]);
            stacked.read_mxfp4(0, &mut [0; 32], &mut [0; 2]);
            let element = stacked.not_finite().map(|bad| bad.element);
            assert_eq!(element, found.then_some(32), "scale {scale}");
        }
    }
}
