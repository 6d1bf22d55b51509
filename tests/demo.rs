//! Demo
fn main() {}
