//! `guestctl trust`: who trusts whom, and how that begins.

pub mod bootstrap;
