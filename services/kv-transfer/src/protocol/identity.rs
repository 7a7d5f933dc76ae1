//! Checks whether two processes may exchange KV.

use crate::api::Identity;

/// Returns the differences in one line with both fingerprints; `None` if the two may exchange KV.
pub fn difference(ours: &Identity, theirs: &Identity) -> Option<String> {
    let fields = |identity: &Identity| {
        [
            ("model_fingerprint", format!("{:032x}", identity.model_fingerprint)),
            ("weight_version", identity.weight_version.to_string()),
            ("kv_layout", format!("{:?}", identity.kv_layout)),
            ("block_size", identity.block_size.to_string()),
            ("dtype", format!("{:?}", identity.dtype)),
            ("tp", identity.tp.to_string()),
        ]
    };
    let pairs = fields(ours).into_iter().zip(fields(theirs));
    let mut differences: Vec<String> = pairs
        .filter(|(ours, theirs)| ours != theirs)
        .map(|((field, ours), (_, theirs))| format!("{field} {ours} against {theirs}"))
        .collect();
    let overlap =
        ours.protocol_min.max(theirs.protocol_min) <= ours.protocol_max.min(theirs.protocol_max);
    if !overlap {
        differences.push(format!(
            "protocol {} to {} against {} to {}",
            ours.protocol_min, ours.protocol_max, theirs.protocol_min, theirs.protocol_max
        ));
    }
    (!differences.is_empty()).then(|| {
        format!(
            "model {:032x} cannot exchange KV with model {:032x}: {}",
            ours.model_fingerprint,
            theirs.model_fingerprint,
            differences.join(", ")
        )
    })
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
