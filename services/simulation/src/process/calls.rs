//! Calls of routers, checked and answered as the gRPC service does.

use cluster::Role;
use node::{
    attempt::NewAttempt,
    node_core::{Call, CallId, Reply},
    wire,
};
use router_core::AttemptSide;

use super::{OpenCall, Process};
use crate::{
    calls::{CallKey, NodeCall, NodeMessage},
    grammars,
    nodes::Connection,
    process_io::Output,
};

impl Process {
    /// Checks the call as the gRPC service does, then gives it to the core.
    pub(super) fn call(&mut self, connection: Connection, key: CallKey, call: NodeCall) {
        let traceparent = String::new();
        let (role, attempt) = match call {
            NodeCall::Prefill(request) => {
                let attempt = NewAttempt::send(request, traceparent, &self.limits, self.now);
                (Role::Prefill, attempt)
            }
            NodeCall::Decode(request) => {
                let attempt =
                    NewAttempt::receive_or_compute(request, traceparent, &self.limits, self.now);
                (Role::Decode, attempt)
            }
        };
        let takes = self.record.role == role || self.record.both_roles;
        assert!(takes, "the router called a node of another role");
        let constrained = attempt.and_then(|mut attempt| {
            if let Some(grammar) = attempt.grammar.take() {
                grammars::constrain(&mut attempt.sequence, &grammar)?;
            }
            Ok(attempt)
        });
        let attempt = match constrained {
            Ok(attempt) => attempt,
            Err(refusal) => {
                let message = NodeMessage::Rejected(refusal.into());
                return self.outputs.push(Output::Message { connection, key, message });
            }
        };
        self.calls_begun += 1;
        let number = self.calls_begun;
        let call = Call {
            number,
            request_id: attempt.request_id,
            weight_version: attempt.weight_version,
            prompt_hash: attempt.prompt_hash(),
            peer: attempt.peer,
            sequence: attempt.sequence,
        };
        self.transfers.transport.expect_prompt(
            key.transfer,
            &call.sequence.tokens,
            call.weight_version,
        );
        if let Some(peer) = &call.peer {
            self.peers.insert(key.transfer, peer.epoch);
        }
        self.calls.insert(number, OpenCall { connection, key, call: call.id() });
        self.core.handle_call(call, self.now);
    }

    /// Sends a reply as the gRPC service does.
    pub(super) fn reply(&mut self, call: CallId, reply: Reply) {
        let Some(open) = self.calls.get(&call.number) else { return };
        let (connection, key) = (open.connection, open.key);
        let mut send = |message| self.outputs.push(Output::Message { connection, key, message });
        if let Reply::Rejected(refusal) = reply {
            return send(NodeMessage::Rejected(refusal.into()));
        }
        if reply == Reply::Accepted {
            return send(NodeMessage::Accepted);
        }
        let is_last = reply.is_last();
        let message = match key.side {
            AttemptSide::Prefill => wire::prefill_event(reply).map(NodeMessage::Prefill),
            AttemptSide::Decode => wire::decode_event(reply).map(NodeMessage::Decode),
        };
        message.into_iter().for_each(&mut send);
        if is_last {
            send(NodeMessage::End);
        }
    }
}
