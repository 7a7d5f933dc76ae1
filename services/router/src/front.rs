//! What every request shares: the models, the nodes, and the bounds.

use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::{
    admission::{Admission, BodyRoom},
    journey::recovery::RecoveryLimits,
    models::Models,
    nodes::Nodes,
};

/// Without a decode node a request waits so long for one to come back, less than the three seconds
/// in which a request is to be over after a kill.
const ABSENT_MAX: Duration = Duration::from_secs(2);

/// Less than the idle limits of common proxies (60 s).
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// All bodies that are being read or parsed: 128 KiB, some 16 Ki tokens, for each of 1024 requests.
/// Buffers that grow may hold twice that, so the router stays under a few hundred MiB.
const BODIES_BYTES_MAX: u64 = 128 << 20;

/// A request of the largest size over a slow line; then the client gave up.
const REQUEST_READ_MAX: Duration = Duration::from_secs(30);

/// How much the router takes on. From the configuration's `router` section.
#[derive(Clone, Debug)]
pub struct FrontSettings {
    /// Further names for models: an alias and a model's own name.
    pub aliases: Vec<(String, String)>,
    pub body_bytes_max: u64,
    /// All bodies that are being read or parsed.
    pub bodies_bytes_max: u64,
    /// From a request's head to its last byte.
    pub request_read_max: Duration,
    /// Answers in work, waiting ones included.
    pub requests_max: u32,
    /// Answers of all models that wait until a node has room.
    pub waiting_max: u32,
    pub waiting_timeout: Duration,
    pub attempts_max: u32,
    /// For a whole request when the client names no time.
    pub timeout: Duration,
    /// How long an attempt's node may be silent.
    pub idle_timeout: Duration,
    /// The longest time that a client may ask for.
    pub timeout_max: Duration,
    pub slow_client_timeout: Duration,
    pub slow_client_events: usize,
    /// A stream that is silent for so long says that it lives.
    pub keep_alive: Duration,
}

impl FrontSettings {
    pub fn new(router: &config::Router) -> Self {
        let aliases = router.aliases.iter();
        Self {
            aliases: aliases.map(|pair| (pair.name.clone(), pair.value.clone())).collect(),
            body_bytes_max: router.body_bytes_max.bytes(),
            // The largest body that is allowed must find room when it is alone.
            bodies_bytes_max: BODIES_BYTES_MAX.max(router.body_bytes_max.bytes()),
            request_read_max: REQUEST_READ_MAX,
            requests_max: router.requests_max,
            waiting_max: router.waiting_max,
            waiting_timeout: router.waiting_timeout,
            attempts_max: router.attempts_max,
            timeout: router.timeout,
            idle_timeout: router.idle_timeout,
            timeout_max: router.timeout_max,
            slow_client_timeout: router.slow_client_timeout,
            slow_client_events: router.slow_client_events as usize,
            keep_alive: KEEP_ALIVE,
        }
    }
}

/// Shared by all requests, whichever API they come by.
pub struct Front {
    pub settings: FrontSettings,
    pub models: Models,
    pub nodes: Nodes,
    pub bodies: BodyRoom,
    pub admission: Admission,
    /// Ends requests that are still in work when draining took too long.
    pub cut: CancellationToken,
}

impl Front {
    pub fn new(settings: FrontSettings, models: Models, nodes: Nodes) -> Self {
        Self {
            bodies: BodyRoom::new(settings.bodies_bytes_max),
            admission: Admission::new(settings.requests_max),
            models,
            nodes,
            cut: CancellationToken::new(),
            settings,
        }
    }

    /// No new requests are taken.
    pub fn is_stopping(&self) -> bool {
        self.admission.is_closed()
    }

    /// Some model is served, by nodes that have met.
    pub fn serves(&self) -> bool {
        let is_served = |name| self.nodes.serving(name).decode_nodes > 0;
        self.nodes.are_introduced() && self.models.all().iter().any(|model| is_served(&model.name))
    }

    pub fn recovery_limits(&self) -> RecoveryLimits {
        RecoveryLimits {
            attempts_max: self.settings.attempts_max,
            busy_max: self.settings.waiting_timeout,
            absent_max: ABSENT_MAX,
        }
    }
}
