//! Files with false sizes, truncated or damaged files: each gives a typed error, never a panic.

use std::io::Write;

use gguf::{GgufError, Header, TensorKind};
use proptest::prelude::*;

/// Writer of the elements of a GGUF file.
#[derive(Clone, Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn start(version: u32, tensors: u64, entries: u64) -> Self {
        Bytes(b"GGUF".to_vec()).u32(version).u64(tensors).u64(entries)
    }
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }
    fn text(self, text: &str) -> Self {
        let mut bytes = self.u64(text.len() as u64);
        bytes.0.extend(text.as_bytes());
        bytes
    }
    fn u32_entry(self, key: &str, value: u32) -> Self {
        self.text(key).u32(4).u32(value)
    }
    fn tensor(self, name: &str, dims: &[u64], kind: u32, offset: u64) -> Self {
        let bytes = self.text(name).u32(dims.len() as u32);
        dims.iter().fold(bytes, |bytes, &dim| bytes.u64(dim)).u32(kind).u64(offset)
    }
    fn pad(mut self, multiple: usize) -> Self {
        self.0.resize(self.0.len().next_multiple_of(multiple), 0);
        self
    }
    fn data(mut self, len: usize) -> Self {
        self.0.extend((0..len).map(|i| i as u8));
        self
    }
    fn parse(&self) -> Result<Header, GgufError> {
        Header::parse(&self.0)
    }
    fn message(&self) -> String {
        self.parse().unwrap_err().to_string()
    }
}

/// Returns a small file with every value type and tensors of several kinds, one of them
/// unsupported.
fn good_file() -> Bytes {
    let mut bytes = Bytes::start(3, 6, 16)
        .text("general.architecture")
        .u32(8)
        .text("llama")
        .u32_entry("general.alignment", 64)
        .text("tokens")
        .u32(9)
        .u32(8)
        .u64(3)
        .text("a")
        .text("\u{120}the")
        .text("")
        .text("types")
        .u32(9)
        .u32(5)
        .u64(2)
        .u32(1)
        .u32(u32::MAX)
        .text("nested")
        .u32(9)
        .u32(9)
        .u64(1)
        .u32(4)
        .u64(1)
        .u32(7);
    for (value_type, len) in
        [(0, 1), (1, 1), (2, 2), (3, 2), (5, 4), (6, 4), (7, 1), (10, 8), (11, 8), (12, 8), (4, 4)]
    {
        bytes = bytes.text(&format!("scalar {value_type}")).u32(value_type);
        bytes.0.extend(std::iter::repeat_n(0x3f, len));
    }
    bytes
        .tensor("f32", &[3], 0, 0)
        .tensor("f16", &[2, 3], 1, 64)
        .tensor("q4_1", &[64, 2], 3, 128)
        .tensor("q8_0", &[32, 1], 8, 256)
        .tensor("bf16", &[4], 30, 320)
        .tensor("q2_k", &[256], 10, 384)
        .pad(64)
        .data(448)
}

#[test]
fn every_type_and_kind_is_read_from_memory_and_from_a_file() {
    let bytes = good_file();
    let header = bytes.parse().unwrap();
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&bytes.0).unwrap();
    let from_file = Header::read_from(file.path()).unwrap();
    assert_eq!(header.metadata, from_file.metadata);
    assert_eq!(header.tensors(), from_file.tensors());

    assert_eq!(header.version, 3);
    assert_eq!(header.alignment, 64);
    assert_eq!(header.metadata.require::<&str>("general.architecture").unwrap(), "llama");
    assert_eq!(header.metadata.require::<&[String]>("tokens").unwrap(), ["a", "\u{120}the", ""]);
    assert_eq!(header.metadata.require::<&[i32]>("types").unwrap(), [1, -1]);
    assert_eq!(header.metadata.require::<f32>("scalar 6").unwrap().to_bits(), 0x3f3f_3f3f);
    assert!(header.metadata.require::<bool>("scalar 7").unwrap());

    let sizes: Vec<_> = header.tensors().iter().map(|t| (t.kind, t.bytes)).collect();
    let expected = [
        (TensorKind::F32, Some(12)),
        (TensorKind::F16, Some(12)),
        (TensorKind::Q4_1, Some(80)),
        (TensorKind::Q8_0, Some(34)),
        (TensorKind::Bf16, Some(8)),
        (TensorKind::Other(10), None),
    ];
    assert_eq!(sizes, expected);
    let q4_1 = header.tensor("q4_1").unwrap();
    assert_eq!(q4_1.offset, header.data_offset + 128);
    assert_eq!(q4_1.dims.iter().product::<u64>(), 128);
}

#[test]
fn version_2_is_read_and_others_are_named() {
    assert_eq!(Bytes::start(2, 0, 0).parse().unwrap().version, 2);
    assert_eq!(Bytes::start(1, 0, 0).message(), "unsupported GGUF version 1; expected 2 or 3");
    assert!(matches!(Bytes::start(3 << 24, 0, 0).parse(), Err(GgufError::BigEndian)));
    assert!(matches!(Header::parse(b"GGML\x03\0\0\0"), Err(GgufError::NotGguf { .. })));
    assert!(matches!(Header::parse(b""), Err(GgufError::HeaderTruncated { .. })));
}

#[test]
fn absurd_counts_and_lengths_are_rejected_before_allocation() {
    for absurd in [1 << 20, 1 << 40, u64::MAX / 4, u64::MAX] {
        let files = [
            Bytes::start(3, absurd, 0),
            Bytes::start(3, 0, absurd),
            Bytes::start(3, 0, 1).u64(absurd).pad(64),
            Bytes::start(3, 0, 1).text("k").u32(8).u64(absurd).pad(64),
            Bytes::start(3, 0, 1).text("k").u32(9).u32(6).u64(absurd).pad(64),
            Bytes::start(3, 0, 1).text("k").u32(9).u32(8).u64(absurd).pad(64),
            Bytes::start(3, 0, 1).text("k").u32(9).u32(9).u64(absurd).pad(64),
            Bytes::start(3, 1, 0).u64(absurd).pad(64),
        ];
        for (index, file) in files.iter().enumerate() {
            let error = file.parse().unwrap_err();
            assert!(
                matches!(error, GgufError::HeaderTruncated { .. }),
                "count {absurd}, file {index}: {error}"
            );
        }
    }
}

#[test]
fn a_header_that_fits_its_file_is_still_bounded() {
    // A sparse file: the string has the claimed length of one gigabyte.
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&Bytes::start(3, 0, 1).text("k").u32(8).u64(1 << 30).0).unwrap();
    file.as_file().set_len(2 << 30).unwrap();
    let error = Header::read_from(file.path()).unwrap_err();
    assert!(matches!(error, GgufError::HeaderTooLarge { .. }), "{error}");
}

#[test]
fn paths_that_cannot_be_read_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let error = Header::read_from(folder.path()).unwrap_err().to_string();
    let path = folder.path().display();
    assert_eq!(error, format!("cannot read {path}: not a regular file"));
    let error = Header::read_from(folder.path().join("absent")).unwrap_err();
    assert!(matches!(error, GgufError::Io { action: "open", .. }), "{error}");
}

#[test]
fn a_truncated_file_names_tensor_and_offset() {
    let mut bytes = good_file();
    let bf16 = bytes.parse().unwrap().tensor("bf16").unwrap().offset;
    bytes.0.truncate(bf16 as usize + 7);
    let len = bytes.0.len();
    assert_eq!(
        bytes.message(),
        format!(
            "the file is truncated: tensor \"bf16\" needs 8 bytes at offset {bf16}, \
             the file has {len}"
        )
    );
}

#[test]
fn bad_tensors_are_named() {
    let one = |dims: &[u64], kind, offset| {
        Bytes::start(3, 1, 0).tensor("t", dims, kind, offset).pad(32).data(256)
    };
    let cases = [
        (one(&[], 0, 0), "tensor \"t\" has 0 dimensions; expected 1 to 4"),
        (one(&[1; 5], 0, 0), "tensor \"t\" has 5 dimensions; expected 1 to 4"),
        (one(&[4, 0], 0, 0), "tensor \"t\" has dimensions [4, 0]: a dimension is 0"),
        (
            one(&[1 << 40, 1 << 40], 0, 0),
            "tensor \"t\" has dimensions [1099511627776, 1099511627776]: the number of elements \
             overflows",
        ),
        (
            one(&[1 << 62], 0, 0),
            "tensor \"t\" has dimensions [4611686018427387904]: the number of bytes overflows",
        ),
        (
            one(&[33], 3, 0),
            "tensor \"t\" has dimensions [33]: the first is no multiple of the kind's block",
        ),
        (one(&[4], 0, 8), "tensor \"t\" begins at data offset 8, not a multiple of 32"),
    ];
    for (file, message) in cases {
        assert_eq!(file.message(), message);
    }
    for offset in [u64::MAX - 31, 1 << 40] {
        let error = one(&[4], 0, offset).parse().unwrap_err();
        assert!(matches!(error, GgufError::TensorTruncated { .. }), "{error}");
        // The end is unknown when the kind is unsupported, but the beginning is known.
        let error = one(&[4], 77, offset).parse().unwrap_err();
        assert!(matches!(error, GgufError::TensorTruncated { .. }), "{error}");
    }
    let twice = Bytes::start(3, 2, 0).tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 0).pad(64);
    assert_eq!(twice.message(), "tensor \"t\" appears twice");
}

#[test]
fn bad_metadata_is_named() {
    let twice = Bytes::start(3, 0, 2).u32_entry("k", 1).u32_entry("k", 2);
    assert_eq!(twice.message(), "metadata key \"k\" appears twice");
    let unknown = Bytes::start(3, 0, 1).text("k").u32(13).u32(1);
    assert_eq!(unknown.message(), "metadata key \"k\" has value type 13; expected 0 to 12");
    for alignment in [0, 3, 48] {
        assert_eq!(
            Bytes::start(3, 0, 1).u32_entry("general.alignment", alignment).message(),
            format!("general.alignment is {alignment}; expected a power of two")
        );
    }
    let mut deep = Bytes::start(3, 0, 1).text("k").u32(9);
    for _ in 0..1000 {
        deep = deep.u32(9).u64(1);
    }
    assert!(matches!(deep.parse(), Err(GgufError::NestedTooDeep { .. })));
    let mut latin1 = Bytes::start(3, 0, 1).text("k").u32(8).u64(1);
    latin1.0.push(0xe9);
    assert_eq!(latin1.message(), "the value of metadata key \"k\" at offset 45 is not valid UTF-8");
}

#[test]
fn every_truncation_of_a_good_file_is_an_error() {
    let bytes = good_file().0;
    // The last tensor has an unknown size, so its known end is its beginning.
    let last = Header::parse(&bytes).unwrap().tensors()[5].offset as usize;
    for len in 0..last {
        Header::parse(&bytes[..len]).expect_err(&format!("{len} bytes were enough"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn flipped_bits_never_panic(flips in prop::collection::vec((0usize..1200, 0u8..8), 1..6)) {
        let mut bytes = good_file().0;
        let len = bytes.len();
        for (index, bit) in flips {
            bytes[index % len] ^= 1 << bit;
        }
        check_bounds(&bytes);
    }

    #[test]
    fn overwritten_numbers_never_panic(index in 0usize..1200, value: u64, len in 0usize..2000) {
        let mut bytes = good_file().0;
        let index = index % (bytes.len() - 8);
        bytes[index..index + 8].copy_from_slice(&value.to_le_bytes());
        bytes.truncate(len);
        check_bounds(&bytes);
    }

    #[test]
    fn random_bytes_after_a_valid_start_never_panic(
        noise in prop::collection::vec(any::<u8>(), 0..400),
        tensors in 0u64..4,
        entries in 0u64..4,
    ) {
        let mut bytes = Bytes::start(3, tensors, entries).0;
        bytes.extend(noise);
        check_bounds(&bytes);
    }
}

/// Asserts that every accepted tensor lies within the file.
fn check_bounds(bytes: &[u8]) {
    let Ok(header) = Header::parse(bytes) else { return };
    for tensor in header.tensors() {
        assert!(tensor.offset + tensor.bytes.unwrap_or(0) <= bytes.len() as u64);
        assert!(tensor.dims.iter().product::<u64>() > 0);
    }
}
