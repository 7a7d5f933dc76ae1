//! SmolLM2 with some of its layers, with which tests of clusters compute in less than half of the
//! time.

use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Layers of SmolLM2 that the cut model keeps. With other choices of eight layers the answers
/// repeat one token, so that a lost or repeated token would not show.
const LAYERS: [u32; 8] = [0, 1, 2, 3, 26, 27, 28, 29];

/// Returns the path of the cut model in `folder`, and writes the file if it is not there yet.
pub(crate) fn cut_model(whole: &Path, folder: &Path) -> PathBuf {
    let name = whole.file_name().expect("the path of a file");
    let path = folder.join(format!("layers-{}", LAYERS.len())).join(name);
    if !path.exists() {
        let parent = path.parent().expect("a folder");
        std::fs::create_dir_all(parent).expect("the build folder is writable");
        // Test programs may run side by side.
        let mut file =
            tempfile::NamedTempFile::new_in(parent).expect("the build folder is writable");
        let whole = std::fs::read(whole).expect("the model can be read");
        file.write_all(&cut(&whole))
            .and_then(|()| file.as_file().sync_all())
            .expect("there is space");
        file.persist(&path).expect("the build folder is writable");
    }
    path
}

/// Returns a GGUF file with the layers [`LAYERS`] of this one, renumbered, and everything else as
/// it is.
fn cut(whole: &[u8]) -> Vec<u8> {
    let header = gguf::Header::parse(whole).expect("the model is a GGUF file");
    let alignment = header.alignment as usize;
    let tensors: Vec<(String, &gguf::TensorInfo)> = header
        .tensors()
        .iter()
        .filter_map(|tensor| Some((new_name(&tensor.name)?, tensor)))
        .collect();

    let mut out = whole[..metadata_end(whole, &header)].to_vec();
    out[8..16].copy_from_slice(&(tensors.len() as u64).to_le_bytes());
    let key = b"llama.block_count";
    let value = find(&out, key).expect("a Llama model") + key.len() + size_of::<u32>();
    out[value..value + 4].copy_from_slice(&(LAYERS.len() as u32).to_le_bytes());

    let mut data = Vec::new();
    for (name, tensor) in tensors {
        out.extend(name_bytes(&name));
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
        out.extend(tensor.kind.number().to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        let bytes = tensor.bytes.expect("a supported format") as usize;
        data.extend_from_slice(&whole[tensor.offset as usize..][..bytes]);
        data.resize(data.len().next_multiple_of(alignment), 0);
    }
    out.resize(out.len().next_multiple_of(alignment), 0);
    out.extend(data);
    out
}

/// Returns the offset at which the metadata ends and the directory of tensors begins.
fn metadata_end(whole: &[u8], header: &gguf::Header) -> usize {
    let first = name_bytes(&header.tensors()[0].name);
    find(&whole[..header.data_offset as usize], &first).expect("the header names its tensors")
}

/// Returns a string as GGUF stores it.
fn name_bytes(name: &str) -> Vec<u8> {
    [&(name.len() as u64).to_le_bytes(), name.as_bytes()].concat()
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// Returns the name that a tensor has in the cut model; `None` if its layer is left out.
fn new_name(name: &str) -> Option<String> {
    let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|name| name.split_once('.'))
    else {
        return Some(name.to_owned());
    };
    let layer: u32 = layer.parse().expect("a layer's number");
    let new = LAYERS.iter().position(|&kept| kept == layer)?;
    Some(format!("blk.{new}.{rest}"))
}
