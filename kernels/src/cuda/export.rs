//! GPU memory that this process exports to other processes of this host by CUDA IPC handles, and
//! the mapping of memory that they export.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{
    context::Context,
    driver::Link,
    error::{CudaError, Named},
    memory::Range,
};
use crate::shard::RANKS_MAX;

/// Bytes of a CUDA IPC handle.
pub const HANDLE_BYTES: usize = 64;
const UUID_BYTES: usize = 40;

/// GPU memory that processes of this host may map: one rank's heads of all blocks, or an all-reduce
/// arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IpcRange {
    handle: [u8; HANDLE_BYTES],
    /// Offset of the memory in its allocation, in bytes.
    offset: u64,
    pub uuid: String,
}

/// Export of a process's KV memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KvExport {
    /// Bytes of a block of all heads.
    pub block_bytes: u64,
    pub block_count: u32,
    /// Parts in rank order.
    pub parts: Vec<IpcRange>,
}

/// Prefix of every export, with the version of the format.
const MAGIC: [u8; 8] = *b"BATONIP4";

impl KvExport {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.block_bytes.to_le_bytes());
        bytes.extend_from_slice(&self.block_count.to_le_bytes());
        for part in &self.parts {
            bytes.extend_from_slice(&part.to_bytes());
        }
        bytes
    }

    /// Parses an export. Returns `None` for another version or other bytes.
    pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        if take(&mut bytes)? != MAGIC {
            return None;
        }
        let block_bytes = u64::from_le_bytes(take(&mut bytes)?);
        let block_count = u32::from_le_bytes(take(&mut bytes)?);
        let mut parts = Vec::new();
        while !bytes.is_empty() && parts.len() < RANKS_MAX {
            parts.push(IpcRange::take(&mut bytes)?);
        }
        let is_whole = bytes.is_empty() && !parts.is_empty();
        is_whole.then_some(Self { block_bytes, block_count, parts })
    }
}

/// Takes the next `N` bytes of a message, or returns `None` if fewer are left.
pub(super) fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

impl IpcRange {
    pub(super) const BYTES: usize = HANDLE_BYTES + 8 + UUID_BYTES;

    pub(super) fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut uuid = [0; UUID_BYTES];
        uuid[..self.uuid.len()].copy_from_slice(self.uuid.as_bytes());
        let fields: [&[u8]; 3] = [&self.handle, &self.offset.to_le_bytes(), &uuid];
        fields.concat().try_into().expect("the fields have the sum of these lengths")
    }

    /// Parses a part from the front of a message.
    pub(super) fn take(bytes: &mut &[u8]) -> Option<Self> {
        Some(Self {
            handle: take(bytes)?,
            offset: u64::from_le_bytes(take(bytes)?),
            uuid: {
                let padded: [u8; UUID_BYTES] = take(bytes)?;
                str::from_utf8(&padded).ok()?.trim_end_matches('\0').to_owned()
            },
        })
    }

    /// Exports memory that this process has allocated.
    pub(super) fn of(context: &Context, data: &Range) -> Result<Self, CudaError> {
        context.bind()?;
        let address = data.address();
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the address is that of a live allocation; two numbers are written.
        unsafe { sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address) }
            .named("cuMemGetAddressRange")?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: `base` is the start of a live allocation; one handle is written. The handle lets
        // processes of this host map the memory until this process frees it.
        unsafe { sys::cuIpcGetMemHandle(&mut handle, base) }.named("cuIpcGetMemHandle")?;
        Ok(Self {
            handle: handle.reserved.map(|byte| byte as u8),
            offset: address - base,
            uuid: context.device().uuid.clone(),
        })
    }

    /// Maps `bytes` bytes of the memory for this GPU; `what` names the memory in errors.
    pub(super) fn map(
        &self,
        context: &Arc<Context>,
        what: &'static str,
        bytes: u64,
    ) -> Result<Range, String> {
        let memory = ExportedMemory {
            uuid: self.uuid.clone(),
            handle: self.handle,
            offset: self.offset,
            bytes,
        };
        memory.map(context, what)
    }
}

/// GPU memory that another process of this host has exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedMemory {
    /// GPU that has the memory.
    pub uuid: String,
    /// CUDA IPC handle of the memory's allocation.
    pub handle: [u8; HANDLE_BYTES],
    /// Offset of the memory in its allocation, in bytes.
    pub offset: u64,
    pub bytes: u64,
}

impl ExportedMemory {
    /// Maps the memory for this GPU; `what` names the memory in errors.
    pub(super) fn map(&self, context: &Arc<Context>, what: &'static str) -> Result<Range, String> {
        let (own, theirs) = (&context.device().uuid, &self.uuid);
        if own != theirs {
            let named = |error: CudaError| error.to_string();
            let devices = context.driver().devices().map_err(named)?;
            let Some(peer) = devices.iter().find(|device| device.uuid == *theirs) else {
                return Err(format!("GPU {theirs} is not visible to this process"));
            };
            if context.driver().link(context.device(), peer).map_err(named)? == Link::None {
                return Err(format!("GPU {own} has no peer access to GPU {theirs}"));
            }
        }
        let handle = sys::CUipcMemHandle { reserved: self.handle.map(|byte| byte as _) };
        Range::mapped(context, what, handle, (self.offset, self.bytes))
            .map_err(|error| format!("GPU {own} cannot map the memory of GPU {theirs}: {error}"))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn part(number: u8) -> IpcRange {
        IpcRange {
            handle: std::array::from_fn(|index| index as u8 + number),
            offset: 512,
            uuid: "GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0fff".to_owned(),
        }
    }

    #[test]
    fn export_round_trips_and_other_bytes_are_rejected() {
        for ranks in [1, 2, RANKS_MAX as u8] {
            let parts = (0..ranks).map(part).collect();
            let export = KvExport { block_bytes: 2 << 20, block_count: 99, parts };
            let bytes = export.to_bytes();
            assert!(bytes.len() <= crate::peer::EXPORT_BYTES_MAX);
            assert_eq!(KvExport::from_bytes(&bytes), Some(export));
            let part_bytes = (bytes.len() - 20) / usize::from(ranks);
            for length in 0..bytes.len() {
                let is_shorter_group = length > 20 && (length - 20).is_multiple_of(part_bytes);
                assert_eq!(KvExport::from_bytes(&bytes[..length]).is_some(), is_shorter_group);
            }
            let mut other = bytes.clone();
            other[7] += 1;
            assert_eq!(KvExport::from_bytes(&other), None);
        }
        let parts = (0..=RANKS_MAX as u8).map(part).collect();
        let export = KvExport { block_bytes: 2 << 20, block_count: 99, parts };
        assert_eq!(KvExport::from_bytes(&export.to_bytes()), None);
    }
}
