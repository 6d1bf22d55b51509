//! guestlet

fn main() {}
