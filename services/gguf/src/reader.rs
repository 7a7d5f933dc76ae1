//! Reads little-endian fields and checks every length against the file's size first.

use std::{io::Read, path::Path};

use crate::{error::GgufError, header::HEADER_BYTES_MAX};

pub(crate) struct HeaderReader<'a> {
    /// Path for errors.
    path: &'a Path,
    inner: &'a mut dyn Read,
    /// Bytes read.
    pub offset: u64,
    pub file_bytes: u64,
}

impl<'a> HeaderReader<'a> {
    pub(crate) fn new(path: &'a Path, inner: &'a mut dyn Read, file_bytes: u64) -> Self {
        Self { path, inner, offset: 0, file_bytes }
    }

    /// Checks that `count` items of at least `item_bytes` each can still follow; `what` names them.
    pub(crate) fn claim(
        &self,
        count: u64,
        item_bytes: u64,
        what: impl FnOnce() -> String,
    ) -> Result<(), GgufError> {
        let left = self.file_bytes - self.offset;
        let wanted = count.checked_mul(item_bytes);
        if wanted.is_none_or(|wanted| wanted > left) {
            return Err(GgufError::HeaderTruncated {
                what: what(),
                offset: self.offset,
                wanted: wanted.unwrap_or(u64::MAX),
                file_bytes: self.file_bytes,
            });
        }
        if wanted.is_some_and(|wanted| self.offset + wanted > HEADER_BYTES_MAX) {
            return Err(GgufError::HeaderTooLarge { what: what(), limit: HEADER_BYTES_MAX });
        }
        Ok(())
    }

    fn fill(&mut self, out: &mut [u8], what: impl FnOnce() -> String) -> Result<(), GgufError> {
        let len = out.len() as u64;
        self.claim(len, 1, what)?;
        self.inner.read_exact(out).map_err(|cause| {
            let (path, action) = (self.path.into(), "read");
            GgufError::Io { path, action, cause }
        })?;
        self.offset += len;
        Ok(())
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        what: impl FnOnce() -> String,
    ) -> Result<[u8; N], GgufError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, what)?;
        Ok(bytes)
    }

    pub(crate) fn u32(&mut self, what: impl FnOnce() -> String) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: impl FnOnce() -> String) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// Reads `count * N` bytes at once. The allocation is at most the rest of the file.
    pub(crate) fn items<const N: usize, T>(
        &mut self,
        count: u64,
        what: impl Fn() -> String,
        convert: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, GgufError> {
        self.claim(count, N as u64, &what)?;
        let mut bytes = vec![0; count as usize * N];
        self.fill(&mut bytes, what)?;
        Ok(bytes.as_chunks::<N>().0.iter().map(|&item| convert(item)).collect())
    }

    /// Reads a length (u64), then this many bytes of UTF-8.
    pub(crate) fn string(&mut self, what: impl Fn() -> String) -> Result<String, GgufError> {
        let len = self.u64(&what)?;
        self.claim(len, 1, &what)?;
        let offset = self.offset;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, &what)?;
        String::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 { what: what(), offset })
    }
}
