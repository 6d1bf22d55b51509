//! Databases that take part in freezes by the real agent: what is cut while they are held comes up elsewhere with all that they had
//! acknowledged, and nothing that was not held is said to be more than it is.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, clippy::disallowed_methods)]

#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/agent.rs"]
mod agent;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../cluster/authority.rs"]
mod authority;
mod commands;
mod etcd;
mod lab;
mod mariadb;
#[allow(dead_code, reason = "each test program uses a part of it")]
#[path = "../qga/namespace.rs"]
mod namespace;
mod postgres;
mod sql;
mod stand;
mod strangers;
mod together;
