//! Handshake of a channel: the sender's invitation and the receiver's answer.

use super::super::nccl::UniqueId;
use crate::peer::EXPORT_BYTES_MAX;

const MAGIC: [u8; 8] = *b"BATONNC5";
const UUID_BYTES: usize = 40;

/// Largest number of communicators per link.
pub(super) const LANES_MAX: usize = 2;
/// Largest number of ranks of a node.
pub(super) const PARTS_MAX: usize = 8;
/// Largest number of communicators of a channel.
pub(super) const COMMUNICATORS_MAX: usize = LANES_MAX * PARTS_MAX;

/// The sender's half of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Invitation {
    pub version: i32,
    /// Size of a block with all heads.
    pub block_bytes: u64,
    pub slot_bytes: u64,
    /// Runs of at least this many contiguous bytes are sent without staging.
    pub direct_bytes: u64,
    /// Communicators per link.
    pub lanes: usize,
    pub max_ctas: MaxCtas,
    /// The GPUs of the sender's parts, in order of rank.
    pub uuids: Vec<String>,
}

/// The receiver's half of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub max_ctas: MaxCtas,
    /// The GPUs of the receiver's parts, in order of rank.
    pub uuids: Vec<String>,
    /// One for each communicator.
    pub ids: Vec<UniqueId>,
}

/// The CTAs that one end allows a channel on each GPU; `None` means no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MaxCtas(pub Option<u32>);

impl MaxCtas {
    /// Returns the limit that holds for both ends: the smaller one.
    pub fn with(self, other: Self) -> Option<u32> {
        self.0.into_iter().chain(other.0).min()
    }

    fn to_bytes(self) -> [u8; 4] {
        self.0.unwrap_or(0).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 4]) -> Self {
        Self(Some(u32::from_le_bytes(bytes)).filter(|number| *number > 0))
    }
}

impl Invitation {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&self.version.to_le_bytes());
        for number in [self.block_bytes, self.slot_bytes, self.direct_bytes, self.lanes as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend(self.max_ctas.to_bytes());
        write_uuids(&mut bytes, &self.uuids);
        bytes
    }

    pub fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut reader = Reader::new("invitation", bytes)?;
        let version = i32::from_le_bytes(reader.take()?);
        let mut number = || reader.take().map(u64::from_le_bytes);
        let (block_bytes, slot_bytes, direct_bytes) = (number()?, number()?, number()?);
        let lanes = number()?;
        if !(1..=LANES_MAX as u64).contains(&lanes) {
            return Err(format!("invalid lanes: {lanes}; expected 1 to {LANES_MAX}"));
        }
        let max_ctas = MaxCtas::from_bytes(reader.take()?);
        let uuids = reader.uuids()?;
        reader.end()?;
        let lanes = lanes as usize;
        Ok(Self { version, block_bytes, slot_bytes, direct_bytes, lanes, max_ctas, uuids })
    }
}

impl Answer {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.max_ctas.to_bytes());
        write_uuids(&mut bytes, &self.uuids);
        bytes.extend(self.ids.iter().flat_map(|id| id.0));
        assert!(bytes.len() <= EXPORT_BYTES_MAX, "{} bytes of an answer", bytes.len());
        bytes
    }

    /// `ids` returns the number of communicator ids for the answering node's number of parts.
    pub fn from_bytes(bytes: &[u8], ids: impl Fn(usize) -> usize) -> Result<Self, String> {
        let mut reader = Reader::new("answer", bytes)?;
        let max_ctas = MaxCtas::from_bytes(reader.take()?);
        let uuids = reader.uuids()?;
        let ids = (0..ids(uuids.len())).map(|_| reader.take().map(UniqueId));
        let ids = ids.collect::<Result<_, _>>()?;
        reader.end()?;
        Ok(Self { max_ctas, uuids, ids })
    }
}

fn write_uuids(bytes: &mut Vec<u8>, uuids: &[String]) {
    bytes.push(uuids.len() as u8);
    for uuid in uuids {
        let mut padded = [0; UUID_BYTES];
        padded[..uuid.len()].copy_from_slice(uuid.as_bytes());
        bytes.extend_from_slice(&padded);
    }
}

struct Reader<'a> {
    what: &'static str,
    length: usize,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn new(what: &'static str, bytes: &'a [u8]) -> Result<Self, String> {
        let mut reader = Self { what, length: bytes.len(), rest: bytes };
        let magic: [u8; 8] = reader.take()?;
        if magic != MAGIC {
            let (theirs, ours) = (magic.escape_ascii(), MAGIC.escape_ascii());
            return Err(format!("invalid {what}: it begins with {theirs}; expected {ours}"));
        }
        Ok(reader)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let (what, length) = (self.what, self.length);
        let (taken, rest) = self
            .rest
            .split_first_chunk()
            .ok_or_else(|| format!("invalid {what}: it ends after {length} bytes"))?;
        self.rest = rest;
        Ok(*taken)
    }

    fn uuids(&mut self) -> Result<Vec<String>, String> {
        let [count] = self.take()?;
        if !(1..=PARTS_MAX).contains(&usize::from(count)) {
            return Err(format!("invalid parts: {count}; expected 1 to {PARTS_MAX}"));
        }
        let uuid = |_| {
            let padded: [u8; UUID_BYTES] = self.take()?;
            let uuid = padded.split(|byte| *byte == 0).next().unwrap_or_default();
            Ok(String::from_utf8_lossy(uuid).into_owned())
        };
        (0..count).map(uuid).collect()
    }

    fn end(self) -> Result<(), String> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err(format!("invalid {}: {more} bytes too many", self.what)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID_BYTES: usize = size_of::<UniqueId>();

    fn uuids(count: usize) -> Vec<String> {
        let uuid = |number| format!("GPU-1f2e3d4c-0506-0708-090a-0b0c0d0e0f{number:02}");
        (0..count).map(uuid).collect()
    }

    #[test]
    fn invitation_round_trips_and_malformed_ones_are_rejected() {
        for count in [1, 2, PARTS_MAX] {
            let invitation = Invitation {
                version: 22809,
                block_bytes: 4096,
                slot_bytes: 1 << 25,
                direct_bytes: 1 << 23,
                lanes: 2,
                max_ctas: MaxCtas((count > 1).then_some(count as u32)),
                uuids: uuids(count),
            };
            let bytes = invitation.to_bytes();
            assert!(bytes.len() <= EXPORT_BYTES_MAX);
            assert_eq!(Invitation::from_bytes(&bytes), Ok(invitation));
            let rejected =
                |bytes: &[u8]| Invitation::from_bytes(bytes).expect_err("it is rejected");
            for length in 0..bytes.len() {
                let words = rejected(&bytes[..length]);
                assert!(words.contains(&format!("ends after {length} bytes")), "{words}");
            }
            assert!(rejected(&[&bytes[..], &[0]].concat()).contains("1 bytes too many"));
            let cases = [
                (0, b'b', "begins with bATONNC5; expected BATONNC5"),
                (36, 0, "invalid lanes: 0; expected 1 to 2"),
                (36, 3, "invalid lanes: 3; expected 1 to 2"),
                (43, 1, "invalid lanes: 72057594037927938; expected 1 to 2"),
                (48, 0, "invalid parts: 0; expected 1 to 8"),
                (48, 9, "invalid parts: 9; expected 1 to 8"),
            ];
            for (at, byte, words) in cases {
                let mut other = bytes.clone();
                other[at] = byte;
                assert!(rejected(&other).contains(words), "byte {at}: {}", rejected(&other));
            }
        }
    }

    #[test]
    fn answer_contains_an_id_for_each_communicator() {
        let ids: Vec<UniqueId> = (0..4).map(|byte| UniqueId([byte; ID_BYTES])).collect();
        let max_ctas = MaxCtas(Some(7));
        let answer = Answer { max_ctas, uuids: uuids(2), ids };
        let bytes = answer.to_bytes();
        assert_eq!(Answer::from_bytes(&bytes, |parts| 2 * parts), Ok(answer));
        let few = Answer::from_bytes(&bytes, |parts| 3 * parts).unwrap_err();
        assert!(few.contains("it ends after"), "{few}");
        let many = Answer::from_bytes(&bytes, |parts| parts).unwrap_err();
        assert!(many.contains("256 bytes too many"), "{many}");
        let (ids, uuids) = (vec![UniqueId([1; ID_BYTES]); COMMUNICATORS_MAX], uuids(PARTS_MAX));
        let answer = Answer { max_ctas, uuids, ids };
        assert!(answer.to_bytes().len() <= EXPORT_BYTES_MAX);
    }

    #[test]
    fn smaller_max_ctas_of_both_ends_holds() {
        let agreed = |one, other| MaxCtas(one).with(MaxCtas(other));
        assert_eq!(agreed(Some(4), Some(8)), Some(4));
        assert_eq!(agreed(Some(8), Some(4)), Some(4));
        assert_eq!(agreed(None, Some(4)), Some(4));
        assert_eq!(agreed(Some(4), None), Some(4));
        assert_eq!(agreed(None, None), None);
    }
}
