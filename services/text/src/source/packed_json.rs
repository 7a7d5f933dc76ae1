//! Reads vocabulary and merges from JSON without a heap string for each token.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error, IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::gguf_file::split_merge;
use crate::packed::PackedStrings;

/// `model.vocab`: an object that maps tokens to ids.
#[derive(Debug, Default)]
pub(super) struct PackedVocabulary {
    pub strings: PackedStrings,
    pub ids: Vec<u32>,
}

impl<'de> Deserialize<'de> for PackedVocabulary {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabularyVisitor;
        impl<'de> Visitor<'de> for VocabularyVisitor {
            type Value = PackedVocabulary;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("model.vocab as an object of tokens and their ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut vocabulary = PackedVocabulary::default();
                while map.next_key_seed(PushString(&mut vocabulary.strings))?.is_some() {
                    vocabulary.ids.push(map.next_value()?);
                }
                Ok(vocabulary)
            }

            /// Skips the list that other tokenizer models have here. The error of the later check
            /// of `model.type` names the model.
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                while seq.next_element::<IgnoredAny>()?.is_some() {}
                Ok(PackedVocabulary::default())
            }
        }
        deserializer.deserialize_any(VocabularyVisitor)
    }
}

/// `model.merges`: a list of `"a b"` or of `["a", "b"]`, packed as pairs.
#[derive(Debug, Default)]
pub(super) struct PackedMerges(pub PackedStrings);

impl<'de> Deserialize<'de> for PackedMerges {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Merges;
        impl<'de> Visitor<'de> for Merges {
            type Value = PackedMerges;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("model.merges as a list")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut pairs = PackedStrings::default();
                while seq.next_element_seed(Merge(&mut pairs))?.is_some() {}
                Ok(PackedMerges(pairs))
            }
        }
        deserializer.deserialize_seq(Merges)
    }
}

fn push<E: Error>(strings: &mut PackedStrings, string: &str) -> Result<(), E> {
    if strings.push(string) { Ok(()) } else { Err(E::custom("the tokens exceed 4 GiB")) }
}

/// Deserializer seed that appends one string.
struct PushString<'a>(&'a mut PackedStrings);

impl<'de> DeserializeSeed<'de> for PushString<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for PushString<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a token")
    }

    fn visit_str<E: Error>(self, string: &str) -> Result<(), E> {
        push(self.0, string)
    }
}

/// Deserializer seed that appends the two strings of one merge.
struct Merge<'a>(&'a mut PackedStrings);

impl<'de> DeserializeSeed<'de> for Merge<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Merge<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "merge {} as \"a b\" or [\"a\", \"b\"]", self.0.len() / 2)
    }

    fn visit_str<E: Error>(self, merge: &str) -> Result<(), E> {
        let (left, right) = split_merge(self.0.len() / 2, merge).map_err(E::custom)?;
        push(self.0, left)?;
        push(self.0, right)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        let wrong = |index: usize| {
            move || A::Error::custom(format!("merge {index} is not a list of two tokens"))
        };
        let index = self.0.len() / 2;
        for _ in 0..2 {
            seq.next_element_seed(PushString(self.0))?.ok_or_else(wrong(index))?;
        }
        match seq.next_element::<IgnoredAny>()? {
            None => Ok(()),
            Some(_) => Err(wrong(index)()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merges(json: &str) -> Result<Vec<String>, String> {
        let merges: PackedMerges = serde_json::from_str(json).map_err(|e| e.to_string())?;
        Ok((0..merges.0.len()).map(|at| merges.0.get(at).to_owned()).collect())
    }

    #[test]
    fn merges_of_both_forms_are_parsed() {
        assert_eq!(merges(r#"["a b", ["c", "d e"]]"#).unwrap(), ["a", "b", "c", "d e"]);
    }

    #[test]
    fn malformed_merges_are_reported_by_index() {
        let message = merges(r#"["a b", "ab"]"#).unwrap_err();
        assert!(message.contains("merge 1 is \"ab\""), "{message}");
        let message = merges(r#"[["a", "b", "c"]]"#).unwrap_err();
        assert!(message.contains("merge 0 is not a list of two tokens"), "{message}");
        let message = merges(r#"["a b", 7]"#).unwrap_err();
        assert!(message.contains("merge 1 as"), "{message}");
    }

    #[test]
    fn vocabulary_needs_u32_ids_and_unescapes_tokens() {
        let parse = serde_json::from_str::<PackedVocabulary>;
        assert!(parse(r#"{"a": 4294967296}"#).is_err());
        assert!(parse(r#"{"a": -1}"#).is_err());
        assert!(parse(r#"{"a": "x"}"#).is_err());
        assert_eq!(parse(r#"{"a\n": 3}"#).unwrap().strings.get(0), "a\n");
    }
}
