//! The subset of protoc that prost's build scripts use, implemented with protox: `-I DIR`
//! (repeated), `-o OUT` and .proto files. Writes the descriptors of the files and of their imports.
//! Ignores `--include_imports` and `--include_source_info`, whose effects are always on.

#![forbid(unsafe_code)]

use std::{env, error::Error, fs, path::PathBuf, process::ExitCode};

use prost::Message;

fn main() -> ExitCode {
    match run(env::args().skip(1)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("protoc: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut args: impl Iterator<Item = String>) -> Result<(), Box<dyn Error>> {
    let (mut includes, mut files, mut out) = (Vec::new(), Vec::new(), None);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--version" => {
                println!("libprotoc 27.0 (protox)");
                return Ok(());
            }
            "-I" => includes.push(PathBuf::from(args.next().ok_or("-I names no folder")?)),
            "-o" => out = Some(PathBuf::from(args.next().ok_or("-o names no file")?)),
            "--include_imports" | "--include_source_info" => {}
            flag if flag.starts_with('-') => {
                return Err(format!("unknown flag {flag}; expected -I, -o or a file").into());
            }
            file => files.push(PathBuf::from(file)),
        }
    }
    let out = out.ok_or("-o OUT is missing")?;
    let descriptors = protox::compile(files, includes)?;
    fs::write(out, descriptors.encode_to_vec())?;
    Ok(())
}
