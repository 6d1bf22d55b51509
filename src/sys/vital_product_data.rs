//! The pages of SCSI's vital product data in which a disk says who it is.

/// Association of an identifier: the disk itself, not its port or target.
const OF_THE_DISK: u8 = 0;
const BINARY: u8 = 1;
const TEXT: u8 = 2;
const VENDORS_OWN: u8 = 0;
const EUI_64: u8 = 2;
const NAA: u8 = 3;

/// Returns the serial number in page 80h without its padding; `None` if it is empty.
pub fn serial(page: &[u8]) -> Option<&[u8]> {
    Some(trim(body(page)?)).filter(|serial| !serial.is_empty())
}

/// Identifiers of a disk from page 83h.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Designation<'a> {
    /// The text that its vendor gave it, as which QEMU shows `device_id`.
    pub text: Option<&'a [u8]>,
    /// World-wide name, such as `naa.5000000000000102` or `eui.0025385b71b00d1c`.
    pub name: Option<String>,
}

/// Page 83h: the identifiers of the disk; those of the port and of the target that it is at are passed over.
pub fn designation(page: &[u8]) -> Designation<'_> {
    let mut found = Designation::default();
    let mut rest = body(page).unwrap_or_default();
    while let Some(([set, kind, _, length], after)) = rest.split_first_chunk::<4>() {
        let Some(value) = after.get(..usize::from(*length)) else { break };
        rest = after.get(value.len()..).unwrap_or_default();
        let (set, of, kind) = (set & 0x0f, (kind >> 4) & 3, kind & 0x0f);
        if of != OF_THE_DISK || value.is_empty() {
            continue;
        }
        match (set, kind) {
            (TEXT, VENDORS_OWN) if found.text.is_none() => {
                found.text = Some(trim(value)).filter(|text| !text.is_empty());
            }
            // An NAA name is better known than an EUI-64 one, if there are both.
            (BINARY, NAA) if !found.name.as_ref().is_some_and(|name| name.starts_with("naa.")) => {
                found.name = Some(format!("naa.{}", hexadecimal(value)));
            }
            (BINARY, EUI_64) if found.name.is_none() => {
                found.name = Some(format!("eui.{}", hexadecimal(value)));
            }
            _ => {}
        }
    }
    found
}

/// Returns the contents of a page after its header, limited to the length that the header states.
fn body(page: &[u8]) -> Option<&[u8]> {
    let ([_, _, high, low], rest) = page.split_first_chunk::<4>()?;
    rest.get(..usize::from(u16::from_be_bytes([*high, *low])))
}

/// Without NUL bytes and white space at both ends.
pub fn trim(mut text: &[u8]) -> &[u8] {
    let pads = |byte: &u8| *byte == 0 || byte.is_ascii_whitespace();
    while let [first, rest @ ..] = text
        && pads(first)
    {
        text = rest;
    }
    while let [rest @ .., last] = text
        && pads(last)
    {
        text = rest;
    }
    text
}

fn hexadecimal(bytes: &[u8]) -> String {
    let digit = |half: u8| char::from_digit(u32::from(half), 16).unwrap_or_default();
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0x0f)]).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn serials() {
        for (page, expected) in [
            (b"\0\x80\0\x08 data-1 ".as_slice(), Some(b"data-1".as_slice())),
            (b"\0\x80\0\x04a b\0", Some(b"a b")),
            (b"\0\x80\0\x03\xff\xfe1", Some(b"\xff\xfe1")),
            (b"\0\x80\0\x04 \0 \0", None),
            (b"\0\x80\0\0", None),
            (b"\0\x80\0\x09data-1", None),
            (b"\0\x80", None),
        ] {
            assert_eq!(serial(page), expected, "{page:?}");
        }
    }

    #[test]
    fn the_designation_of_a_disk_and_not_of_its_port() {
        let text = b"\x02\0\0\x06ua-vol".as_slice();
        let port = b"\x01\x13\0\x08\x50\0\0\0\0\0\0\x09";
        let naa = b"\x01\x03\0\x08\x50\0\0\0\0\0\x01\x02";
        let eui = b"\x01\x02\0\x08\0\x25\x38\x5b\x71\xb0\x0d\x1c";
        let page = |parts: &[&[u8]]| {
            let body = parts.concat();
            [&[0, 0x83, 0, u8::try_from(body.len()).unwrap()], body.as_slice()].concat()
        };
        let found = |parts: &[&[u8]]| {
            let page = page(parts);
            let designation = designation(&page);
            (designation.text.map(<[u8]>::to_vec), designation.name)
        };
        let (vol, naa_name) = (Some(b"ua-vol".to_vec()), Some("naa.5000000000000102".to_owned()));
        assert_eq!(found(&[text, port, naa]), (vol.clone(), naa_name.clone()));
        assert_eq!(found(&[eui, naa, text]), (vol, naa_name));
        assert_eq!(found(&[port, eui]), (None, Some("eui.0025385b71b00d1c".to_owned())));
        assert_eq!(found(&[port]), (None, None));
        // One that is cut off is not half a name.
        let whole = page(&[naa]);
        assert_eq!(designation(&whole[..whole.len() - 1]), Designation::default());
    }

    proptest! {
        #[test]
        fn any_bytes_will_do(bytes: Vec<u8>) {
            prop_assert!(serial(&bytes).is_none_or(|serial| !serial.is_empty() && serial.len() <= bytes.len()));
            let found = designation(&bytes);
            prop_assert!(found.text.is_none_or(|text| !text.is_empty()));
            prop_assert!(found.name.is_none_or(|name| name.len() > 4));
        }
    }
}
