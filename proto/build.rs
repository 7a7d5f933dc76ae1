//! Compiles the .proto files with protox, so that no protoc is needed.

use std::{env, error::Error, fs, path::PathBuf};

use prost::Message;

const FILES: [&str; 5] = [
    "baton/v1/inference.proto",
    "baton/v1/sampling.proto",
    "baton/v1/node.proto",
    "baton/v1/transfer.proto",
    "baton/v1/weights.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    for file in FILES {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(FILES, ["."])?;
    // The reflection service serves these descriptors.
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".")
        // Routers store the stage times of finished requests, serialized by serde.
        .type_attribute("baton.v1.StageTimes", "#[derive(serde::Serialize, serde::Deserialize)]")
        .compile_fds(descriptors)?;
    Ok(())
}
