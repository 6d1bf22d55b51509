//! The operating system's boundary: every path, every parser of what the kernel says, every effect.

pub mod root;
