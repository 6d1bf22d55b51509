//! Any bytes and any calls on a QGA channel, to the end: what the commands make of them.
#![no_main]

#[allow(dead_code)]
#[path = "../checks.rs"]
mod checks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| checks::dispatch::dispatch(bytes));
