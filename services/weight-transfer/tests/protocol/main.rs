//! Random runs of coordinators and several participants: messages are lost, repeated and reordered,
//! nodes receive damaged bytes, and nodes, coordinators and trainers die at any message. Two
//! updates of operators run at a time, and nodes catch up. Some nodes overwrite their weights in
//! place, and some updates have a seed node.

mod events;
mod node;
mod one_update;
mod several_updates;
mod world;
