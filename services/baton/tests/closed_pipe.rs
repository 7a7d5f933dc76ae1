//! Subcommands whose reader closes the pipe, as `head` does.

use std::{io::pipe, process::Command};

#[test]
fn subcommand_with_a_closed_pipe_ends_quietly() {
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["model", "list"]] {
        let (reader, writer) = pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_baton"));
        let output = command.args(arguments).stdout(writer).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), error.as_str()), (Some(0), ""), "{arguments:?}");
    }
}
