//! The directory as a router uses it: histories in, health and choices out.

mod health;
mod properties;
mod selection;
mod world;
