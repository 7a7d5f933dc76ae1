//! Bytes that each token represents.

use crate::{error::VocabularyError, vocabulary::Vocabulary};

/// Conversion of a token's string to bytes. Text is the concatenated bytes of its tokens, read as
/// UTF-8; invalid UTF-8 becomes U+FFFD.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Decoding {
    /// GPT-2's alphabet: one visible character for each byte.
    #[default]
    ByteLevel,
    /// SentencePiece's conversion.
    Pieces {
        /// Replacements within a token, in order: `▁` by a space. Never by a longer string.
        replacements: Vec<(String, String)>,
        /// Whether `<0x41>` is the byte 0x41.
        byte_fallback: bool,
        /// Character, and how many of it are dropped from the start of a text.
        strip_start: Option<(char, usize)>,
        /// Whether added tokens represent their text unchanged, without replacements.
        keeps_added: bool,
    },
}

impl Decoding {
    fn append(&self, token: &str, bytes: &mut Vec<u8>) {
        match self {
            Decoding::ByteLevel => {
                let start = bytes.len();
                for char in token.chars() {
                    match byte_of(char) {
                        Some(byte) => bytes.push(byte),
                        // Characters outside the alphabet: an added token, which
                        // represents its own text.
                        None => {
                            bytes.truncate(start);
                            bytes.extend_from_slice(token.as_bytes());
                            return;
                        }
                    }
                }
            }
            Decoding::Pieces { replacements, byte_fallback, .. } => {
                if *byte_fallback && let Some(byte) = byte_token(token) {
                    bytes.push(byte);
                    return;
                }
                let mut text = token.to_owned();
                for (from, to) in replacements {
                    text = text.replace(from.as_str(), to);
                }
                bytes.extend_from_slice(text.as_bytes());
            }
        }
    }
}

/// Returns the byte that `<0x41>` names.
pub(crate) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// Returns the byte that a character of GPT-2's alphabet represents. Visible Latin-1 characters
/// represent themselves; the other 68 bytes are U+0100 and up.
fn byte_of(char: char) -> Option<u8> {
    match char as u32 {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(code as u8),
        code @ 0x100..=0x120 => Some((code - 0x100) as u8),
        code @ 0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Bytes of all tokens, by id.
#[derive(Clone, Debug)]
pub(crate) struct TokenBytes {
    bytes: Box<[u8]>,
    ends: Box<[u32]>,
}

impl TokenBytes {
    /// Computes the bytes of all tokens. `added` lists added tokens, whose form may differ from the
    /// vocabulary's. `silent` ids (placeholders of the format; sorted) represent nothing.
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        added: impl Fn(u32) -> Option<String>,
        decoding: &Decoding,
        silent: &[u32],
    ) -> Result<Self, VocabularyError> {
        let mut bytes = Vec::new();
        let mut ends = Vec::with_capacity(vocabulary.size() as usize);
        for id in 0..vocabulary.size() {
            let shown = silent.binary_search(&id).is_err();
            if let Some(token) = vocabulary.string(id).filter(|_| shown) {
                let keeps_added = matches!(decoding, Decoding::Pieces { keeps_added: true, .. });
                match added(id) {
                    Some(token) if keeps_added => bytes.extend_from_slice(token.as_bytes()),
                    Some(token) => decoding.append(&token, &mut bytes),
                    None => decoding.append(token, &mut bytes),
                }
            }
            match u32::try_from(bytes.len()) {
                Ok(end) => ends.push(end),
                Err(_) => return Err(VocabularyError::TooLarge),
            }
        }
        Ok(Self { bytes: bytes.into(), ends: ends.into() })
    }

    pub(crate) fn get(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] as usize };
        Some(&self.bytes[start..end])
    }

    /// Returns the bytes of the longest token.
    pub(crate) fn longest(&self) -> usize {
        (0..self.ends.len() as u32)
            .filter_map(|id| self.get(id))
            .map(<[u8]>::len)
            .max()
            .unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::packed::PackedStrings;

    fn bytes(decoding: &Decoding, token: &str) -> Vec<u8> {
        let mut bytes = Vec::new();
        decoding.append(token, &mut bytes);
        bytes
    }

    fn pieces() -> Decoding {
        Decoding::Pieces {
            replacements: vec![("▁".into(), " ".into())],
            byte_fallback: true,
            strip_start: Some((' ', 1)),
            keeps_added: false,
        }
    }

    #[test]
    fn the_byte_level_alphabet_is_a_bijection() {
        let mut seen = [0; 256];
        for code in 0..0x200 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                seen[usize::from(byte)] += 1;
            }
        }
        assert_eq!(seen, [1; 256]);
        assert_eq!(bytes(&Decoding::ByteLevel, "Ġhi"), b" hi");
        assert_eq!(bytes(&Decoding::ByteLevel, "Ċ"), b"\n");
        assert_eq!(bytes(&Decoding::ByteLevel, "Ã©"), "é".as_bytes());
    }

    #[test]
    fn added_tokens_outside_the_byte_level_alphabet_are_literal() {
        assert_eq!(bytes(&Decoding::ByteLevel, "<my token>"), b"<my token>");
        assert_eq!(bytes(&Decoding::ByteLevel, "<|im_end|>"), b"<|im_end|>");
    }

    #[test]
    fn sentence_piece_tokens_decode_spaces_and_bytes() {
        assert_eq!(bytes(&pieces(), "▁a▁b"), b" a b");
        assert_eq!(bytes(&pieces(), "<0xE2>"), [0xe2]);
        assert_eq!(bytes(&pieces(), "<0x+2>"), b"<0x+2>");
        assert_eq!(bytes(&pieces(), "<0xE>"), b"<0xE>");
    }

    #[test]
    fn skipped_and_missing_ids_decode_to_nothing() {
        let mut strings = PackedStrings::default();
        assert!(["a", "[PAD3]", "bc"].iter().all(|token| strings.push(token)));
        let vocabulary = Vocabulary::new(&strings, &[0, 3, 2]).unwrap();
        let table = TokenBytes::new(&vocabulary, |_| None, &Decoding::ByteLevel, &[3]).unwrap();
        let all: Vec<Option<&[u8]>> = (0..5).map(|id| table.get(id)).collect();
        assert_eq!(all, [Some(&b"a"[..]), Some(b""), Some(b"bc"), Some(b""), None]);
        assert_eq!(table.longest(), 2);
    }
}
