//! Paths and names that are received from the other end. Pure.

/// Longest path in bytes, by Linux' limit.
pub const MAX_PATH: usize = 4095;
/// Longest name in bytes.
pub const MAX_NAME: usize = 255;
/// Limit of the components of a path.
pub const MAX_DEPTH: usize = 256;

/// Returns whether this is a valid name of an entry in a directory, without any other component.
pub fn is_name(name: &[u8]) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name != b"."
        && name != b".."
        && !name.iter().any(|byte| matches!(byte, b'/' | 0))
}

/// Splits a path below a directory into its components; none for the directory itself.
///
/// # Errors
/// Fails with a description of what is wrong.
pub fn parts(path: &[u8]) -> Result<Vec<&[u8]>, &'static str> {
    if path.is_empty() {
        return Ok(Vec::new());
    }
    if path.len() > MAX_PATH {
        return Err("has more than 4095 bytes");
    }
    let parts: Vec<_> = path.split(|byte| *byte == b'/').collect();
    if parts.len() > MAX_DEPTH {
        return Err("has more than 256 parts");
    }
    if parts.iter().all(|part| is_name(part)) {
        Ok(parts)
    } else {
        Err("has an invalid component: \".\", \"..\", empty, with NUL, or longer than 255 bytes")
    }
}

/// Checks a path that a caller has named.
///
/// # Errors
/// Fails with a description of what is wrong.
pub fn named(path: &[u8]) -> Result<(), &'static str> {
    match path {
        [] => Err("is empty"),
        path if path.contains(&0) => Err("has a NUL byte"),
        path if path.len() > MAX_PATH => Err("has more than 4095 bytes"),
        _ => Ok(()),
    }
}

/// Splits a path of a caller into the directory and the name in it. The name is empty if the path ends with
/// "." or "..", or is "/".
pub fn split(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().rposition(|byte| *byte != b'/').map_or(0, |at| at + 1);
    let trimmed = &path[..end];
    let (directory, name) = match trimmed.iter().rposition(|byte| *byte == b'/') {
        Some(0) => (&trimmed[..1], &trimmed[1..]),
        Some(at) => (&trimmed[..at], &trimmed[at + 1..]),
        None => (&b"."[..], trimmed),
    };
    if is_name(name) { (directory, name) } else { (path, b"") }
}

/// Appends a name to a path.
pub fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match path {
        [] => name.to_vec(),
        path => [path, b"/", name].concat(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_leads_out_is_no_path() {
        for wrong in ["/", "/etc", "..", "a/../b", "a//b", "a/", "./a", "a/.", "a\0b"] {
            assert!(parts(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
        assert!(parts(&vec![b'a'; 256]).is_err() && parts("a/".repeat(300).as_bytes()).is_err());
        assert_eq!(parts(b"a/b c/\xff").unwrap(), [&b"a"[..], b"b c", b"\xff"]);
        assert!(parts(b"").unwrap().is_empty());
    }

    #[test]
    fn paths_are_split_as_people_mean_them() {
        for (path, directory, name) in [
            ("/etc/hosts", "/etc", "hosts"),
            ("/etc/", "/", "etc"),
            ("a", ".", "a"),
            ("a/b//", "a", "b"),
            ("/", "/", ""),
            ("..", "..", ""),
            ("a/..", "a/..", ""),
        ] {
            let found = split(path.as_bytes());
            assert_eq!(found, (directory.as_bytes(), name.as_bytes()), "{path}");
        }
    }

    proptest! {
        /// Every accepted path leads to something below, by names only.
        #[test]
        fn no_path_leads_out(path in proptest::collection::vec(
            prop_oneof![Just(b'/'), Just(b'.'), Just(0), any::<u8>()], 0..40,
        )) {
            if let Ok(parts) = parts(&path) {
                prop_assert!(!path.starts_with(b"/") && !path.contains(&0));
                prop_assert!(parts.iter().all(|part| is_name(part)));
                prop_assert_eq!(parts.join(&b'/'), path);
            }
        }

        #[test]
        fn what_was_split_is_a_name(path in proptest::collection::vec(
            prop_oneof![Just(b'/'), Just(b'.'), any::<u8>()], 0..20,
        )) {
            let (_, name) = split(&path);
            prop_assert!(name.is_empty() || is_name(name));
        }
    }
}
