//! Demo
fn main(){}
