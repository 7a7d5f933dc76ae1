//! INT4: numbers of 4 bits without a sign. Each group of columns of a row has a scale and a zero
//! point. An element is `(number - zero point) * scale`.

mod chunks;

use std::{ops::Range, sync::Arc};

pub use self::chunks::packed_bytes;
pub(crate) use self::chunks::{pack_unit, unit_bytes};

/// Greatest number and greatest zero point.
pub const MAX: u8 = 15;
/// Maximum number of groups of a row.
pub const GROUPS_MAX: usize = 1 << 16;

/// Groups of the columns of a matrix, the same in all rows. The columns of a group need not be
/// neighbours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnGroups {
    of_column: Arc<[u16]>,
    count: usize,
}

impl ColumnGroups {
    /// Creates the groups from the group of each column.
    pub fn new(of_column: Vec<u16>) -> Self {
        let count = of_column.iter().max().map_or(0, |&last| usize::from(last) + 1);
        Self { of_column: of_column.into(), count }
    }

    /// Creates groups of `size` neighbouring columns each. The last group may have fewer.
    ///
    /// # Panics
    /// When there are more than [`GROUPS_MAX`] groups.
    pub fn contiguous(cols: usize, size: usize) -> Self {
        let group = |col| u16::try_from(col / size).expect("a row has at most GROUPS_MAX groups");
        Self::new((0..cols).map(group).collect())
    }

    /// Returns the groups of matrices that are stacked by rows: those of all, if all have the same
    /// groups, else `None`.
    pub fn common(of_matrices: impl IntoIterator<Item = Option<Self>>) -> Option<Self> {
        let mut of_matrices = of_matrices.into_iter();
        let first = of_matrices.next()??;
        of_matrices.all(|other| other.as_ref() == Some(&first)).then_some(first)
    }

    /// Returns the group of each column.
    pub fn of_columns(&self) -> &[u16] {
        &self.of_column
    }

    /// Returns the number of groups.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Returns the groups that a range of columns needs, and the groups of these columns, counted
    /// from the first needed one.
    ///
    /// # Panics
    /// When the range exceeds the columns.
    pub fn part(&self, cols: Range<usize>) -> (Range<usize>, Self) {
        if cols.len() == self.of_column.len() {
            return (0..self.count, self.clone());
        }
        let of_column = &self.of_column[cols];
        let first = of_column.iter().min().copied().unwrap_or(0);
        let part = Self::new(of_column.iter().map(|group| group - first).collect());
        (usize::from(first)..usize::from(first) + part.count, part)
    }
}

/// Returns an element.
#[inline(always)]
pub fn element(number: u8, zero: u8, scale: f32) -> f32 {
    (i32::from(number) - i32::from(zero)) as f32 * scale
}

/// Returns the bytes of a matrix of this shape on CPUs, without padding.
pub fn bytes(rows: u64, cols: u64, groups: u64) -> u64 {
    rows * (cols.div_ceil(2) + groups * (size_of::<f32>() + size_of::<u8>()) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_has_the_groups_that_its_columns_need() {
        let groups = ColumnGroups::contiguous(100, 32);
        assert_eq!(groups.count(), 4);
        assert_eq!(groups.part(0..100), (0..4, groups.clone()));
        let (needed, part) = groups.part(40..70);
        assert_eq!(needed, 1..3);
        assert_eq!(part.of_columns(), [[0; 24].as_slice(), &[1; 6]].concat());
        let (needed, part) = ColumnGroups::new(vec![3, 0, 2, 1, 2, 3]).part(2..5);
        assert_eq!((needed, part.of_columns()), (1..3, &[1, 0, 1][..]));
        assert_eq!(groups.part(7..7), (0..0, ColumnGroups::new(Vec::new())));
    }

    #[test]
    fn only_equal_groups_are_common() {
        let groups = |size| Some(ColumnGroups::contiguous(64, size));
        assert_eq!(ColumnGroups::common([groups(32), groups(32)]), groups(32));
        assert_eq!(ColumnGroups::common([groups(32), groups(64)]), None);
        assert_eq!(ColumnGroups::common([groups(32), None]), None);
        assert_eq!(ColumnGroups::common([None, groups(32)]), None);
        assert_eq!(ColumnGroups::contiguous(GROUPS_MAX, 1).count(), GROUPS_MAX);
    }

    #[test]
    fn bytes_are_half_a_byte_for_a_number_and_five_for_a_group() {
        assert_eq!(bytes(3, 128, 4), 3 * (64 + 20));
    }
}
