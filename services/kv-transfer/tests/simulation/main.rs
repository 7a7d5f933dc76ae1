//! Transfer cores on a simulated network with faults.
//!
//! A failing case prints its seed and parameters, which reproduce the run.

mod bounds;
mod circular_wait;
mod every_moment;
mod hostile_peers;
mod node;
mod random_faults;
mod world;
