//! Checks whether two processes may exchange KV.

use crate::api::Identity;

/// Returns the differences in one line with both fingerprints; `None` if the two may exchange KV.
pub fn difference(ours: &Identity, theirs: &Identity) -> Option<String> {
    let mut fields = Vec::new();
    let mut compare = |field: &str, ours: String, theirs: String| {
        if ours != theirs {
            fields.push(format!("{field} {ours} against {theirs}"));
        }
    };
    compare(
        "model_fingerprint",
        format!("{:032x}", ours.model_fingerprint),
        format!("{:032x}", theirs.model_fingerprint),
    );
    compare("weight_version", ours.weight_version.to_string(), theirs.weight_version.to_string());
    compare("kv_layout", format!("{:?}", ours.kv_layout), format!("{:?}", theirs.kv_layout));
    compare("block_size", ours.block_size.to_string(), theirs.block_size.to_string());
    compare("dtype", format!("{:?}", ours.dtype), format!("{:?}", theirs.dtype));
    compare("tp", ours.tp.to_string(), theirs.tp.to_string());
    let overlap =
        ours.protocol_min.max(theirs.protocol_min) <= ours.protocol_max.min(theirs.protocol_max);
    if !overlap {
        fields.push(format!(
            "protocol {} to {} against {} to {}",
            ours.protocol_min, ours.protocol_max, theirs.protocol_min, theirs.protocol_max
        ));
    }
    if fields.is_empty() {
        return None;
    }
    Some(format!(
        "model {:032x} cannot exchange KV with model {:032x}: {}",
        ours.model_fingerprint,
        theirs.model_fingerprint,
        fields.join(", ")
    ))
}

/// Returns the difference to KV of this model and these weights.
pub fn weights_difference(
    ours: &Identity,
    model_fingerprint: u128,
    weight_version: u64,
) -> Option<String> {
    difference(ours, &Identity { model_fingerprint, weight_version, ..ours.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            model_fingerprint: 0xaa,
            weight_version: 1,
            kv_layout: "layers=2".to_owned(),
            block_size: 16,
            dtype: "bf16".to_owned(),
            tp: 1,
            protocol_min: 1,
            protocol_max: 2,
        }
    }

    #[test]
    fn equal_identities_and_overlapping_protocols_match() {
        let newer = Identity { protocol_min: 2, protocol_max: 3, ..identity() };
        assert_eq!(difference(&identity(), &identity()), None);
        assert_eq!(difference(&identity(), &newer), None);
    }

    #[test]
    fn every_difference_is_listed_with_both_fingerprints() {
        let theirs = Identity {
            model_fingerprint: 0xbb,
            weight_version: 7,
            kv_layout: "layers=3".to_owned(),
            block_size: 32,
            dtype: "f32".to_owned(),
            tp: 2,
            protocol_min: 3,
            protocol_max: 3,
        };
        let line = difference(&identity(), &theirs).expect("nothing is equal");
        for part in [
            "000000000000000000000000000000aa",
            "000000000000000000000000000000bb",
            "weight_version 1 against 7",
            "\"layers=2\" against \"layers=3\"",
            "block_size 16 against 32",
            "\"bf16\" against \"f32\"",
            "tp 1 against 2",
            "protocol 1 to 2 against 3 to 3",
        ] {
            assert!(line.contains(part), "{line} lacks {part}");
        }
    }
}
