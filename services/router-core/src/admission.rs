//! Refusals of requests because of load.

use std::time::Duration;

use crate::fair_queue::TooLate;

/// `Retry-After` in seconds where nothing predicts a longer time.
pub const RETRY_AFTER_S: u32 = 1;
/// Maximum `Retry-After` in seconds: longer predictions are unreliable.
const RETRY_AFTER_MAX_S: u32 = 60;

/// A bound on the load is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadBound {
    #[error("the router has {max} requests in flight; at most {max} are allowed")]
    InFlight { max: u32 },
    #[error("{max} requests wait for a node; at most {max} are allowed")]
    Waiting { max: u32 },
    #[error(
        "the caller has its share of the {max} requests that may be in flight; expected fewer \
         requests at a time"
    )]
    ShareInFlight { max: u32 },
    #[error(
        "the caller has its share of the {max} requests that may wait for a node; expected fewer \
         requests at a time"
    )]
    ShareWaiting { max: u32 },
    #[error("{0}")]
    Late(TooLate),
    #[error(
        "cannot read the request body: all bodies being read may hold at most {bytes_max} bytes"
    )]
    Bodies { bytes_max: u32 },
    #[error(
        "the caller has its share of the {bytes_max} bytes that all request bodies being read may hold; expected \
         fewer requests at a time"
    )]
    ShareBodies { bytes_max: u32 },
    #[error("the router is stopping")]
    Stopping,
}

impl LoadBound {
    /// Returns whether the bound is the caller's share, not a bound on all callers.
    pub fn is_of_caller(self) -> bool {
        match self {
            Self::ShareInFlight { .. } | Self::ShareWaiting { .. } | Self::ShareBodies { .. } => {
                true
            }
            Self::Late(late) => late.is_over_share,
            _ => false,
        }
    }
}

/// A request that is refused because of load, and the time after which the caller may retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{full}; retry after {retry_after_s} s")]
pub struct Overload {
    pub full: LoadBound,
    pub retry_after_s: u32,
}

impl From<LoadBound> for Overload {
    fn from(full: LoadBound) -> Self {
        Self { full, retry_after_s: RETRY_AFTER_S }
    }
}

/// Returns a predicted time as `Retry-After`, in seconds.
pub(crate) fn retry_after_s(after: Option<Duration>) -> u32 {
    let seconds = after.map_or(0, |after| after.as_secs_f64().ceil() as u32);
    seconds.clamp(RETRY_AFTER_S, RETRY_AFTER_MAX_S)
}
