//! guestlet-host

fn main() {}
