//! The directory as a router uses it: events in, health and choices out.

mod breakers;
mod capacity;
mod health;
mod moves;
mod predictions;
mod properties;
mod selection;
mod world;
