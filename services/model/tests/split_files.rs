//! GGUF models split into several files.

mod common;

use std::{
    fs,
    path::{Path, PathBuf},
};

use common::{Element, Entry};
use model::{Checkpoint, LoadFormat, ModelError};

const PARTS: usize = 3;

fn part(folder: &Path, number: usize) -> PathBuf {
    folder.join(format!("tiny-{number:05}-of-{PARTS:05}.gguf"))
}

/// Writes the tiny model in three parts. The first part has no tensors, as splitting tools can
/// produce. `change` may alter each part's split keys: part index, part count and tensor count.
fn write(folder: &Path, change: impl Fn(usize, &mut [Option<u32>; 3])) -> Checkpoint {
    let dummy = common::tiny_llama3();
    let tensors = common::gguf_tensors(&dummy, Element::F32);
    let (front, back) = tensors.split_at(tensors.len() / 2);
    for (index, tensors) in [&[], front, back].into_iter().enumerate() {
        let all = (front.len() + back.len()) as u32;
        let mut keys = [Some(index as u32), Some(PARTS as u32), Some(all)];
        change(index, &mut keys);
        let [number, count, all] = keys.map(|key| key.map(Entry::U32));
        let mut entries =
            vec![("split.no", number), ("split.count", count), ("split.tensors.count", all)];
        if index > 0 {
            // Later parts need not have the model's configuration.
            entries.push(("general.architecture", None));
        }
        let bytes = common::gguf_with(dummy.config(), tensors, &entries);
        fs::write(part(folder, index + 1), bytes).unwrap();
    }
    dummy
}

fn open(path: &Path) -> Result<Checkpoint, ModelError> {
    Checkpoint::open(path, LoadFormat::Auto)
}

fn refusal(folder: &Path) -> String {
    open(&part(folder, 1)).unwrap_err().to_string()
}

#[test]
fn all_parts_form_the_whole_model() {
    let folder = tempfile::tempdir().unwrap();
    let dummy = write(folder.path(), |_, _| ());
    let split = open(&part(folder.path(), 1)).unwrap();
    let whole = folder.path().join("whole.gguf");
    let tensors = common::gguf_tensors(&dummy, Element::F32);
    fs::write(&whole, common::gguf(dummy.config(), &tensors)).unwrap();
    let whole = open(&whole).unwrap();
    assert_eq!(split.config(), whole.config());
    // The split into files does not affect the fingerprint.
    assert_eq!(split.model_fingerprint().unwrap(), whole.model_fingerprint().unwrap());
    for weight in model::Weight::all(whole.config()) {
        assert_eq!(common::elements(&split, weight), common::elements(&whole, weight));
    }
}

#[test]
fn a_missing_part_is_named() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), |_, _| ());
    fs::remove_file(part(folder.path(), 2)).unwrap();
    let missing = part(folder.path(), 2);
    let expected = format!("part 2 of 3 is missing: there is no file {}", missing.display());
    assert!(refusal(folder.path()).ends_with(&expected), "{}", refusal(folder.path()));
}

#[test]
fn opening_a_later_part_names_the_first() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), |_, _| ());
    let message = open(&part(folder.path(), 2)).unwrap_err().to_string();
    let expected = "this is part 2 of 3; open the first, \"tiny-00001-of-00003.gguf\", with the \
                    others beside it";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn a_part_with_an_invalid_name_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), |_, _| ());
    let renamed = folder.path().join("model.gguf");
    fs::rename(part(folder.path(), 1), &renamed).unwrap();
    let message = open(&renamed).unwrap_err().to_string();
    let expected = "\"model.gguf\" is part of a split model; expected a name that ends in \
                    \"-00001-of-00003.gguf\"";
    assert!(message.ends_with(expected), "{message}");
}

#[test]
fn contradictory_parts_are_rejected() {
    type Change = fn(usize, &mut [Option<u32>; 3]);
    let cases: [(Change, &str); 6] = [
        (
            |index, keys| keys[0] = Some([0, 2, 2][index]),
            "tiny-00002-of-00003.gguf: the parts are of different models: split.no is 2; expected 1",
        ),
        (
            |index, keys| keys[1] = Some([3, 3, 4][index]),
            "tiny-00003-of-00003.gguf: the parts are of different models: split.count is 4; \
             expected 3",
        ),
        (
            |index, keys| keys[2] = [keys[2], None, keys[2]][index],
            "tiny-00002-of-00003.gguf: the parts are of different models: split.tensors.count is \
             absent; expected 31",
        ),
        (
            |_, keys| keys[2] = Some(7),
            "tiny-00001-of-00003.gguf: all parts together have 31 tensors; expected 7 as the first part \
             states",
        ),
        (|_, keys| keys[0] = None, "metadata key \"split.no\" is missing; expected u32"),
        (
            |_, keys| keys[1] = Some(u32::MAX),
            "expected a name that ends in \"-00001-of-4294967295.gguf\"",
        ),
    ];
    for (change, expected) in cases {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), change);
        let message = refusal(folder.path());
        assert!(message.ends_with(expected), "{message}");
    }
}

#[test]
fn a_tensor_in_two_parts_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), |_, keys| keys[2] = None);
    // The third file repeats the second part's tensors.
    let second = fs::read(part(folder.path(), 2)).unwrap();
    let key = b"split.no";
    let at = second.windows(key.len()).position(|bytes| bytes == key).unwrap() + key.len() + 4;
    let mut third = second;
    third[at..at + 4].copy_from_slice(&2u32.to_le_bytes());
    fs::write(part(folder.path(), 3), third).unwrap();
    let message = refusal(folder.path());
    assert!(message.ends_with("tensor \"token_embd.weight\" appears twice"), "{message}");
}
