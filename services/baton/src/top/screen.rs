//! The terminal of `baton top`: an alternate screen, and single keys without echo.

use std::{
    fmt::Write as _,
    future::pending,
    io::{self, IsTerminal, Write, stdin, stdout},
    time::Duration,
};

use anyhow::{Context, Result};
use rustix::termios::{
    InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcgetwinsize,
    tcsetattr,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::table::cut;

/// Changes to the alternate screen without a cursor, and back.
const ENTER: &str = "\x1b[?1049h\x1b[?25l";
const LEAVE: &str = "\x1b[?25h\x1b[?1049l";
/// Size of a terminal that does not tell its size.
const LINES: usize = 24;
const COLUMNS: usize = 80;
/// Byte of ctrl-c.
const CONTROL_C: u8 = 3;
/// Interval in which keys are read.
const KEYS_INTERVAL: Duration = Duration::from_millis(50);

/// An event of the terminal.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// The key q or ctrl-c, or a signal that ends the process.
    Quit,
    Resized,
}

/// The drawn screen. Dropping it restores the terminal.
pub(super) struct Screen {
    keyboard: Option<Keyboard>,
    stop_signals: [Signal; 3],
    resizes: Signal,
}

impl Screen {
    pub(super) fn open() -> Result<Self> {
        let ends = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = ends.map(signal);
        let stop_signals = [interrupt?, terminate?, hangup?];
        let resizes = signal(SignalKind::window_change())?;
        let keyboard = match stdin().is_terminal() {
            true => Some(Keyboard::open().context("cannot read keys of the terminal")?),
            false => None,
        };
        write(ENTER)?;
        Ok(Self { keyboard, stop_signals, resizes })
    }

    /// Draws the printable lines that `view` returns for the height of the terminal. The first
    /// line is the title.
    pub(super) fn draw(&self, view: impl FnOnce(usize) -> Vec<String>) -> Result<()> {
        let size = tcgetwinsize(stdout()).ok();
        let size = size.map(|size| (usize::from(size.ws_row), usize::from(size.ws_col)));
        let (lines, columns) =
            size.filter(|size| size.0 > 0 && size.1 > 0).unwrap_or((LINES, COLUMNS));
        write(&frame(&view(lines), lines, columns))
    }

    /// Waits for an event. Cancel safe.
    pub(super) async fn input(&mut self) -> Result<Input> {
        let [interrupt, terminate, hangup] = &mut self.stop_signals;
        let keys = async {
            match &self.keyboard {
                Some(keyboard) => keyboard.quit().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = interrupt.recv() => Ok(Input::Quit),
            _ = terminate.recv() => Ok(Input::Quit),
            _ = hangup.recv() => Ok(Input::Quit),
            _ = self.resizes.recv() => Ok(Input::Resized),
            quit = keys => quit.map(|()| Input::Quit).context("cannot read keys of the terminal"),
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = write(LEAVE);
    }
}

/// Returns what a terminal of this size gets. No line wraps.
fn frame(lines: &[String], lines_max: usize, columns: usize) -> String {
    let mut frame = String::from("\x1b[H");
    for (index, line) in lines.iter().take(lines_max).enumerate() {
        // After a full line the cursor stands on its last character, which \x1b[K would erase.
        let line = cut(line, columns.saturating_sub(1));
        let _ = match index {
            0 => write!(frame, "\x1b[1m{line}\x1b[0m\x1b[K"),
            _ => write!(frame, "\r\n{line}\x1b[K"),
        };
    }
    frame.push_str("\x1b[J");
    frame
}

fn write(text: &str) -> Result<()> {
    let mut stdout = stdout().lock();
    let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    written.context("cannot write to the terminal")
}

/// Standard input without echo and line editing. Dropping it restores both.
struct Keyboard {
    before: Termios,
}

impl Keyboard {
    fn open() -> io::Result<Self> {
        let before = tcgetattr(stdin())?;
        let mut modes = before.clone();
        // Without ISIG, ctrl-z does not stop the process on the alternate screen. Without IXON,
        // ctrl-s does not stop the output.
        modes.local_modes -=
            LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG | LocalModes::IEXTEN;
        modes.input_modes -= InputModes::IXON;
        // A read returns at once.
        modes.special_codes[SpecialCodeIndex::VMIN] = 0;
        modes.special_codes[SpecialCodeIndex::VTIME] = 0;
        tcsetattr(stdin(), OptionalActions::Flush, &modes)?;
        Ok(Self { before })
    }

    /// Waits for a key that quits.
    async fn quit(&self) -> io::Result<()> {
        let mut keys = [0; 64];
        loop {
            let count = rustix::io::read(stdin(), &mut keys)?;
            if keys[..count].iter().any(|key| matches!(*key, b'q' | CONTROL_C)) {
                return Ok(());
            }
            tokio::time::sleep(KEYS_INTERVAL).await;
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = tcsetattr(stdin(), OptionalActions::Flush, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_neither_wraps_nor_scrolls() {
        let lines = ["title".to_owned(), "模型".to_owned(), "third".to_owned()];
        assert_eq!(frame(&lines, 2, 4), "\x1b[H\x1b[1mtit\x1b[0m\x1b[K\r\n模\x1b[K\x1b[J");
        assert_eq!(frame(&[], 2, 4), "\x1b[H\x1b[J");
    }
}
