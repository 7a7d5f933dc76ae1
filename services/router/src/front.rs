//! The state that all requests share: the models, the nodes, and the bounds.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    admission::{Admission, BodyRoom},
    models::Models,
    nodes::Nodes,
    request_core::RecoveryPolicy,
};

/// Interval of SSE keep-alives: less than the idle limits of common proxies (60 s).
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Bytes of all bodies that are being read or parsed: 128 KiB, about 16 Ki tokens, for each of 1024
/// requests. Growing buffers may hold twice as much, so the router stays under a few hundred MiB.
const BODIES_BYTES_MAX: u64 = 128 << 20;

/// Time to receive a request of the largest size over a slow connection.
const REQUEST_READ_MAX: Duration = Duration::from_secs(30);

/// Settings of the router: the configuration's `router` section, and bounds that only tests change.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    pub router: config::Router,
    /// Limit on the open files of the process.
    pub open_files_max: u64,
    /// Bytes of all bodies that are being read or parsed.
    pub bodies_bytes_max: u64,
    /// Time-out from a request's head to its last byte.
    pub request_read_max: Duration,
    /// Silence of an SSE stream after which the router sends a keep-alive comment.
    pub keep_alive: Duration,
}

impl RouterSettings {
    pub fn new(router: config::Router, open_files_max: u64) -> Self {
        Self {
            open_files_max,
            // A single body of the largest size must find room.
            bodies_bytes_max: BODIES_BYTES_MAX.max(router.body_bytes_max.bytes()),
            request_read_max: REQUEST_READ_MAX,
            keep_alive: KEEP_ALIVE,
            router,
        }
    }
}

/// The state that all requests of both APIs share.
pub struct Front {
    pub settings: RouterSettings,
    pub models: Models,
    pub nodes: Nodes,
    pub bodies: BodyRoom,
    pub admission: Admission,
    /// Ends the requests that are still in flight when the drain time-out has passed.
    pub cut: CancellationToken,
}

impl Front {
    pub fn new(settings: RouterSettings, models: Models, nodes: Nodes) -> Self {
        Self {
            bodies: BodyRoom::new(settings.bodies_bytes_max),
            admission: Admission::new(settings.router.requests_max),
            models,
            nodes,
            cut: CancellationToken::new(),
            settings,
        }
    }

    /// Whether new requests are rejected.
    pub fn is_stopping(&self) -> bool {
        self.admission.is_closed()
    }

    /// Whether some model is served, by nodes whose peer connections are set up.
    pub fn serves(&self) -> bool {
        let is_served = |name| self.nodes.serving(name).decode_nodes > 0;
        self.nodes.are_connected() && self.models.all().iter().any(|model| is_served(&model.name))
    }

    pub fn recovery_policy(&self) -> RecoveryPolicy {
        RecoveryPolicy {
            attempts_max: self.settings.router.attempts_max,
            busy_timeout: self.settings.router.waiting_timeout,
            idle_timeout: self.settings.router.idle_timeout,
        }
    }
}
