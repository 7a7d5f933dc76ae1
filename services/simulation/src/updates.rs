//! Updates of the weights: their messages, and nodes that catch up.
//!
//! A coordinator belongs to a router and dies with it. Calls, replies and questions between nodes
//! are datagrams: the network loses, delays, duplicates and reorders them. They have random numbers
//! of their own.

pub(crate) mod coordinators;
pub(crate) mod plan;
#[cfg(test)]
mod tests;

use std::time::Duration;

use weight_transfer::{
    Coordinator, CoordinatorCall, CoordinatorPhase, NodeReply, UpdateId, WeightVersion,
};

use self::{
    coordinators::{Update, UpdateEvent},
    plan::{Decision, UpdatePlan},
};
use crate::{
    calls::UpdatedNode,
    event_loop::Simulation,
    events::{FaultStep, SimEvent},
    process_io::{Input, ProcessState, WeightsInput, WeightsOutput},
    scenario::Fault,
    weights::Weights,
};

/// Time between two calls to a node.
const TICK: Duration = Duration::from_millis(25);
const CATCH_UP_INTERVAL: Duration = Duration::from_secs(1);
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after which no catch-up begins, so that every node has weights when the run ends.
const CATCH_UPS_END: Duration = Duration::from_secs(10);

impl Simulation {
    /// Begins an operator's update on the nodes that the router knows. A router runs one at a time.
    pub(crate) fn begin_update(&mut self, plan: UpdatePlan) {
        let is_running = |it: &Update| it.plan.router == plan.router && it.expected.is_none();
        let model = &self.scenario.models[plan.model].name;
        let nodes = self.routers[plan.router].weight_nodes(model);
        if !nodes.is_empty() && !self.updates.running.iter().any(is_running) {
            let id = UpdateId::of_operator(self.updates.random.id());
            self.start_update(id, plan, nodes, None);
        }
    }

    fn start_update(
        &mut self,
        id: UpdateId,
        plan: UpdatePlan,
        nodes: Vec<UpdatedNode>,
        expected: Option<WeightVersion>,
    ) {
        let now = self.clock.now();
        let names = nodes.iter().map(|node| format!("node-{}", node.host)).collect();
        let commits_at_once = expected.is_none() && plan.decision == Decision::CommitAtOnce;
        let coordinator = Coordinator::new(now, id, names, now + plan.timeout, commits_at_once);
        self.updates.running.push(Update {
            id,
            plan,
            called_at: vec![None; nodes.len()],
            nodes,
            coordinator: if plan.has_seed { coordinator.with_seed(0) } else { coordinator },
            began: now,
            decisive_calls: 0,
            expected,
        });
        self.clock.after(Duration::ZERO, SimEvent::Update(UpdateEvent::Tick(id)));
    }

    /// Ends the coordinators of a router that has died.
    pub(crate) fn coordinators_die(&mut self, router: usize) {
        let died = self.updates.running.extract_if(.., |update| update.plan.router == router);
        self.coverage.add("coordinators lost", died.count() as u64);
        self.updates.committed.retain(|_, (of, _)| *of != router);
    }

    pub(crate) fn update_event(&mut self, event: UpdateEvent) {
        match event {
            UpdateEvent::Tick(id) => self.tick(id),
            UpdateEvent::Call(call) => {
                let process = self.hosts[call.host].process;
                if self.processes[process].state == ProcessState::Dead {
                    let (id, node) = (call.id, call.node);
                    let reply = NodeReply::Unreachable { reason: "connection refused".to_owned() };
                    self.weights_output(process, WeightsOutput::Reply { id, node, reply });
                } else {
                    self.input(process, Input::Weights(WeightsInput::Call(call)));
                }
            }
            UpdateEvent::Reply { id, node, reply } => {
                let now = self.clock.now();
                if let Some(update) = self.updates.running.iter_mut().find(|it| it.id == id) {
                    update.called_at[node] = None;
                    update.coordinator.handle(now, node, reply);
                }
            }
            UpdateEvent::CatchUp { plan, version } => self.catch_up(plan, version),
        }
    }

    fn tick(&mut self, id: UpdateId) {
        let now = self.clock.now();
        let running = &mut self.updates.running;
        let Some(index) = running.iter().position(|update| update.id == id) else { return };
        running[index].advance(now);
        if running[index].coordinator.is_over() {
            let update = running.remove(index);
            return self.update_ended(&update);
        }
        let plan = running[index].plan;
        for call in running[index].due_calls(now) {
            let is_commit = matches!(call.call, CoordinatorCall::Commit { .. });
            let is_decisive = is_commit || call.call == CoordinatorCall::Begin;
            let event = || SimEvent::Update(UpdateEvent::Call(Box::new(call.clone())));
            if !self.send_update(event) && is_commit {
                self.coverage.count("commits lost");
            }
            let update = &mut self.updates.running[index];
            update.decisive_calls += u32::from(is_decisive);
            if is_decisive && plan.router_dies_after == Some(update.decisive_calls) {
                let death = Fault::RestartRouter { router: plan.router };
                return self.fault_step(FaultStep::Begin(death));
            }
        }
        self.clock.after(TICK, SimEvent::Update(UpdateEvent::Tick(id)));
    }

    fn update_ended(&mut self, update: &Update) {
        let plan = update.plan;
        let (version, missed) = match update.coordinator.phase() {
            CoordinatorPhase::Committed { version, missed } => (*version, missed.len()),
            _ => return self.coverage.count("updates aborted"),
        };
        if update.expected.is_some() {
            self.coverage.add("nodes caught up", u64::from(missed == 0));
            return;
        }
        self.coverage.count("updates committed");
        self.coverage.add("commits missed", missed as u64);
        self.updates.committed.insert(plan.model, (plan.router, version));
        let event = SimEvent::Update(UpdateEvent::CatchUp { plan, version });
        self.clock.after(CATCH_UP_INTERVAL, event);
    }

    /// Begins updates of the nodes that do not have the weights of the model's last committed
    /// update.
    fn catch_up(&mut self, plan: UpdatePlan, version: WeightVersion) {
        let UpdatePlan { router, model, .. } = plan;
        if self.updates.committed.get(&model) != Some(&(router, version))
            || self.clock.elapsed() > CATCH_UPS_END
        {
            return;
        }
        let again = SimEvent::Update(UpdateEvent::CatchUp { plan, version });
        self.clock.after(CATCH_UP_INTERVAL, again);
        let plan = UpdatePlan {
            has_seed: false,
            timeout: CATCH_UP_TIMEOUT,
            trainer_dies_after: None,
            router_dies_after: None,
            ..plan
        };
        let nodes = self.routers[router].weight_nodes(&self.scenario.models[model].name);
        for node in nodes.into_iter().filter(|node| node.version != version) {
            // A node takes part in one update at a time, and an operator's update comes first.
            let is_of_node = |it: &Update| it.nodes.iter().any(|other| other.epoch == node.epoch);
            if !self.updates.running.iter().any(is_of_node) {
                let id = UpdateId::of_catch_up(self.updates.random.id());
                self.start_update(id, plan, vec![node], Some(version));
            }
        }
    }

    /// Sends a datagram. Returns whether it arrives.
    fn send_update(&mut self, event: impl Fn() -> SimEvent) -> bool {
        let delays = self.updates.network.datagram((), ());
        delays.iter().for_each(|delay| self.clock.after(*delay, event()));
        !delays.is_empty()
    }

    /// Sends a message of a node.
    pub(crate) fn weights_output(&mut self, from: usize, output: WeightsOutput) {
        let (to, input) = match output {
            WeightsOutput::Reply { id, node, reply } => {
                self.send_update(|| {
                    SimEvent::Update(UpdateEvent::Reply { id, node, reply: reply.clone() })
                });
                return;
            }
            WeightsOutput::Question { to, id } => {
                (to, WeightsInput::Question { id, from: self.processes[from].epoch })
            }
            WeightsOutput::Committed { to, id, version } => {
                (to, WeightsInput::PeerCommitted { id, version })
            }
        };
        let process = self.by_epoch[&to];
        if !self.network.is_cut(from, process) {
            let input = Input::Weights(input);
            self.send_update(|| SimEvent::Input { process, input: input.clone() });
        }
    }

    /// Checks that no two processes have used different bytes under one version.
    pub(crate) fn check_weights(&mut self, process: usize) {
        let node = &self.processes[process];
        let Some(Weights { version, bytes }) = node.weights.in_use() else { return };
        let model = self.scenario.nodes[node.host].model;
        let first = self.updates.used.entry((model, *version)).or_insert_with(|| bytes.clone());
        assert_eq!(*first, *bytes, "{} has different bytes under version {version}", node.name);
    }
}
