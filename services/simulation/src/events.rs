//! The events of a run.

use std::time::Instant;

use cluster::MemberChange;
use kv_transfer::api::TransferId;
use proto::v1::ObserveEvent;
use simulation_base::ConnectionId;

use crate::{
    calls::{CallKey, NodeCall, NodeMessage},
    nodes::{Connection, Stream},
    process_io::Input,
    scenario::{Fault, RequestPlan},
    transport::ChunkData,
    updates::coordinators::UpdateEvent,
};

/// An event of the run.
#[derive(Debug)]
pub(crate) enum SimEvent {
    Input {
        process: usize,
        input: Input,
    },
    /// A call reaches the process that runs on the host at this time.
    Call {
        connection: Connection,
        key: CallKey,
        call: Box<NodeCall>,
    },
    Observe(Stream),
    /// A router receives a message of a call.
    Message {
        router: usize,
        key: CallKey,
        message: NodeMessage,
    },
    Observed {
        stream: Stream,
        event: Option<Box<ObserveEvent>>,
    },
    ConnectionEnds(Connection),
    /// The router's keep-alive times out if the process still does not answer.
    KeepAlive {
        connection: Connection,
        process: usize,
    },
    Member {
        router: usize,
        change: MemberChange,
    },
    /// A process writes its record to etcd.
    Register {
        process: usize,
    },
    /// etcd removes the record of a process that does not keep it alive.
    Expire {
        process: usize,
    },
    RequestArrives {
        request: usize,
    },
    /// The next request of those that follow the scenario.
    NextRequest(Box<RequestPlan>),
    ClientLeaves {
        request: usize,
    },
    // Data connections.
    Connect {
        from: usize,
        to: usize,
        closings: u64,
        give_up: Instant,
    },
    SendChunk {
        process: usize,
        transfer: TransferId,
        chunk: u32,
    },
    ChunkBegins {
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    },
    ChunkEnds {
        from: usize,
        to: usize,
        connection: ConnectionId,
        data: ChunkData,
    },
    Release {
        process: usize,
        transfer: TransferId,
    },
    Update(UpdateEvent),
    Fault(FaultStep),
}

/// A step of a fault and of its repair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FaultStep {
    Begin(Fault),
    /// A new process starts on a host whose process is dead.
    Start {
        host: usize,
    },
    Resume {
        process: usize,
    },
    Heal {
        a: usize,
        b: usize,
    },
    /// The drain timeout is over: everything in flight ends.
    DrainTimeout {
        process: usize,
    },
    Exit {
        process: usize,
    },
    EtcdRecovers,
}

/// Messages with the same key keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Order {
    ToHost(Connection),
    Members(usize),
    Call(CallKey),
    Observe(Stream),
    /// From the engine thread to the transfer thread of a process, and back.
    Commands(usize),
    TransferEvents(usize),
}
