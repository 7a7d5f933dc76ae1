//! The directory as a router uses it: events in, health and choices out.

mod breakers;
mod health;
mod predictions;
mod properties;
mod room;
mod selection;
mod world;
