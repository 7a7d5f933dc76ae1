//! Models split over several files, `NAME-00001-of-0000N.gguf` and so on. Every part is a complete
//! GGUF file. The first has the metadata, and each states its number and the number of parts.

use std::path::{Path, PathBuf};

use crate::{error::GgufError, header::Header};

/// Key of the part's number, from 0; file names count from 1.
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
/// Key of the number of tensors in all parts.
const TENSOR_COUNT: &str = "split.tensors.count";
/// Maximum of a five-digit number.
const PARTS_MAX: u32 = 99_999;

/// Parts of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// Paths of all parts in order, including the first.
    pub paths: Vec<PathBuf>,
    tensor_count: Option<u64>,
}

impl Split {
    /// Returns the parts that `header`, read from `path`, announces; `None` for a model in one
    /// file.
    pub fn of_first(path: &Path, header: &Header) -> Result<Option<Self>, GgufError> {
        let count = header.metadata.get::<u32>(COUNT)?.unwrap_or(1);
        if count <= 1 {
            return Ok(None);
        }
        let number = header.metadata.require::<u32>(NUMBER)?;
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let stem = (count <= PARTS_MAX && number < count)
            .then(|| name.strip_suffix(&ending(number, count)))
            .flatten()
            .ok_or_else(|| GgufError::PartName {
                found: name.into(),
                wanted: ending(number, count),
            })?;
        if number != 0 {
            let first = format!("{stem}{}", ending(0, count));
            return Err(GgufError::NotFirstPart { number: number + 1, count, first });
        }
        let paths: Vec<PathBuf> = (0..count)
            .map(|number| path.with_file_name(format!("{stem}{}", ending(number, count))))
            .collect();
        match (1..).zip(&paths).find(|(_, path)| !path.is_file()) {
            None => Ok(Some(Self { paths, tensor_count: header.metadata.get(TENSOR_COUNT)? })),
            Some((number, path)) => {
                Err(GgufError::MissingPart { number, count, path: path.clone() })
            }
        }
    }

    /// Checks that `header` belongs to the part at `paths[index]`.
    pub fn check_part(&self, index: usize, header: &Header) -> Result<(), GgufError> {
        let metadata = &header.metadata;
        let expected = [
            (NUMBER, Some(index as u64)),
            (COUNT, Some(self.paths.len() as u64)),
            (TENSOR_COUNT, self.tensor_count),
        ];
        for (key, wanted) in expected {
            let found = metadata.get::<u64>(key)?;
            if found != wanted {
                return Err(GgufError::PartMismatch { key, found, wanted });
            }
        }
        Ok(())
    }

    /// Checks that all parts together have the number of tensors that the first part states.
    pub fn check_tensor_count(&self, found: u64) -> Result<(), GgufError> {
        match self.tensor_count {
            Some(wanted) if wanted != found => Err(GgufError::PartTensors { found, wanted }),
            _ => Ok(()),
        }
    }
}

fn ending(number: u32, count: u32) -> String {
    format!("-{:05}-of-{count:05}.gguf", u64::from(number) + 1)
}
