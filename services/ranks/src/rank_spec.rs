//! Identity of a rank process.

use std::{
    env, fmt,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
    str::FromStr,
};

use kernels::{shard::RANKS_MAX, shared::RegionName};

/// Group and number of a rank. On the command line: `<region's file name>:<rank>/<of>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankSpec {
    /// Shared-memory region of the group, owned by the node.
    pub region: RegionName,
    pub rank: u32,
    pub of: u32,
}

impl RankSpec {
    /// Flag that starts a process as a rank. Only the node sets it.
    pub const FLAG: &str = "rank";

    /// Returns the command that runs this program's own executable, even if its file was replaced,
    /// with the arguments of this process and the flag.
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

impl fmt::Display for RankSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}/{}", self.region.file_name(), self.rank, self.of)
    }
}

impl FromStr for RankSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = || {
            let (region, place) = text.split_once(':')?;
            let (rank, of) = place.split_once('/')?;
            let (rank, of) = (rank.parse().ok()?, of.parse().ok()?);
            let spec = Self { region: RegionName::parse(region)?, rank, of };
            (rank < of && of as usize <= RANKS_MAX && spec.to_string() == text).then_some(spec)
        };
        parse().ok_or_else(|| format!("invalid rank {text:?}; expected REGION:RANK/OF"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_spec_round_trips_and_invalid_text_is_rejected() {
        let spec = RankSpec { region: RegionName::own(5, "ranks"), rank: 1, of: 2 };
        assert_eq!(spec.to_string().parse(), Ok(spec.clone()));
        let text = spec.to_string();
        let changed = [("1/2", "2/2"), ("1/2", "1/65"), ("1/2", "01/2"), (":", ""), ("baton", "b")];
        for (from, to) in changed {
            let error = text.replace(from, to).parse::<RankSpec>().unwrap_err();
            assert!(error.ends_with("expected REGION:RANK/OF"), "{error}");
        }
    }
}
