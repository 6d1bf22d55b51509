use proptest::prelude::*;

use super::*;

const KEY: &str = "ed25519:MCowBQYDK2VwAyEAa72vA2BgKOo5TFtkXTTR/kXMl5gcR0rtF7JG5i0kFGk=";
const PRIVATE: &str = "MC4CAQAwBQYDK2VwBCIEIBZBOhk6citXRfIysGfV6lrU6rTMdaSAQJc2xNbazkxZ";

/// The key with this number in it.
fn key(number: u8) -> PublicKey {
    key_of(&[number; 32])
}

fn key_of(bytes: &[u8]) -> PublicKey {
    let head = [0x30, 0x2a, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 3, 0x21, 0];
    PublicKey::from_spki(&[&head, bytes].concat()).unwrap()
}

fn plain(number: u8) -> String {
    line(&key(number), false, &[""; 0], "")
}

/// Returns the error for the text of a file.
fn refused(text: &str) -> String {
    parse("hosts.d/a.pub", text).expect_err(text).to_string()
}

#[test]
fn every_part_of_a_line_is_read() {
    let text = format!(
        "# The hosts of rack 4\n\n{KEY}\tca  role=status,freeze # from ops, 2024\r\n  {}#not\n",
        plain(7) + " "
    );
    let anchors = parse("credential", &text).unwrap();
    assert_eq!(anchors.len(), 2);
    let first = &anchors[0];
    // openssl pkey -pubout -outform DER | openssl dgst -sha256 -binary | base64
    assert_eq!(first.fingerprint.to_string(), "SHA256:q9+Kk9Hd3RgmHlFFDcXtgJ0H2p2SLTUmYF4/S1WYj/Y");
    assert_eq!((first.is_ca, first.comment.as_str()), (true, "from ops, 2024"));
    assert_eq!(first.roles, ["status", "freeze"]);
    assert_eq!(first.origin.to_string(), "credential:3");
    let second = &anchors[1];
    assert_eq!((second.public_key, second.is_ca, second.roles.len()), (key(7), false, 0));
    assert_eq!((second.comment.as_str(), second.origin.line), ("not", 4));
}

#[test]
fn a_mistake_is_told_with_its_line_and_what_to_do() {
    for (name, text, expected) in [
        ("nothing", String::new(), "hosts.d/a.pub:1: it has no key"),
        ("only comments", format!("# {KEY}\n\n#\n"), "hosts.d/a.pub:3: it has no key"),
        ("no Base64", "ed25519:MCow*".to_owned(), ":1: the key is not Base64"),
        ("Base64 cut off", KEY[..KEY.len() - 2].to_owned(), ":1: the key is not Base64, or it is cut off"),
        ("Base64 goes on", format!("{KEY}AAAA"), ":1: the key is not Base64"),
        ("a shorter key", KEY[..40].to_owned(), ":1: the key is cut off: it has 24 of 44 bytes"),
        ("a word", format!("{KEY} root"), ":1: unknown word \"root\""),
        ("a comment without its mark", format!("{KEY} ops-2024"), "a comment begins with `#`"),
        ("a role", format!("\n{KEY} role=status,root"), ":2: unknown role \"root\"; the roles are status,"),
        ("no role", format!("{KEY} role="), ":1: unknown role \"\""),
        ("a role twice", format!("{KEY} role=exec,exec"), ":1: a role is given twice"),
        ("roles twice", format!("{KEY} role=exec role=status"), ":1: `role=` is given twice"),
        ("ca twice", format!("{KEY} ca ca"), ":1: `ca` is given twice"),
        ("a prefix", "rsa:AAAA".to_owned(), ":1: \"rsa\" is not a key; a line is `ed25519:"),
        ("another case", KEY.replace("ed", "Ed"), ":1: \"Ed25519\" is not a key"),
        ("OpenSSH", "ssh-ed25519 AAAAC3NzaC1lZDI1 me".to_owned(), ":1: this is an OpenSSH key"),
        ("a fingerprint", "SHA256:q9+Kk9Hd".to_owned(), ":1: this is the fingerprint of a key"),
        ("PEM", "-----BEGIN PUBLIC KEY-----\nMCow\n".to_owned(), ":1: this is PEM"),
        (
            "a control character",
            format!("{KEY} # \u{1b}[31m"),
            ":1: the line has a control character (U+001B)",
        ),
        ("a duplicate", format!("{KEY}\n# again\n{KEY} ca"), "j/Y is already in line 1"),
        ("a long line", format!("{KEY} # {}", "x".repeat(MAX_LINE)), ":1: the line has more than 4096 bytes"),
        ("zeros", format!("ed25519:MCowBQYDK2VwAyEA{}=", "A".repeat(43)), ":1: this key is weak"),
    ] {
        let said = refused(&text);
        assert!(said.starts_with("hosts.d/a.pub:") && said.contains(expected), "{name}: {said}");
    }
}

#[test]
fn a_private_key_is_told_as_one_and_not_repeated() {
    let pem = format!("-----BEGIN PRIVATE KEY-----\n{PRIVATE}\n-----END PRIVATE KEY-----\n");
    let with_prefix = format!("ed25519:{PRIVATE}");
    for text in [pem.as_str(), PRIVATE, &with_prefix, "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz"] {
        let said = refused(text);
        assert!(said.contains(":1: this is a private key"), "{said}");
    }
    for text in [with_prefix, PRIVATE.to_owned(), format!("{KEY} {PRIVATE}"), format!("{KEY} role={PRIVATE}")]
    {
        let said = refused(&text);
        assert!(!said.contains(&PRIVATE[30..40]), "{said}");
    }
}

#[test]
fn there_may_be_so_many_keys_and_no_more() {
    let text = |count: u8| (1..=count).map(|number| plain(number) + "\n").collect::<String>();
    assert_eq!(parse("a", &text(64)).unwrap().len(), 64);
    assert!(refused(&text(65)).contains(":65: there are more than 64 keys"));
    let (one, more) = (parse("a", &text(64)).unwrap(), parse("b", &plain(65)).unwrap());
    assert_eq!(merge([one.clone(), one.clone()]).unwrap(), one);
    assert_eq!(merge([one, more]).unwrap_err().origin.to_string(), "b:1");
}

#[test]
fn one_key_from_two_places_has_to_say_the_same() {
    let read = |place: &str, words: &str| parse(place, &format!("{KEY}{words}")).unwrap();
    let first = read("a", " role=exec,status # mine");
    let merged = merge([first.clone(), read("b", " role=status,exec # yours")]).unwrap();
    assert_eq!(merged, first);
    for words in ["", " role=exec", " role=exec,status ca"] {
        let said = merge([first.clone(), read("b", words)]).unwrap_err().to_string();
        assert!(
            said.starts_with("b:1: the key SHA256:q9+") && said.contains("also in a:1"),
            "{words}: {said}"
        );
    }
}

#[test]
fn a_comment_cannot_leave_its_line() {
    let written = line(&key(1), false, &["exec"], "# x\ny\u{85}z\n");
    assert_eq!(written, plain(1) + " role=exec # x y z");
    let long = line(&key(1), true, &ROLES, &"ä".repeat(MAX_LINE));
    assert_eq!(parse("a", &long).unwrap()[0].roles.len(), ROLES.len());
}

proptest! {
    #[test]
    fn a_line_is_read_as_it_is_written(
        bytes: [u8; 32], is_ca: bool, roles in prop::sample::subsequence(ROLES.to_vec(), 0..=ROLES.len()), comment: String,
    ) {
        let public_key = key_of(&bytes);
        let written = line(&public_key, is_ca, &roles, &comment);
        let read = parse("a", &written);
        prop_assert!(read.is_ok(), "{written:?}: {read:?}");
        let anchor = read.unwrap().remove(0);
        prop_assert_eq!((anchor.public_key, anchor.is_ca), (public_key, is_ca));
        prop_assert_eq!(&anchor.roles, &roles);
        prop_assert_eq!(line(&public_key, is_ca, &roles, &anchor.comment), written);
    }

    #[test]
    fn any_text_is_read_or_refused(text: String) {
        prop_assert!(parse("a", &text).is_err());
    }

    #[test]
    fn what_looks_like_lines_is_read_or_refused(
        pieces in prop::collection::vec(prop::sample::select(vec![
            KEY, "ed25519:", " ca", " role=", "exec", ",", " ", "#", "\n", "\r", "MCow", "=", "\u{feff}", "ß",
        ]), 0..12),
    ) {
        let text = pieces.concat();
        match parse("a", &text) {
            Ok(anchors) => prop_assert!(anchors.iter().all(|anchor| text.contains(&plain_of(anchor)))),
            Err(error) => prop_assert!(error.origin.line <= text.lines().count().max(1)),
        }
    }
}

fn plain_of(anchor: &Anchor) -> String {
    line(&anchor.public_key, false, &[""; 0], "")
}
