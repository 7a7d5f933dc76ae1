//! The frames of a `tcp` data connection: a header, then one chunk's blocks in order without gaps.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | `BKV1` |
//! | 4..8 | chunk, little-endian |
//! | 8..24 | transfer id, big-endian |
//! | 24..32 | bytes that follow the header, little-endian |
//! | 32..40 | xxh3-64 of bytes 0..32, little-endian |
//!
//! The header's checksum detects a stream that is out of sync. The payload's xxh3 is known only
//! after the payload was sent, so `DONE` carries it.

use xxhash_rust::xxh3::xxh3_64;

use crate::api::TransferId;

const MAGIC: [u8; 4] = *b"BKV1";
pub const HEADER_BYTES: usize = 40;
const CHECKED_BYTES: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub transfer: TransferId,
    pub chunk: u32,
    pub payload_bytes: u64,
}

impl Header {
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[8..24].copy_from_slice(&self.transfer.to_bytes());
        bytes[24..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        let check = xxh3_64(&bytes[..CHECKED_BYTES]);
        bytes[32..40].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Returns `None` for an invalid header.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let check = u64::from_le_bytes(bytes[32..40].try_into().ok()?);
        if bytes[0..4] != MAGIC || xxh3_64(&bytes[..CHECKED_BYTES]) != check {
            return None;
        }
        Some(Self {
            chunk: u32::from_le_bytes(bytes[4..8].try_into().ok()?),
            transfer: TransferId::from_bytes(&bytes[8..24])?,
            payload_bytes: u64::from_le_bytes(bytes[24..32].try_into().ok()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips_and_any_flipped_bit_is_rejected() {
        let header =
            Header { transfer: TransferId(7 << 100), chunk: 3, payload_bytes: u64::MAX - 1 };
        let bytes = header.to_bytes();
        assert_eq!(Header::from_bytes(&bytes), Some(header));
        for bit in 0..8 * HEADER_BYTES {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::from_bytes(&changed), None);
        }
    }
}
