//! Which rank of which group a process is.

use std::{
    env, fmt,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    str::FromStr,
};

use kernels::{shard::RANKS_MAX, shared::RegionName};

/// A rank's place, as its process is told on the command line: `<region's file name>:<rank>/<of>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Where the group's ring is; its owner is the node.
    pub region: RegionName,
    pub rank: u32,
    pub of: u32,
}

impl Seat {
    /// By this flag a process learns that it is a rank, and which. Nobody else gives it.
    pub const FLAG: &str = "rank";

    /// This program again, also when its file has another by now, with its own arguments and the flag.
    pub fn command(&self) -> Command {
        let mut arguments = env::args_os();
        let mut command = Command::new("/proc/self/exe");
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        command.args(arguments).arg(format!("--{}", Self::FLAG)).arg(self.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no rank of a group; expected is REGION:RANK/OF")]
pub struct BadSeat {
    text: String,
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.region.file_name(), self.rank, self.of)
    }
}

impl FromStr for Seat {
    type Err = BadSeat;

    fn from_str(text: &str) -> Result<Self, BadSeat> {
        let parse = || {
            let (region, place) = text.split_once(':')?;
            let (rank, of) = place.split_once('/')?;
            let (rank, of) = (rank.parse().ok()?, of.parse().ok()?);
            let seat = Self { region: RegionName::parse(region)?, rank, of };
            (rank < of && of as usize <= RANKS_MAX && seat.to_string() == text).then_some(seat)
        };
        parse().ok_or_else(|| BadSeat { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seats_are_read_as_they_are_written_and_nothing_else_is() {
        let seat = Seat { region: RegionName::own(5, "ranks"), rank: 1, of: 2 };
        assert_eq!(seat.to_string().parse(), Ok(seat.clone()));
        let text = seat.to_string();
        let changed = [("1/2", "2/2"), ("1/2", "1/65"), ("1/2", "01/2"), (":", ""), ("baton", "b")];
        for (from, to) in changed {
            let error = text.replace(from, to).parse::<Seat>().unwrap_err().to_string();
            assert!(error.ends_with("expected is REGION:RANK/OF"), "{error}");
        }
    }
}
