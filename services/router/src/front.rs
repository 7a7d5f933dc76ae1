//! What every request shares: the model's text side, the nodes, and the bounds.

use std::{sync::Arc, time::Duration};

use telemetry::RouterMetrics;
use text::ModelText;
use tokio_util::sync::CancellationToken;

use crate::{
    admission::{Admission, WaitingRoom},
    journey::recovery::RecoveryLimits,
    nodes::Nodes,
    request::text_workers::TextWorkers,
};

/// Without a decode node a request waits so long for one to come back, less than the three seconds
/// in which a request is to be over after a kill.
const ABSENT_MAX: Duration = Duration::from_secs(2);

/// Less than the idle limits of common proxies (60 s).
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How much the router takes on. From the configuration's `router` section.
#[derive(Clone, Debug)]
pub struct FrontSettings {
    /// The name under which clients ask for the model.
    pub model: String,
    pub body_bytes_max: u64,
    /// Answers in work, waiting ones included.
    pub requests_max: u32,
    /// Answers that wait until a node has room.
    pub waiting_max: u32,
    pub waiting_timeout: Duration,
    pub attempts_max: u32,
    /// For a whole request when the client names no time.
    pub timeout: Duration,
    /// The longest time that a client may ask for.
    pub timeout_max: Duration,
    pub slow_client_timeout: Duration,
    pub slow_client_events: usize,
    /// A stream that is silent for so long says that it lives.
    pub keep_alive: Duration,
}

impl FrontSettings {
    pub fn new(router: &config::Router, model: String) -> Self {
        Self {
            model,
            body_bytes_max: router.body_bytes_max.bytes(),
            requests_max: router.requests_max,
            waiting_max: router.waiting_max,
            waiting_timeout: router.waiting_timeout,
            attempts_max: router.attempts_max,
            timeout: router.timeout,
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
    pub text: TextWorkers,
    pub nodes: Nodes,
    pub admission: Admission,
    pub waiting: WaitingRoom,
    pub metrics: RouterMetrics,
    /// Ends requests that are still in work when draining took too long.
    pub cut: CancellationToken,
}

impl Front {
    pub fn new(
        settings: FrontSettings,
        text: Arc<ModelText>,
        nodes: Nodes,
        metrics: RouterMetrics,
    ) -> Self {
        Self {
            admission: Admission::new(settings.requests_max),
            waiting: WaitingRoom::new(settings.waiting_max),
            text: TextWorkers::new(text),
            nodes,
            metrics,
            cut: CancellationToken::new(),
            settings,
        }
    }

    /// No new requests are taken.
    pub fn is_stopping(&self) -> bool {
        self.admission.is_closed()
    }

    pub fn recovery_limits(&self) -> RecoveryLimits {
        RecoveryLimits {
            attempts_max: self.settings.attempts_max,
            busy_max: self.settings.waiting_timeout,
            absent_max: ABSENT_MAX,
        }
    }
}
