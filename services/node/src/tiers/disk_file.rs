//! The file of the disk tier: slots of one block each, read and written with direct I/O.
//!
//! The first page names the format and the layout of the blocks. A slot is a header page and the
//! block, rounded up to pages. The header has the block's KV group, its key, the inputs of the key,
//! and a digest of the KV. One write writes header and block. A crash may tear the write: then
//! header and block do not match, and a load counts as a miss. The file has no index: at start the
//! node reads the headers.

use std::{
    fs::{File, OpenOptions, Permissions, TryLockError},
    io::{self, IoSliceMut},
    os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

use engine::{
    event::BlockHash,
    tiers::{BlockContents, RecoveredBlock, SlotIndex},
};
use kernels::{ArenaError, BLOCK_TOKENS, KvGroups, KvLayout, WeightFormat};
use memmap2::MmapMut;
use rustix::fs::{FallocateFlags, OFlags};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Unit of direct I/O: a multiple of every usual sector size.
const PAGE: usize = 4096;
const FILE_MAGIC: &[u8; 8] = b"BATONKV\0";
const SLOT_MAGIC: &[u8; 8] = b"BATONBLK";
/// Version of the format. A file of another version is not used.
const VERSION: u16 = 1;
/// Bytes of a slot's header before its digest.
const HEADER_BYTES: usize = 8 + 2 + 2 + 16 + 16 + 4 * BLOCK_TOKENS + 16;

/// Reason why a file cannot serve as the disk tier.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskError {
    #[error("cannot open it: {0}")]
    Open(io::Error),
    #[error("cannot open it with direct I/O: {0}; expected a file system that supports O_DIRECT")]
    NoDirectIo(io::Error),
    #[error("another node uses it; expected a file for each node")]
    InUse,
    #[error("cannot allocate {bytes} bytes: {source}; expected that much free space")]
    Allocate { bytes: u64, source: io::Error },
    #[error("{size} bytes hold no block; expected at least {least}")]
    TooSmall { size: u64, least: u64 },
    #[error("it holds {found}; expected {wanted}")]
    OtherContents { found: String, wanted: String },
    #[error("cannot read or write its first page: {0}")]
    FirstPage(io::Error),
    #[error("cannot set its mode to 0600: {0}; expected a file of the node's user")]
    Mode(io::Error),
}

/// Reason why a slot does not have the wanted block.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SlotError {
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    #[error("it does not hold the block")]
    OtherBlock,
    #[error("its KV does not match its digest")]
    Damaged,
    #[error("cannot write the block to the KV cache: {0}")]
    Write(#[from] ArenaError),
}

/// An open file, locked until it is dropped.
#[derive(Debug)]
pub(crate) struct DiskFile {
    file: File,
    slot_bytes: usize,
    block_bytes: usize,
    slot_count: u32,
}

/// Memory of one slot, aligned for direct I/O.
pub(crate) struct SlotBuffer {
    bytes: MmapMut,
    block_bytes: usize,
}

impl DiskFile {
    /// Opens or creates the file, locks it, and allocates `size` bytes. `layout` is that of a block,
    /// which has the layers of one group. The format includes several `groups`, because with other
    /// groups a block has other layers. It includes `weights`, because weights in another number
    /// format compute different KV.
    pub(super) fn open(
        path: &Path,
        size: u64,
        (layout, groups): (KvLayout, &KvGroups),
        weights: WeightFormat,
    ) -> Result<Self, DiskError> {
        let wanted = describe(layout, groups, weights);
        let block_bytes = layout.block_bytes();
        let slot_bytes = PAGE + block_bytes.next_multiple_of(PAGE);
        let slots = size.saturating_sub(PAGE as u64) / slot_bytes as u64;
        let slot_count = u32::try_from(slots).unwrap_or(u32::MAX);
        if slot_count == 0 {
            let least = (PAGE + slot_bytes) as u64;
            return Err(DiskError::TooSmall { size, least });
        }
        let file = open_direct(path)?;
        file.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => DiskError::InUse,
            TryLockError::Error(error) => DiskError::Open(error),
        })?;
        let this = Self { file, slot_bytes, block_bytes, slot_count };
        // Do not resize or write a file that has other contents.
        match this.file.metadata().map_err(DiskError::Open)?.len() {
            0 => {
                this.restrict()?;
                let created = this.write_first_page(&wanted).and_then(|()| this.allocate());
                if created.is_err() {
                    // Empty a file that could not be allocated, so that it takes no space.
                    let _ = this.file.set_len(0);
                }
                created?;
            }
            before => {
                this.check_first_page(&wanted)?;
                this.restrict()?;
                this.allocate().inspect_err(|_| _ = this.file.set_len(before))?;
            }
        }
        Ok(this)
    }

    /// Takes the file from other users: its blocks tell the prompts of all callers.
    fn restrict(&self) -> Result<(), DiskError> {
        let mode = self.file.metadata().map_err(DiskError::Mode)?.permissions().mode();
        if mode & 0o077 == 0 {
            return Ok(());
        }
        self.file.set_permissions(Permissions::from_mode(0o600)).map_err(DiskError::Mode)
    }

    pub(super) fn slot_count(&self) -> u32 {
        self.slot_count
    }

    pub(super) fn buffer(&self) -> io::Result<SlotBuffer> {
        Ok(SlotBuffer { bytes: MmapMut::map_anon(self.slot_bytes)?, block_bytes: self.block_bytes })
    }

    /// Writes a slot: the block in `buffer`, and its header.
    pub(super) fn write(
        &self,
        slot: SlotIndex,
        contents: &BlockContents,
        buffer: &mut SlotBuffer,
    ) -> io::Result<()> {
        let header = header(contents, xxh3_128(buffer.block()));
        buffer.bytes[..PAGE].fill(0);
        buffer.bytes[..header.len()].copy_from_slice(&header);
        self.file.write_all_at(&buffer.bytes, self.offset(slot))
    }

    /// Reads a slot into `buffer` and checks that it has the block.
    pub(super) fn read(
        &self,
        slot: SlotIndex,
        contents: &BlockContents,
        buffer: &mut SlotBuffer,
    ) -> Result<(), SlotError> {
        self.file.read_exact_at(&mut buffer.bytes, self.offset(slot))?;
        check(contents, &buffer.bytes, buffer.block())
    }

    /// Overwrites the header of a slot, so that the slot holds no block. `buffer` is overwritten.
    pub(super) fn erase(&self, slot: SlotIndex, buffer: &mut SlotBuffer) -> io::Result<()> {
        buffer.bytes[..PAGE].fill(0);
        self.file.write_all_at(&buffer.bytes[..PAGE], self.offset(slot))
    }

    /// Returns whether direct I/O can read into `block`.
    pub(super) fn reads_into(block: &[u8]) -> bool {
        block.as_ptr().addr().is_multiple_of(PAGE) && block.len().is_multiple_of(PAGE)
    }

    /// Reads a slot's header into `buffer` and its block into `block`, and checks that the slot has
    /// the block. A slot that does not have it overwrites `block`, too.
    pub(super) fn read_into(
        &self,
        slot: SlotIndex,
        contents: &BlockContents,
        buffer: &mut SlotBuffer,
        block: &mut [u8],
    ) -> Result<(), SlotError> {
        assert_eq!(block.len(), self.block_bytes, "the bytes of a block");
        let header = &mut buffer.bytes[..PAGE];
        let mut parts = [IoSliceMut::new(header), IoSliceMut::new(block)];
        let read = || rustix::io::preadv(&self.file, &mut parts, self.offset(slot));
        let bytes = rustix::io::retry_on_intr(read).map_err(io::Error::from)?;
        if bytes < PAGE + self.block_bytes {
            return Err(SlotError::Read(io::ErrorKind::UnexpectedEof.into()));
        }
        check(contents, &buffer.bytes, block)
    }

    /// Returns the block in a slot, if the slot has an intact header. `buffer` is overwritten.
    pub(super) fn block(
        &self,
        slot: SlotIndex,
        buffer: &mut SlotBuffer,
    ) -> io::Result<Option<RecoveredBlock>> {
        self.file.read_exact_at(&mut buffer.bytes[..PAGE], self.offset(slot))?;
        let block =
            |BlockContents { key, group, .. }: BlockContents| RecoveredBlock { slot, key, group };
        Ok(parse_header(&buffer.bytes).map(|(contents, _)| block(contents)))
    }

    fn offset(&self, slot: SlotIndex) -> u64 {
        assert!(slot < self.slot_count, "slot {slot} exceeds the {} of the file", self.slot_count);
        PAGE as u64 + u64::from(slot) * self.slot_bytes as u64
    }

    fn allocate(&self) -> Result<(), DiskError> {
        let bytes = PAGE as u64 + u64::from(self.slot_count) * self.slot_bytes as u64;
        let failed = |source| DiskError::Allocate { bytes, source };
        let allocated = rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes);
        allocated.map_err(|error| failed(error.into()))?;
        self.file.set_len(bytes).map_err(failed)
    }

    fn check_first_page(&self, wanted: &str) -> Result<(), DiskError> {
        let mut page = MmapMut::map_anon(PAGE).map_err(DiskError::FirstPage)?;
        let other = |found: String| DiskError::OtherContents { found, wanted: wanted.to_owned() };
        match self.file.read_exact_at(&mut page, 0) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(other("no KV blocks".to_owned()));
            }
            Err(error) => return Err(DiskError::FirstPage(error)),
        }
        let Some(found) = parse_first_page(&page) else {
            return Err(other("no KV blocks".to_owned()));
        };
        if found == wanted { Ok(()) } else { Err(other(found)) }
    }

    fn write_first_page(&self, text: &str) -> Result<(), DiskError> {
        let mut page = MmapMut::map_anon(PAGE).map_err(DiskError::FirstPage)?;
        let mut bytes = FILE_MAGIC.to_vec();
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
        let digest = xxh3_64(&bytes);
        bytes.extend(digest.to_le_bytes());
        page[..bytes.len()].copy_from_slice(&bytes);
        self.file.write_all_at(&page, 0).map_err(DiskError::FirstPage)
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        // Closing the file is not enough: a child that was forked and has not called exec yet holds
        // the lock, too.
        let _ = self.file.unlock();
    }
}

impl SlotBuffer {
    pub(super) fn block(&self) -> &[u8] {
        &self.bytes[PAGE..PAGE + self.block_bytes]
    }

    pub(super) fn block_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[PAGE..PAGE + self.block_bytes]
    }
}

/// Checks the header and the block of a slot.
fn check(contents: &BlockContents, header: &[u8], block: &[u8]) -> Result<(), SlotError> {
    let (found, digest) = parse_header(header).ok_or(SlotError::OtherBlock)?;
    if found != *contents {
        return Err(SlotError::OtherBlock);
    }
    match xxh3_128(block) == digest {
        true => Ok(()),
        false => Err(SlotError::Damaged),
    }
}

fn open_direct(path: &Path) -> Result<File, DiskError> {
    let mut options = OpenOptions::new();
    // KV reveals prompts, so other users must not read it.
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let direct = options.clone().custom_flags(OFlags::DIRECT.bits() as i32).open(path);
    direct.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported => DiskError::NoDirectIo(error),
        _ => DiskError::Open(error),
    })
}

/// Describes the contents of a file for the first page and for errors.
fn describe(layout: KvLayout, groups: &KvGroups, weights: WeightFormat) -> String {
    let kv = layout.format;
    let groups = if groups.count() > 1 { groups.to_string() } else { String::new() };
    format!("KV blocks of format {VERSION}, layout {layout}{groups}, dtype {kv}, weights {weights}")
}

fn parse_first_page(page: &[u8]) -> Option<String> {
    let rest = page.strip_prefix(FILE_MAGIC)?;
    let (length, rest) = rest.split_first_chunk::<4>()?;
    let length = u32::from_le_bytes(*length) as usize;
    let text = rest.get(..length)?;
    let digest = rest.get(length..)?.first_chunk::<8>()?;
    let is_intact = xxh3_64(&page[..12 + length]) == u64::from_le_bytes(*digest);
    is_intact.then(|| String::from_utf8_lossy(text).into_owned())
}

fn header(contents: &BlockContents, digest: u128) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER_BYTES + 8);
    header.extend(SLOT_MAGIC);
    header.extend(VERSION.to_le_bytes());
    header.extend(u16::from(contents.group).to_le_bytes());
    header.extend(contents.key.0.to_le_bytes());
    header.extend(contents.parent.0.to_le_bytes());
    contents.tokens.iter().for_each(|token| header.extend(token.to_le_bytes()));
    header.extend(digest.to_le_bytes());
    debug_assert_eq!(header.len(), HEADER_BYTES);
    let own = xxh3_64(&header);
    header.extend(own.to_le_bytes());
    header
}

/// Returns the contents and the KV's digest of a slot with an intact header.
fn parse_header(bytes: &[u8]) -> Option<(BlockContents, u128)> {
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    if xxh3_64(header) != u64::from_le_bytes(*rest.first_chunk::<8>()?) {
        return None;
    }
    let rest = header.strip_prefix(SLOT_MAGIC)?.strip_prefix(&VERSION.to_le_bytes())?;
    let (group, rest) = rest.split_first_chunk::<2>()?;
    let (key, rest) = rest.split_first_chunk::<16>()?;
    let (parent, rest) = rest.split_first_chunk::<16>()?;
    let (tokens, digest) = rest.split_first_chunk::<{ 4 * BLOCK_TOKENS }>()?;
    let mut contents = BlockContents {
        key: BlockHash(u128::from_le_bytes(*key)),
        parent: BlockHash(u128::from_le_bytes(*parent)),
        tokens: [0; BLOCK_TOKENS],
        group: u8::try_from(u16::from_le_bytes(*group)).ok()?,
    };
    let (words, _) = tokens.as_chunks::<4>();
    for (token, word) in contents.tokens.iter_mut().zip(words) {
        *token = u32::from_le_bytes(*word);
    }
    Some((contents, u128::from_le_bytes(*digest.first_chunk::<16>()?)))
}

#[cfg(test)]
impl DiskFile {
    /// Returns a file with slots for which no machine has buffers.
    pub(super) fn with_endless_slots(mut self) -> Self {
        self.slot_bytes = 1 << 60;
        self
    }

    /// Returns the file of this path as if its file system had become read-only.
    pub(super) fn read_only(mut self, path: &Path) -> Self {
        self.file = File::open(path).expect("the file exists");
        self
    }
}

#[cfg(test)]
mod tests {
    use kernels::{BlockId, KvArena, KvFormat};

    use super::*;

    const LAYOUT: KvLayout =
        KvLayout { layer_count: 3, kv_head_count: 2, head_dim: 10, format: KvFormat::F32 };
    const SIZE: u64 = 1 << 20;
    const WEIGHTS: WeightFormat = WeightFormat::F32;

    fn open(path: &Path, size: u64) -> Result<DiskFile, DiskError> {
        DiskFile::open(path, size, (LAYOUT, &KvGroups::default()), WEIGHTS)
    }

    fn contents(key: u128) -> BlockContents {
        let tokens = std::array::from_fn(|index| index as u32 * 3);
        BlockContents { key: BlockHash(key), parent: BlockHash(key + 1), tokens, group: 0 }
    }

    fn filled(file: &DiskFile, byte: u8) -> SlotBuffer {
        let mut buffer = file.buffer().unwrap();
        buffer.block_mut().fill(byte);
        buffer
    }

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    #[test]
    fn saved_block_is_read_again_after_the_file_was_reopened() {
        let folder = folder();
        let path = folder.path().join("kv");
        let file = open(&path, SIZE).unwrap();
        let last = file.slot_count() - 1;
        file.write(last, &contents(7), &mut filled(&file, 5)).unwrap();
        drop(file);
        let file = open(&path, SIZE).unwrap();
        let mut buffer = file.buffer().unwrap();
        let block = RecoveredBlock { slot: last, key: BlockHash(7), group: 0 };
        assert_eq!(file.block(last, &mut buffer).unwrap(), Some(block));
        assert_eq!(file.block(0, &mut buffer).unwrap(), None);
        file.read(last, &contents(7), &mut buffer).unwrap();
        assert!(buffer.block().iter().all(|&byte| byte == 5));
        assert_eq!(buffer.block().len(), LAYOUT.block_bytes());
    }

    #[test]
    fn only_its_user_may_read_the_file_whoever_created_it() {
        let folder = folder();
        let path = folder.path().join("kv");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        let widen = || {
            let permissions = Permissions::from_mode(0o666);
            std::fs::set_permissions(&path, permissions).unwrap();
        };
        open(&path, SIZE).unwrap();
        assert_eq!(mode(), 0o600, "created by the node");
        widen();
        open(&path, SIZE).unwrap();
        assert_eq!(mode(), 0o600, "with blocks of an earlier start");
        std::fs::write(&path, "").unwrap();
        widen();
        open(&path, SIZE).unwrap();
        assert_eq!(mode(), 0o600, "empty, created by an operator");
        std::fs::write(&path, "a file of somebody else, longer than its first page".repeat(100))
            .unwrap();
        widen();
        open(&path, SIZE).unwrap_err();
        assert_eq!(mode(), 0o666, "other contents are left alone");
    }

    #[test]
    fn every_flipped_byte_of_a_slot_is_a_miss() {
        let folder = folder();
        let path = folder.path().join("kv");
        let file = open(&path, SIZE).unwrap();
        file.write(1, &contents(7), &mut filled(&file, 5)).unwrap();
        let plain = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let mut buffer = file.buffer().unwrap();
        let used = (0..HEADER_BYTES + 8).chain((0..LAYOUT.block_bytes()).map(|at| PAGE + at));
        for at in used.step_by(7) {
            let at = file.offset(1) + at as u64;
            let mut byte = [0];
            plain.read_exact_at(&mut byte, at).unwrap();
            plain.write_all_at(&[byte[0] ^ 1], at).unwrap();
            plain.sync_all().unwrap();
            assert!(file.read(1, &contents(7), &mut buffer).is_err(), "byte {at}");
            plain.write_all_at(&byte, at).unwrap();
            plain.sync_all().unwrap();
        }
        file.read(1, &contents(7), &mut buffer).unwrap();
    }

    #[test]
    fn blocks_of_whole_pages_are_read_without_a_buffer_and_checked() {
        let folder = folder();
        let path = folder.path().join("kv");
        let file =
            DiskFile::open(&path, 8 << 20, (WRITER_LAYOUT, &KvGroups::default()), WEIGHTS).unwrap();
        file.write(2, &contents(7), &mut filled(&file, 5)).unwrap();
        let arena = KvArena::host(WRITER_LAYOUT, 3).unwrap();
        let mut block = arena.write(BlockId(1)).unwrap();
        let block = block.host_view_mut().unwrap();
        assert!(DiskFile::reads_into(block));
        assert!(!DiskFile::reads_into(&block[8..]));
        let mut buffer = file.buffer().unwrap();
        file.read_into(2, &contents(7), &mut buffer, block).unwrap();
        assert!(block.iter().all(|&byte| byte == 5));

        let error = file.read_into(2, &contents(8), &mut buffer, block).unwrap_err();
        assert!(matches!(error, SlotError::OtherBlock), "{error}");
        let plain = OpenOptions::new().write(true).open(&path).unwrap();
        let last = file.offset(3) - 1;
        plain.write_all_at(&[6], last).unwrap();
        plain.sync_all().unwrap();
        let error = file.read_into(2, &contents(7), &mut buffer, block).unwrap_err();
        assert!(matches!(error, SlotError::Damaged), "{error}");
        plain.set_len(last).unwrap();
        let error = file.read_into(2, &contents(7), &mut buffer, block).unwrap_err();
        assert!(matches!(error, SlotError::Read(_)), "{error}");
    }

    #[test]
    fn another_block_in_the_slot_is_a_miss() {
        let folder = folder();
        let file = open(&folder.path().join("kv"), SIZE).unwrap();
        file.write(0, &contents(7), &mut filled(&file, 5)).unwrap();
        let mut buffer = file.buffer().unwrap();
        let other_tokens = BlockContents { tokens: [9; BLOCK_TOKENS], ..contents(7) };
        let other_parent = BlockContents { parent: BlockHash(99), ..contents(7) };
        let other_group = BlockContents { group: 1, ..contents(7) };
        for other in [contents(8), other_tokens, other_parent, other_group] {
            let error = file.read(0, &other, &mut buffer).unwrap_err();
            assert!(matches!(error, SlotError::OtherBlock), "{error}");
        }
    }

    #[test]
    fn unusable_file_is_rejected_with_the_reason_and_stays_as_it_was() {
        let folder = folder();
        let path = folder.path().join("kv");
        let reason = |size, layout| {
            DiskFile::open(&path, size, (layout, &KvGroups::default()), WEIGHTS)
                .unwrap_err()
                .to_string()
        };
        assert_eq!(reason(5000, LAYOUT), "5000 bytes hold no block; expected at least 16384");
        let file = open(&path, SIZE).unwrap();
        assert_eq!(reason(SIZE, LAYOUT), "another node uses it; expected a file for each node");
        drop(file);
        let q8 = DiskFile::open(&path, SIZE, (LAYOUT, &KvGroups::default()), WeightFormat::Q8)
            .unwrap_err()
            .to_string();
        assert!(q8.ends_with(", weights q8"), "{q8}");
        let bf16 = reason(SIZE, KvLayout { format: KvFormat::Bf16, ..LAYOUT });
        assert!(bf16.ends_with(", dtype bf16, weights f32"), "{bf16}");
        let windows = KvGroups::of_windows(&[std::num::NonZeroUsize::new(128), None]);
        let grouped = DiskFile::open(&path, SIZE, (LAYOUT, &windows), WEIGHTS);
        let error = grouped.unwrap_err().to_string();
        assert!(error.contains("windows=all,128 groups=10, dtype f32"), "{error}");
        let other = KvLayout { layer_count: 4, ..LAYOUT };
        let error = reason(SIZE, other);
        assert!(error.starts_with("it holds KV blocks of format 1, layout "), "{error}");
        assert!(error.contains("; expected KV blocks of format 1, layout "), "{error}");
        std::fs::write(&path, "something else").unwrap();
        let error = reason(SIZE, LAYOUT);
        assert!(error.starts_with("it holds no KV blocks; expected "), "{error}");
        assert_eq!(std::fs::read(&path).unwrap(), b"something else");
    }

    #[test]
    fn file_that_does_not_fit_the_disk_is_rejected_and_takes_no_space() {
        let folder = folder();
        let path = folder.path().join("kv");
        let error = open(&path, 1 << 60).unwrap_err();
        assert!(matches!(error, DiskError::Allocate { .. }), "{error}");
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }

    /// The variable that makes this test binary a writer that is killed.
    const WRITER: &str = "BATON_TEST_DISK_WRITER";
    const WRITER_LAYOUT: KvLayout =
        KvLayout { layer_count: 30, kv_head_count: 3, head_dim: 64, format: KvFormat::Bf16 };

    /// Fills a block with bytes that follow from its key.
    fn fill(block: &mut [u8], key: u128) {
        let mut state = key as u64 | 1;
        for word in block.as_chunks_mut::<8>().0 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *word = state.to_le_bytes();
        }
    }

    /// Writes random blocks to random slots until the process is killed.
    #[test]
    #[ignore = "the process that killed_writer_leaves_no_wrong_byte starts"]
    fn writer_process() {
        let path = std::env::var_os(WRITER).expect("the path of the file");
        let file = DiskFile::open(
            Path::new(&path),
            4 * SIZE,
            (WRITER_LAYOUT, &KvGroups::default()),
            WEIGHTS,
        )
        .unwrap();
        let mut buffer = file.buffer().unwrap();
        let mut key = u128::from(std::process::id()) << 64;
        loop {
            key += 1;
            let contents = contents(key);
            fill(buffer.block_mut(), key);
            let slot = xxh3_64(&key.to_le_bytes()) % u64::from(file.slot_count());
            file.write(slot as SlotIndex, &contents, &mut buffer).unwrap();
        }
    }

    /// Kills a process that writes, at random moments. BATON_TEST_KILLS sets how often.
    #[test]
    fn killed_writer_leaves_no_wrong_byte() {
        let kills = std::env::var("BATON_TEST_KILLS").map_or(20, |count| count.parse().unwrap());
        let folder = folder();
        let path = folder.path().join("kv");
        let (mut intact, mut torn) = (0, 0);
        for kill in 0..kills {
            let mut writer = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--ignored", "--exact", "tiers::disk_file::tests::writer_process"])
                .env(WRITER, &path)
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
            // The writer has begun when the file has its full size.
            while std::fs::metadata(&path).map_or(0, |data| data.len()) < 2 * SIZE {
                assert!(std::time::Instant::now() < deadline, "the writer does not start");
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let micros = xxh3_64(&[kill as u8, (kill >> 8) as u8]) % 60_000;
            std::thread::sleep(std::time::Duration::from_micros(micros));
            writer.kill().unwrap();
            writer.wait().unwrap();
            let file =
                DiskFile::open(&path, 4 * SIZE, (WRITER_LAYOUT, &KvGroups::default()), WEIGHTS)
                    .unwrap();
            let mut buffer = file.buffer().unwrap();
            for slot in 0..file.slot_count() {
                let Some(block) = file.block(slot, &mut buffer).unwrap() else { continue };
                let key = block.key;
                match file.read(slot, &contents(key.0), &mut buffer) {
                    Ok(()) => {
                        let mut expected = vec![0; buffer.block().len()];
                        fill(&mut expected, key.0);
                        assert!(buffer.block() == expected, "slot {slot} has a wrong byte");
                        intact += 1;
                    }
                    Err(SlotError::Damaged) => torn += 1,
                    Err(error) => panic!("slot {slot}: {error}"),
                }
            }
        }
        println!("{kills} kills: {intact} intact blocks, {torn} torn blocks");
        assert!(intact > 0, "the writer has written");
    }

    #[test]
    fn file_may_grow_and_shrink_between_starts() {
        let folder = folder();
        let path = folder.path().join("kv");
        let file = open(&path, SIZE).unwrap();
        file.write(2, &contents(7), &mut filled(&file, 5)).unwrap();
        let before = file.slot_count();
        drop(file);
        for size in [2 * SIZE, SIZE] {
            let file = open(&path, size).unwrap();
            assert_eq!(file.slot_count() > before, size > SIZE);
            file.read(2, &contents(7), &mut file.buffer().unwrap()).unwrap();
        }
    }
}
