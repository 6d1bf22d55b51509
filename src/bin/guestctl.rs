//! guestctl

fn main() {}
