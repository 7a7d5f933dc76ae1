//! Cores joined by a simulated network: everything that may happen, in every order.
//!
//! A failing case prints its seed and parameters; the same numbers give the same run.

mod bounds;
mod circular_wait;
mod every_state;
mod node;
mod storms;
mod strangers;
mod world;
