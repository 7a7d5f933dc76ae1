//! Printing to standard output. The reader may close the pipe before the last line, as `head` does:
//! then the process ends quietly. The macros replace those of the standard library, which panic.

use std::{
    fmt,
    io::{self, ErrorKind, Write as _},
    process,
};

macro_rules! print {
    ($($arguments:tt)*) => { crate::print::print(format_args!($($arguments)*)) };
}

macro_rules! println {
    () => { crate::print::print(format_args!("\n")) };
    ($($arguments:tt)*) => { crate::print::print(format_args!("{}\n", format_args!($($arguments)*))) };
}

/// Prints the text. Ends the process if the pipe is closed, and panics if the text cannot be
/// written for another reason.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    match io::stdout().lock().write_fmt(text) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::BrokenPipe => process::exit(0),
        Err(error) => panic!("cannot write to standard output: {error}"),
    }
}
