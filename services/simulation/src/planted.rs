//! Bugs that a test plants into the outputs of a process, to see that the checks find them.

use proto::v1::{Failure, FailureKind, decode_event::Event as DecodeEvent};

use crate::{calls::NodeMessage, process_io::Output};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlantedBug {
    /// A decode node sends another token than it sampled.
    WrongToken,
    /// A decode node sends a token under two indices.
    DuplicatedToken,
    /// The decode node on this host fails every attempt at its first token.
    FailsAttempts { host: usize },
    /// The transport never releases the blocks of a cancelled transfer.
    NeverReleases,
}

impl PlantedBug {
    pub(crate) fn mutate(self, mut outputs: Vec<Output>) -> Vec<Output> {
        for output in &mut outputs {
            if let (Self::FailsAttempts { host }, Output::Message { connection, message, .. }) =
                (self, &mut *output)
                && connection.host == host
                && let NodeMessage::Decode(event) = message
                && let Some(DecodeEvent::Tokens(_)) = &event.event
            {
                let message = "planted".to_owned();
                let failure = Failure { kind: FailureKind::Internal.into(), message };
                event.event = Some(DecodeEvent::Failure(failure));
            } else if let Output::Message { message: NodeMessage::Decode(event), .. } = output
                && let Some(DecodeEvent::Tokens(event)) = &mut event.event
                && event.first_index > 3
            {
                match self {
                    Self::WrongToken => event.tokens[0].id ^= 1,
                    Self::DuplicatedToken => event.tokens.extend_from_within(..),
                    Self::NeverReleases | Self::FailsAttempts { .. } => {}
                }
            }
        }
        if self == Self::NeverReleases {
            outputs.retain(|output| !matches!(output, Output::Release { .. }));
        }
        outputs
    }
}
