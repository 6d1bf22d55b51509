//! How long churns last: in `make test` as long as finds what is often wrong, in `make soak` as long as finds what
//! seldom is.

/// `few`, or `many` where `GUESTLET_SOAK` is set.
pub fn steps<N>(few: N, many: N) -> N {
    let soaks = std::env::var_os("GUESTLET_SOAK").is_some_and(|value| !value.is_empty() && value != "0");
    if soaks { many } else { few }
}
